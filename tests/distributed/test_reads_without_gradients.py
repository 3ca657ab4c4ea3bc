"""Weights that eager code reads where gradients are off, and writes into what it has read."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import MutatedParameterError
from fsdp_passes.unit import unit_of
from tests.distributed.checks import call_of, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train

HERE = "tests.distributed.test_reads_without_gradients"
DIM = 12
UNITS = ["layers.*", "head"]
WAYS = ["fallback", "compiled layers", "aot_eager"]


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self) -> Tensor:
        return self.weight


class Model(nn.Module):
    def __init__(self, how: str = "", num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_layers))
        self.head = Returns() if how == "returned" else nn.Linear(DIM, DIM)
        self.how = how
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        off = torch.inference_mode() if self.how == "inference_mode" else torch.no_grad()
        with off:
            weight = self.head() if self.how == "returned" else self.head.weight
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, weight).square().mean()


class Norms(Model):
    """Reads one layer after the other, and the first one again; keeps track of what is kept of each."""

    def forward(self, x: Tensor) -> Tensor:
        copies = []
        norm = torch.zeros(())
        for layer in [*self.layers, self.layers[0]]:
            with torch.no_grad():
                weight = layer.weight
                norm = norm + weight.norm()
                copies.append(weakref.ref(weight))
                del weight
            gc.collect()
            self.seen.append(sum(copy() is not None for copy in copies))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() * norm


class Writes(Model):
    """Writes at a place of the forward; `how` says where, and what it does with the copy."""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "behind all layers":
            x = self.compute(x)
        self.write()
        with torch.set_grad_enabled(self.how != "ahead of layers without gradients" and torch.is_grad_enabled()):
            x = x if self.how == "behind all layers" else self.compute(x)
        return x.square().mean() + self.head.bias.square().sum()

    def compute(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    @torch.compiler.disable
    def write(self) -> None:
        with torch.no_grad():
            weight = self.layers[0].weight
            if self.how == "into a copy that is no longer kept":
                for layer in self.layers[1:]:
                    assert layer.weight.shape == (DIM, DIM)
            weight.t().mul_(2)


WRITES = ["ahead of layers", "ahead of layers without gradients", "behind all layers"]
WRITES += ["into a copy that is no longer kept"]


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _called(model: nn.Module, way: str) -> Any:
    torch._dynamo.reset()
    if way != "compiled layers":
        return call_of(model, way)
    for layer in [*model.layers, model.head]:
        layer.compile(backend=overlap_fsdp, options={"inner": "aot_eager"})
    return model


def read_and_used(way: str, how: str) -> None:
    model, reference = build(lambda: Model(how))
    fully_shard(model, units=UNITS)
    batches = float_batches(3, 8, DIM)
    found = train(model, batches, sharded=True, call=_called(model, way))
    expected = train(reference, batches, sharded=False)
    assert expected.grads["head.weight"].abs().max() > 1e-3
    assert_same(found, expected)


def read_and_used_in_tensor_parallel_layers() -> None:
    """By a unit's own code."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                weight = self.weight
            return F.linear(x, weight, self.bias)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Own(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).square().mean()  # type: ignore[no-any-return]

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, reference = build(Model)
    parallelize_module(model.head, mesh["tp"], ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate()))
    fully_shard(model, mesh=mesh["dp"], units=["head"])
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    for module in (model, reference):
        module(x).backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad)


def frozen_in_between() -> list[bool]:
    """Returns whether reads before and behind a change of `requires_grad` have a gradient."""
    found = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            for is_trained in (True, False, True):
                param.requires_grad_(is_trained)
                found.append(self.layer.weight.requires_grad)
            return self.layer(x)  # type: ignore[no-any-return]

    model = fully_shard(Model(), units=["layer"])
    (param,) = (param for name, param in model.named_parameters() if name == "layer.weight")
    model(torch.ones(2, DIM)).sum().backward()
    return found


def norms(is_with_grad: bool) -> list[int]:
    """Returns the most copies that were alive at once of what the forward had read."""
    model, reference = build(lambda: Norms(num_layers=6))
    fully_shard(model, units=UNITS)
    batches = float_batches(2, 8, DIM)
    with torch.set_grad_enabled(is_with_grad):
        if is_with_grad:
            assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))
        else:
            torch.testing.assert_close(model(*batches[0]), reference(*batches[0]))
    unit = unit_of(model)
    assert unit is not None
    assert not unit.context.copies
    return model.seen  # type: ignore[no-any-return]


def written(way: str, how: str, has_backward: bool) -> None:
    """The forward, its backward, or the next forward raises; what comes then goes on with the values of before."""
    model, reference = build(lambda: Writes(how))
    fully_shard(model, units=UNITS)
    call = _called(model, way)
    ((x,),) = float_batches(1, 8, DIM)
    with pytest.raises(MutatedParameterError, match=r"^layers\.0\.weight"):  # noqa: PT012
        with torch.set_grad_enabled(has_backward):
            loss = call(x)
        if has_backward:
            loss.backward()
        else:
            call(x)
    for module in (model, reference):
        module.how, module.write = "", lambda: None
        module.zero_grad()
    batches = float_batches(2, 8, DIM)
    found = train(model, batches, sharded=True, call=_called(model, way))
    assert_same(found, train(reference, batches, sharded=False))


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "returned"])
@pytest.mark.parametrize("way", ["fallback", "aot_eager"])
def test_a_weight_that_was_read_without_gradients_has_one_where_it_is_used(
    two_ranks: RankPool, way: str, how: str
) -> None:
    two_ranks.run(f"{HERE}:read_and_used", way=way, how=how)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_so_has_one_of_a_compiled_layer(two_ranks: RankPool, how: str) -> None:
    two_ranks.run(f"{HERE}:read_and_used", way="compiled layers", how=how)


def test_a_tensor_parallel_weight_that_was_read_without_gradients_has_one_where_it_is_used(
    two_ranks: RankPool,
) -> None:
    two_ranks.run(f"{HERE}:read_and_used_in_tensor_parallel_layers")


def test_a_weight_that_is_frozen_between_two_reads_is_read_frozen(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:frozen_in_between") == [[True, False, True]] * 2


@pytest.mark.parametrize("is_with_grad", [False, True])
def test_copies_of_two_units_are_kept_whoever_reads_all(two_ranks: RankPool, is_with_grad: bool) -> None:
    for seen in two_ranks.run(f"{HERE}:norms", is_with_grad=is_with_grad):
        assert seen == [1, 2, 2, 2, 2, 2, 2] * (2 if is_with_grad else 1)


@pytest.mark.parametrize("has_backward", [False, True])
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_into_what_was_read_around_a_unit_is_not_lost_in_silence(
    two_ranks: RankPool, way: str, how: str, has_backward: bool
) -> None:
    two_ranks.run(f"{HERE}:written", way=way, how=how, has_backward=has_backward)
