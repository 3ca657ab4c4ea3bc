"""`warmup` compiles forward and backward and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp, warmup
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_warmup"
DIM = 12


class Model(nn.Module):
    """Layers with statistics, a counter and dropout; optionally a graph break in the middle."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)) for _ in range(3))
        self.breaks = breaks
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.breaks and index == 0:
                torch._dynamo.graph_break()
        return (nn.functional.dropout(x, 0.5, self.training) + x).square().mean()


def state(model: nn.Module) -> dict[str, Any]:
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    grads = {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **grads, "random": torch.get_rng_state()}


def warm_up_changes_nothing(breaks: bool, inner: str) -> None:
    model, _ = build(lambda: Model(breaks=breaks))
    fully_shard(model, units=["layers.*"])
    (x,) = my_share(float_batches(1, 8, DIM)[0])
    model(x).backward()  # so that there are gradients
    calls = model.calls
    before = state(model)
    options = {"inner": inner, "inductor": {"fx_graph_cache": False}} if inner == "inductor" else {"inner": inner}
    call = torch.compile(model, backend=overlap_fsdp, options=options)
    with record_compilations() as records:
        for turn in range(dist.get_world_size()):  # one after the other: a collective in it would wait for ever
            if turn == dist.get_rank():
                warmup(call, x)
            dist.barrier()
    after = state(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert model.calls == calls
    assert [[graph.phase for graph in record.graphs] for record in records] == [["forward", "backward"]] * len(records)
    assert len(records) == 1 + breaks
    with record_compilations() as again, torch.compiler.set_stance("fail_on_recompile"):
        call(x).backward()
    assert again == []


@pytest.mark.parametrize(("breaks", "inner"), [(False, "aot_eager"), (True, "aot_eager"), (False, "inductor")])
def test_everything_is_compiled_nothing_is_sent_and_nothing_changes(
    two_ranks: RankPool, breaks: bool, inner: str
) -> None:
    two_ranks.run(f"{HERE}:warm_up_changes_nothing", breaks=breaks, inner=inner)


def train_after_warm_up() -> None:
    """With lengths that become symbolic: the second warm-up compiles for all, a third only checks that."""
    model, reference = build(lambda: nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)]))
    fully_shard(model, units=["*"])
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    for rows in (2, 3):
        warmup(compiled, torch.ones(rows, DIM))
    with record_compilations() as records:
        warmup(compiled, torch.ones(5, DIM))
        batches = float_batches(3, 8, DIM)
        found = train(model, batches, sharded=True, call=lambda x: compiled(x).square().mean())
    assert records == []
    assert_same(found, train(reference, batches, sharded=False, call=lambda x: reference(x).square().mean()))


def test_training_goes_on_from_the_warm_up_with_the_unsharded_models_numbers(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:train_after_warm_up")
