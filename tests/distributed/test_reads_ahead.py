"""Weights that eager code reads outside of their unit: ahead of its forward, around it, behind a graph break."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import MutatedParameterError
from fsdp_passes.unit import unit_of
from tests.distributed.checks import call_of, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train, whole

HERE = "tests.distributed.test_reads_ahead"


class ReadsAhead(nn.Module):
    def __init__(self, reads_first_without_grad: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.reads_first_without_grad = reads_first_without_grad

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_first_without_grad:
            with torch.no_grad():
                x = x * self.first.weight.mean()
        weight = self.first.weight
        x = self.second(torch.tanh(self.first(x)))
        return F.linear(x, weight).square().mean()


class ReadsBehindBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return (self._project(x) if torch.is_grad_enabled() else x).square().mean()

    @torch.compiler.disable
    def _project(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first.weight.mean()
        return F.linear(x * scale, self.first.weight)


class ReadsDetached(nn.Module):
    """Of the last layer, ahead of the others: the backward of that comes when the last layer's is over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.layers[0](x), self.layers[4].weight.detach())
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


class ReadsAtFirst(nn.Module):
    """In the first forward all layers; in the second not even the first layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == 1:
            with torch.no_grad():
                x = x * sum(layer.weight.norm() for layer in self.layers)
        weight = self.layers[0].weight if self.num_forwards == 3 else None
        for layer in self.layers[self.num_forwards - 1 :]:
            x = torch.tanh(layer(x))
        return (x if weight is None else F.linear(x, weight)).square().mean()


class ChunkedHead(nn.Module):
    """The root reads the head's weight in chunks, each computed again in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        losses = [checkpoint(self._loss, chunk, use_reentrant=True) for chunk in x.chunk(2)]
        return torch.stack(losses).sum() / x.numel()

    def _loss(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias).square().sum()


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def read_ahead(way: str) -> None:
    """A forward without gradients may come between forward and backward, and others behind."""
    for is_frozen in (False, True):
        for between in ("nothing", "a forward without gradients", "a read without gradients"):
            model, reference = build(lambda b=between: ReadsAhead(b == "a read without gradients"))  # type: ignore[misc]
            for module in (model, reference):
                module.first.weight.requires_grad_(not is_frozen)
            fully_shard(model, units=["first", "second"])
            if way == "compiled layers":
                for layer in (model.first, model.second):
                    layer.compile(backend=overlap_fsdp, options={"inner": "aot_eager"})

            def call(x: Tensor, model: nn.Module = model, between: str = between) -> Tensor:
                loss = model(x)
                if between == "a forward without gradients":
                    with torch.no_grad():
                        assert torch.equal(model(x), loss)
                return loss

            batches = float_batches(3, 8, 12)
            found = train(model, batches, sharded=True, call=call)
            assert_same(found, train(reference, batches, sharded=False))
            with torch.no_grad():
                model(batches[0][0])
            assert_released(model)


def copies_without_gradients() -> list[int]:
    """Returns of how many units there are copies behind each layer, of which eager code reads a weight."""
    found: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.project(torch.tanh(layer(x)), layer)
            return x

        @torch.compiler.disable
        def project(self, x: Tensor, layer: nn.Module) -> Tensor:
            x = F.linear(x, layer.weight)
            unit = unit_of(layer)
            found.extend([] if unit is None else [len(unit.context.copies)])
            return x

    model, reference = build(Model)
    fully_shard(model, units="layers.*")
    ((x,),) = float_batches(1, 8, 12)
    with torch.no_grad():
        torch.testing.assert_close(call_of(model, "aot_eager")(x), reference(x))
    return found


def read_behind_a_break() -> None:
    """First without gradients, which must not be all that is remembered of it."""
    model, reference = build(ReadsBehindBreak)
    fully_shard(model, units=["first", "second"])
    compiled = call_of(model, "aot_eager")

    def call(x: Tensor) -> Tensor:
        loss = compiled(x)
        with torch.no_grad():
            compiled(x)
        return loss

    batches = float_batches(3, 8, 12)
    found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(reference, batches, sharded=False))
    assert_released(model)


def assert_released(model: nn.Module) -> None:
    unit = unit_of(model.first)
    assert unit is not None
    assert not unit.is_unsharded
    assert not unit.context.copies


def two_forwards_and_two_backwards(way: str) -> None:
    """Twice through the first forward, too."""
    for is_frozen in (False, True):
        torch._dynamo.reset()
        model, reference = build(ReadsAhead if way == "fallback" else ReadsBehindBreak)
        for module in (model, reference):
            module.first.weight.requires_grad_(not is_frozen)
        fully_shard(model, units=["first", "second"])
        (x,), (y,) = float_batches(2, 8, 12)
        for call in (call_of(model, way), reference):
            losses = [call(x), call(y)]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            losses[0].backward()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None)
            if param.grad is not None:
                torch.testing.assert_close(whole(param.grad), other.grad)
        assert_released(model)


def writes_between_forwards() -> None:
    """What a forward has read, and no backward followed, is gathered anew: a write through `.data` is seen."""
    model, reference = build(ReadsAhead)
    fully_shard(model, units=["first", "second"])
    ((x,),) = float_batches(1, 8, 12)
    model(x)
    for module in (model, reference):
        for param in module.parameters():
            (param.data.to_local() if isinstance(param.data, DTensor) else param.data).mul_(2)
    for is_with_grad in (False, True):
        with torch.set_grad_enabled(is_with_grad):
            torch.testing.assert_close(model(x), reference(x))
    model(x).backward()
    assert_released(model)


def chunked() -> None:
    model, reference = build(ChunkedHead)
    fully_shard(model, units=["first", "head"])
    batches = float_batches(3, 8, 12)
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def written_around_a_unit() -> None:
    class Writes(ReadsAhead):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.mul_(2)
            return super().forward(x)

    model = fully_shard(build(Writes)[0], units=["first", "second"])
    with pytest.raises(MutatedParameterError, match=r"first\.weight"):
        model(torch.ones(8, 12))


def detached() -> None:
    model, reference = build(ReadsDetached)
    fully_shard(model, units=["layers.*"])
    batches = float_batches(2, 8, 12)
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def whole_from_before() -> None:
    """Whether the user's `unshard()` made it whole or an earlier backward has left it so."""
    for is_held in (True, False):
        model, reference = build(ReadsAhead)
        fully_shard(model, units=["first", "second"])
        if is_held:
            model.first.unshard()
        else:
            model.set_reshard_after_backward(False)
        batches = float_batches(3, 8, 12)
        assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def read_once() -> list[int]:
    """Returns how many layers were whole at once in the backward of each step."""
    model, reference = build(ReadsAtFirst)
    fully_shard(model, units=["layers.*"])
    units = [unit for unit in map(unit_of, model.layers) if unit is not None]
    most = [0]
    for layer in model.layers:
        layer.register_full_backward_pre_hook(
            lambda *_: most.append(max(most.pop(), sum(unit.is_unsharded for unit in units)))
        )

    def call(x: Tensor) -> Tensor:
        most.append(0)
        return model(x.requires_grad_())  # type: ignore[no-any-return]

    batches = float_batches(3, 8, 12)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))
    return most[1:]


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fallback", "compiled layers"])
def test_a_weight_that_is_read_ahead_of_its_unit_trains_as_unsharded(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:read_ahead", way=way)


def test_a_weight_that_eager_code_reads_stays_whole_through_a_forward_without_gradients(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:read_behind_a_break")


def test_copies_do_not_add_up_from_layer_to_layer_where_autograd_keeps_none(two_ranks: RankPool) -> None:
    for num_units in two_ranks.run(f"{HERE}:copies_without_gradients"):
        assert [1 <= num <= 2 for num in num_units] == [True] * 4, num_units


@pytest.mark.parametrize("way", ["fallback", "aot_eager"])
def test_a_weight_that_was_read_ahead_is_whole_in_each_of_several_backwards(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:two_forwards_and_two_backwards", way=way)


def test_a_weight_that_was_read_ahead_is_gathered_anew_for_the_next_forward(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:writes_between_forwards")


def test_a_weight_that_reentrant_checkpoints_read_is_whole_for_each_of_them(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:chunked")


def test_a_weight_that_code_around_its_unit_writes_is_named(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:written_around_a_unit")


def test_a_weight_that_was_read_detached_is_whole_until_the_backward_has_ended(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:detached")


def test_a_weight_that_was_whole_already_stays_so_for_who_reads_it_ahead(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:whole_from_before")


def test_what_one_forward_has_read_is_not_gathered_for_the_backwards_of_others(two_ranks: RankPool) -> None:
    for at_once in two_ranks.run(f"{HERE}:read_once"):
        assert max(at_once) <= 1, at_once
