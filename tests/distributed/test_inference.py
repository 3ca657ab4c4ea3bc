"""Forwards without a backward, whole graphs and changing shapes, between training steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from fsdp_passes import fully_shard
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import WAYS, call_of, collectives, compiled
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train

HERE = "tests.distributed.test_inference"


class WithDropout(nn.Module):
    """Dropout acts on ones, so that its mean shows which mode ran whatever the random numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 64, bias=False)
        self.dropout = nn.Dropout(1.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def evaluation_between_steps(way: str) -> None:
    model, reference = build(WithDropout)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    batches = token_batches(1, 4, 8) * 6
    first = call(*my_share(batches[0])).item()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step, batch in enumerate(batches):
        local = my_share(batch)
        contexts = [torch.no_grad, torch.inference_mode, torch.enable_grad]
        for context in contexts[step % 3 :] + contexts[: step % 3]:
            for training in (False, True):
                model.train(training)
                reference.train(training)
                with context():
                    found, expected = call(*local), reference(*local)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
                assert found.requires_grad == (context is torch.enable_grad)
                assert found.is_inference() == (context is torch.inference_mode)
        losses = [call(*local), reference(*batch)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert call(*local).item() < first - 0.5, "it learned nothing that a stale weight would show"


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_between_training_steps_sees_the_current_weights_and_leaves_training_alone(
    two_ranks: RankPool, way: str
) -> None:
    two_ranks.run(f"{HERE}:evaluation_between_steps", way=way)


def evaluation_first() -> None:
    """The first call of the compiled model is one without gradients."""
    for context in (torch.no_grad, torch.inference_mode):
        model, reference = build(lambda: Transformer(layers=2, hidden=64))
        fully_shard(model, units=["layers.*"])
        call = compiled(model)
        batches = token_batches(3, 4, 8)
        with context(), record_compilations() as records:
            model.eval()
            found = call(*my_share(batches[0]))
            torch.testing.assert_close(found, reference(*my_share(batches[0])), rtol=0, atol=1e-5)
            model.train()
        assert collectives(records[0], "forward") == [
            "all_gather root float32 1",  # the embedding
            "all_gather layers.0 float32 11",
            "all_gather layers.1 float32 11",
            "all_gather root float32 3",  # norm and head
        ]
        assert collectives(records[0], "backward") == []
        found = train(model, batches, sharded=True, call=call)
        assert_same(found, train(reference, batches, sharded=False))


def test_a_model_that_was_evaluated_first_trains_as_unsharded(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:evaluation_first")


def evaluation_with_inductor() -> None:
    model, reference = build(lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)))
    fully_shard(model, units=["0", "2"])
    call = compiled(model, "inductor")
    x = torch.randn(4, 8)
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context():
            torch.testing.assert_close(call(x), reference(x), rtol=0, atol=1e-5)


def test_inference_graphs_compile_with_inductor(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:evaluation_with_inductor")


# ---- whole graphs, changing shapes -----------------------------------------------------------------------------------


def changing_shapes(dynamic: bool | None, shapes: list[tuple[int, int]]) -> None:
    """The unsharded model is compiled too, to count how often Dynamo compiles by itself."""
    model, reference = build(lambda: Transformer(layers=1, hidden=61))
    batches = [token_batches(1, rows, length, seed=rows * length)[0] for rows, length in shapes]
    counter = CompileCounterWithBackend("aot_eager")
    unsharded = torch.compile(copy.deepcopy(reference), backend=counter, fullgraph=True, dynamic=dynamic)
    for batch in batches:
        unsharded(*my_share(batch))
    torch._dynamo.reset()

    fully_shard(model, units=["layers.*"])
    with record_compilations() as records:
        found = train(model, batches, sharded=True, call=compiled(model, fullgraph=True, dynamic=dynamic))
    assert_same(found, train(reference, batches, sharded=False))
    assert len(records) == counter.frame_count, (len(records), counter.frame_count)
    assert len(records) <= 2 < len(set(shapes)), len(records)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("changes", ["length", "rows"])
def test_changing_shapes_compile_as_often_as_an_unsharded_model_and_train_like_it(
    two_ranks: RankPool, dynamic: bool | None, changes: str
) -> None:
    sizes = [8, 10, 12, 6]
    shapes = [(4, size) if changes == "length" else (size, 8) for size in sizes]
    two_ranks.run(f"{HERE}:changing_shapes", dynamic=dynamic, shapes=shapes)


def different_lengths_on_the_ranks() -> None:
    """Rank 0 and rank 1 have sequences of their own lengths, so that one compiles when the other does not."""
    rank = torch.distributed.get_rank()
    model, reference = build(lambda: Transformer(layers=1, hidden=61))
    fully_shard(model, units=["layers.*"])
    call = compiled(model)
    lengths = [(8, 8), (9, 8), (12, 10), (12, 8)]
    shares = [
        [token_batches(1, 2, length, seed=i * 2 + j)[0] for j, length in enumerate(pair)]
        for i, pair in enumerate(lengths)
    ]
    for pair in shares:
        call(*pair[rank]).backward()
        for batch in pair:
            (reference(*batch) / 2).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=0, atol=1e-5, msg=name)


def test_ranks_with_sequences_of_different_lengths_compile_at_different_times(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:different_lengths_on_the_ranks")
