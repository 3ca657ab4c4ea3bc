"""Forwards that call `torch.autograd.grad` or `.backward()`: a force, a gradient of an input, a loss in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.regions import num_open_regions
from fsdp_passes.unit import unit_of
from tests.distributed.checks import call_of, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train

HERE = "tests.distributed.test_backward_in_forward"
DIM = 12


class Body(nn.Module):
    """Each unit in turn; `scale` and whatever no unit has is the root's, which goes on reading it."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.last = nn.Linear(DIM, DIM) if last is None else last
        self.scale = nn.Parameter(torch.randn(DIM))

    def body(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)).square().mean()  # type: ignore[no-any-return]


class GradOfInput(Body):
    """By the root, through units that run again behind it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = self.body(x)
        (grad,) = torch.autograd.grad(self.last(y).square().sum(), x, retain_graph=True)
        return super().forward(y + self.scale * grad)


class Force(nn.Module):
    """By a unit, through the units ahead of it and one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x) @ self.outer)
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return (y + grad) @ self.outer


class GradOfOwnWeight(nn.Module):
    """By a unit that runs for the second time, through the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        if first is None:
            return torch.tanh(x @ self.weight)
        (grad,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        return (x + grad) @ self.weight


class Twice(Body):
    def __init__(self) -> None:
        super().__init__(GradOfOwnWeight())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.last(x, self.last(x)).square().mean()  # type: ignore[no-any-return]


class AuxiliaryLoss(Body):
    """Of the root, whose gradients are added to those of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x * 0.5).backward()
        return super().forward(x)


class ChunkedLoss(Body):
    """Of the last unit, each chunk with a backward of its own; the loss carries on what they made."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        leaf = x.detach().requires_grad_()
        total = torch.zeros(())
        for chunk in leaf.chunk(2):
            loss = self.last(chunk).square().sum() / x.numel()
            loss.backward()
            total = total + loss.detach()
        assert leaf.grad is not None
        return (x * leaf.grad).sum() + (total - (x * leaf.grad).sum().detach())


class OnlyUnits(AuxiliaryLoss):
    """The root reads nothing of its own: FSDP2 can do this, too."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Penalty(Body):
    """On the gradient of an input, whose backward goes through that of the units a second time."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = self.last(self.body(x)).square()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + grad.square().mean()


MODELS: dict[str, Any] = {
    "gradient of an input": GradOfInput,
    "gradient of an input by a unit": lambda: Body(Force()),
    "gradient by a unit through itself": Twice,
    "auxiliary loss": AuxiliaryLoss,
    "chunked loss": ChunkedLoss,
    "of units alone": OnlyUnits,
}
UNITS = ["layers.*", "last", "last.inner"]


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _shard(model: nn.Module, shard: Any, **how: Any) -> None:
    if isinstance(model.last, Force):
        shard(model.last.inner, **how)
    for layer in [*model.layers, model.last]:
        shard(layer, **how)
    shard(model, **how)


def trains(way: str, name: str, **how: Any) -> None:
    torch._dynamo.reset()
    model, reference = build(MODELS[name])
    _shard(model, fully_shard, **how)
    call: Any = model
    if way == "compiled layers":
        for layer in model.layers:
            layer.compile(backend=overlap_fsdp, options={"inner": "aot_eager"})
    else:
        call = call_of(model, way)
    batches = float_batches(3, 8, DIM)
    found = train(model, batches, sharded=True, call=call)
    expected = train(reference, batches, sharded=False)
    assert_same(found, expected)
    if name == "of units alone":
        twin, _ = build(MODELS[name])
        _shard(twin, fsdp2.fully_shard)
        assert_same(found, train(twin, batches, sharded=True))
    units = [unit for unit in map(unit_of, model.modules()) if unit is not None]
    assert [unit.display_name for unit in units if unit.is_unsharded and unit.reshards_after_backward] == []
    assert units[0].context.phases == {}
    assert num_open_regions() == 0


def caught() -> None:
    """A unit whose forward raises, and whose error the root catches, is released with the others."""

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not this batch")

    class Catches(Body):
        def __init__(self) -> None:
            super().__init__(Raises())

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            try:
                return self.last(x)  # type: ignore[no-any-return]
            except ValueError:
                return (x @ self.last.weight).square().mean()

    model, reference = build(Catches)
    _shard(model, fully_shard)
    batches = float_batches(3, 8, DIM)
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))
    unit = unit_of(model.last)
    assert unit is not None
    assert not unit.is_unsharded
    assert unit.context.phases == {}
    assert num_open_regions() == 0


def second_backwards(is_frozen: bool) -> None:
    """Of a gradient penalty, in the forward or by who calls the model."""
    for is_inside in (False, True):
        model, reference = build(Penalty if is_inside else Body)
        for module in (model, reference):
            module.layers[1].requires_grad_(not is_frozen)
        _shard(model, fully_shard)

        def call_of(model: nn.Module, is_inside: bool = is_inside) -> Any:
            def call(x: Tensor) -> Tensor:
                x = x.clone().requires_grad_()
                loss = model(x)
                (grad,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
                return loss + grad.square().mean()  # type: ignore[no-any-return]

            return model if is_inside else call

        batches = float_batches(3, 8, DIM)
        found = train(model, batches, sharded=True, call=call_of(model))
        assert_same(found, train(reference, batches, sharded=False, call=call_of(reference)))
        units = [unit for unit in map(unit_of, model.modules()) if unit is not None]
        assert [unit.display_name for unit in units if unit.is_unsharded] == []


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["fallback", "compiled layers"])
def test_a_forward_that_runs_a_backward_trains_as_unsharded(two_ranks: RankPool, way: str, name: str) -> None:
    two_ranks.run(f"{HERE}:trains", way=way, name=name)


# `torch.compile` makes two outputs of one graph, the gradient of one in the other is not found; also unsharded.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gradient by a unit through itself"])
def test_a_compiled_model_that_runs_a_backward_trains_as_unsharded(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(f"{HERE}:trains", way="aot_eager", name=name)


@pytest.mark.parametrize("name", MODELS)
def test_it_does_so_where_units_stay_gathered_behind_the_forward(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(f"{HERE}:trains", way="fallback", name=name, reshard_after_forward=False)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_backward_through_a_backward_trains_as_unsharded(two_ranks: RankPool, is_frozen: bool) -> None:
    two_ranks.run(f"{HERE}:second_backwards", is_frozen=is_frozen)


def test_a_unit_whose_error_was_caught_is_released(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:caught")
