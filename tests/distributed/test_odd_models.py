"""Models that are written in ways other than a list of layers; each trains as unsharded, compiled and not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from fsdp_passes import fully_shard
from fsdp_passes.errors import ForwardModeError
from tests.distributed.checks import WAYS, assert_trains_as_unsharded, call_of, compiled, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_odd_models"

DIM = 12


class Unused(nn.Module):
    """A unit that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](torch.tanh(self.layers[0](x))).square().mean()


class HalfUnused(nn.Module):
    """A unit with a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        for layer in self.layers:
            layer.extra = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, gate: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"out": [self.up(x) * torch.sigmoid(self.gate(gate)) * scale], "scale": scale}


class Keywords(nn.Module):
    """Layers that take keyword arguments and return a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            (x,) = layer(x, gate=x * 2, scale=0.5)["out"]
        return x.square().mean()


class Containers(nn.Module):
    """Parameters in lists and dicts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) / DIM) for _ in range(3))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(DIM)), "shift": nn.Parameter(torch.zeros(DIM))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return (x * self.named["scale"] + self.named["shift"]).square().mean()


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x))


class Branch(nn.Module):
    """Reads a parameter of its own before, between and after the units nested in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 1.5))
        self.leaves = nn.ModuleList(Leaf() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.leaves:
            x = leaf(x * self.scale)
        return x / self.scale


class Nested(nn.Module):
    """Units in units in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = branch(x)
        return self.head(x).square().mean()


class ChannelsLast(nn.Module):
    """Convolutions whose weights and inputs are in the channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 5, 3), nn.GELU(), nn.Conv2d(5, 6, 1)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.layers(x).square().mean()


class Wrapped(nn.Module):
    """Units whose module has no parameters but those of the units in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(nn.Sequential(Leaf(), Leaf()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            x = stack(x)
        return x.square().mean()


class Shared(nn.Module):
    """One module in two places, each of them called."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(DIM, DIM)
        self.left = nn.Sequential(shared, nn.Tanh())
        self.right = nn.Sequential(nn.Linear(DIM, DIM), shared)

    def forward(self, x: Tensor) -> Tensor:
        return (self.right(self.left(x)) + self.left(x)).square().mean()


class OtherOrder(nn.Module):
    """The forward runs the layers in an order that is not theirs, and skips back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for index in (2, 0, 3, 1):
            kept, x = x, torch.tanh(self.layers[index](x)) + kept
        return x.square().mean()


class ReadsFromOutside(nn.Module):
    """The root reads a layer's weight before and after it calls the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x @ self.layers[0].weight))
        return F.linear(self.layers[1](x), self.layers[0].weight).square().mean()


class ChunkedHead(nn.Module):
    """The loss reads the head's weight itself, chunk by chunk; the head is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        losses = [torch.logsumexp(chunk @ self.head.weight.t(), -1).sum() for chunk in x.chunk(2)]
        return torch.stack(losses).sum() / x.shape[0]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its units, and what a compiled step sends (see `assert_sends`); None where that depends on the way."""

    make: Callable[[], nn.Module]
    units: tuple[str, ...] = ()
    sends: dict[str, Any] | None = None
    dim: int = DIM


def two_layers(num_params: int = 2) -> dict[str, Any]:
    return {"gathered": {"layers.0": num_params, "layers.1": num_params}, "regathered": ["layers.1"]}


CASES = {
    "unused": Case(Unused, ("layers.*",)),
    "half_unused": Case(HalfUnused, ("layers.*",), two_layers(2)),
    "keywords": Case(Keywords, ("layers.*",)),
    "containers": Case(Containers, (), {"gathered": {"root": 5}}),
    "nested": Case(
        Nested,
        ("branches.*", "branches.*.leaves.*"),
        {
            "gathered": {
                "branches.0": 1,
                "branches.0.leaves.0": 2,
                "branches.0.leaves.1": 2,
                "branches.1": 1,
                "branches.1.leaves.0": 2,
                "branches.1.leaves.1": 2,
                "root": 2,
            },
        },
    ),
    "wrapped": Case(
        Wrapped,
        ("stacks.*.*", "stacks.*"),
        {
            "gathered": {f"stacks.{i}.{j}": 2 for i in range(2) for j in range(2)},
            "regathered": ["stacks.0.1", "stacks.1.0", "stacks.1.1"],
        },
    ),
    "channels_last": Case(ChannelsLast, ("layers.0", "layers.2", "layers.4"), dim=108),
    "shared": Case(Shared, ("left", "right")),
    "other_order": Case(OtherOrder, ("layers.*",)),
    "chunked_head": Case(
        ChunkedHead,
        ("layers.*",),
        {"gathered": {"layers.0": 2, "layers.1": 2, "root": 1}, "regathered": ["layers.1"]},
    ),
}


def trains_as_unsharded(case: str, way: str) -> None:
    chosen = CASES[case]
    assert_trains_as_unsharded(
        chosen.make,
        float_batches(3, 8, chosen.dim),
        way=way,
        shard=functools.partial(fully_shard, units=chosen.units),
        sends=chosen.sends if way != "fallback" else None,
    )


def outside_reads() -> None:
    assert_trains_as_unsharded(
        ReadsFromOutside,
        float_batches(3, 8, DIM),
        shard=functools.partial(fully_shard, units=["layers.*"]),
        sends={"gathered": {"layers.0": 2, "layers.1": 2}},
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_odd_models_train_as_unsharded(two_ranks: RankPool, case: str, way: str) -> None:
    two_ranks.run(f"{HERE}:trains_as_unsharded", case=case, way=way)


def test_compiled_code_may_read_a_weight_outside_its_module(two_ranks: RankPool) -> None:
    # Not in the fallback, where a unit is gathered only while its module runs.
    two_ranks.run(f"{HERE}:outside_reads")


class Upsampled(nn.Module):
    """A grouped convolution behind a transposed one: with PyTorch 2.14 its weight's gradient has other strides than
    those that were traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.ConvTranspose2d(5, 6, 2, stride=2), nn.GroupNorm(2, 6), nn.GELU()),
            nn.Conv2d(6, 3, 3, stride=2, padding=1, groups=3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(-1, 5, 4, 4).contiguous(memory_format=torch.channels_last)).square().mean()


def packed_convolutions() -> None:
    model, reference = build(Upsampled)
    fully_shard(model, units=["layers.*"], reshard_after_forward=False)
    batches = float_batches(3, 8, 80)
    found = train(model, batches, sharded=True, call=compiled(model, bucket_mode="packed"))
    assert_same(found, train(reference, batches, sharded=False))


def test_packed_gradients_may_have_other_strides_than_traced(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:packed_convolutions")


# ---- more than a loss ------------------------------------------------------------------------------------------------


class ReturnsWeight(nn.Module):
    """The caller regularizes the weight that the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, self.layers[0].weight, self.layers[1].weight.t()


def returned_weight(way: str) -> None:
    model, reference = build(ReturnsWeight)
    fully_shard(model, units=["layers.*"])

    def loss_of(call: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            out, first, second = call(x)
            return out.square().mean() + first.square().sum() / 100 + second.abs().sum() / 100

        return loss

    batches = float_batches(3, 8, DIM)
    found = train(model, batches, sharded=True, call=loss_of(call_of(model, way)))
    assert_same(found, train(reference, batches, sharded=False, call=loss_of(reference)))
    _, first, second = call_of(model, way)(my_share(batches[0])[0])
    assert torch.equal(first, whole(model.layers[0].weight))
    assert torch.equal(second, whole(model.layers[1].weight).t())


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_a_forward_returns_carries_its_gradient_back(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:returned_weight", way=way)


# ---- autograd switched off -------------------------------------------------------------------------------------------


class Teacher(nn.Module):
    """Reads weights for a target without gradients first, in one of several ways, and then trains them."""

    def __init__(self, off: Callable[[], Any]) -> None:
        super().__init__()
        self.off = off
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with self.off():
            with torch.no_grad():
                target = torch.tanh(self.first(x))
            with torch.enable_grad():
                unused = self.second(target)
        return (self.second(self.first(x)) - target.clone()).square().mean() + 0 * unused.sum().detach()


def autograd_off(way: str, off: Callable[[], Any]) -> None:
    model, reference = build(functools.partial(Teacher, off))
    fully_shard(model, units=["first", "second"])
    batches = float_batches(3, 8, DIM)
    found = train(model, batches, sharded=True, call=call_of(model, way))
    assert_same(found, train(reference, batches, sharded=False))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_read_without_gradients_first_train(
    two_ranks: RankPool, way: str, off: Callable[[], Any]
) -> None:
    """A graph gathers a weight once: that must not happen where autograd is switched off."""
    if way == "aot_eager" and off is torch.inference_mode and torch.__version__ < "2.12":
        pytest.skip("PyTorch 2.11 cannot compile inference_mode in code that trains, sharded or not")
    two_ranks.run(f"{HERE}:autograd_off", way=way, off=off)


class Student(nn.Module):
    """Trains also when it is called without gradients; it reads each weight without them first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.tanh(self.second(self.first(x)))
        with torch.enable_grad():
            return (self.second(self.first(x)) - target).square().mean()


def autograd_off_around(way: str) -> None:
    model, reference = build(Student)
    fully_shard(model, units=["first", "second"])
    batches = float_batches(3, 8, DIM)

    def without_gradients(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.no_grad()(lambda x: call(x))

    call = call_of(model, way)
    found = train(model, batches, sharded=True, call=without_gradients(call))
    assert_same(found, train(reference, batches, sharded=False, call=without_gradients(reference)))
    with torch.inference_mode():  # in which enabling them changes nothing
        loss = call(*batches[0])
        assert not loss.requires_grad
        torch.testing.assert_close(loss, reference(*batches[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_enables_gradients_trains_where_they_are_off(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:autograd_off_around", way=way)


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Running statistics, a constant table, and a counter that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("table", torch.linspace(0, 1, DIM))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return self.norm(self.proj(x * self.table)).pow(3).mean()


def buffers(way: str) -> None:
    """Every rank sees the same rows, so that the batch's statistics are those of the reference."""
    model, reference = build(Buffers)
    fully_shard(model, units=["proj"])
    call = call_of(model, way)
    batches = float_batches(3, 8, DIM)
    assert_same(train(model, batches, sharded=False, call=call), train(reference, batches, sharded=False))
    for module in (model, reference):
        module.eval()
    torch.testing.assert_close(call(*batches[0]), reference(*batches[0]), rtol=0, atol=1e-5)
    for name, value in reference.named_buffers():
        found = model.get_buffer(name)
        assert type(found) is Tensor
        torch.testing.assert_close(found, value, rtol=0, atol=1e-5, msg=name)
    assert model.calls == 3
    assert list(model.state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_buffers_stay_whole_and_are_updated(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:buffers", way=way)


# ---- transforms of torch.func ----------------------------------------------------------------------------------------


def transforms(way: str) -> None:
    """The gathers run outside of the transforms, and the backward is announced on each of their levels."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    model, reference = build(make)
    fully_shard(model, units=["0", "2"])
    call = call_of(model, way)

    def mapped(module: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.vmap(module)(x.unsqueeze(1)).square().mean()

    batches = float_batches(3, 8, DIM)
    found = train(model, batches, sharded=True, call=mapped(call))
    assert_same(found, train(reference, batches, sharded=False, call=mapped(reference)))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        row = batches[0][0][0]
        torch.testing.assert_close(jacobian(call)(row), jacobian(reference)(row), rtol=0, atol=1e-5)


def tangents(way: str) -> None:
    """Losses of what a forward gives and of its derivative along a direction. The second layer is frozen."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        model[1].requires_grad_(False)
        return model

    def dual(module: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            with forward_ad.dual_level():
                y, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(x, x.cos())))
            return (y - tangent).square().mean()

        return loss

    def jvp(module: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            y, tangent = torch.func.jvp(module, (x,), (x.cos(),))
            return (y.detach() - tangent).square().mean()

        return loss

    model, reference = build(make)
    fully_shard(model, units=["0", "1", "3"])
    call = call_of(model, way)
    batches = float_batches(2, 8, DIM)
    try:
        found = train(model, batches, sharded=True, call=dual(call))
    except ForwardModeError:
        assert way != "fallback"
        assert torch.__version__ < "2.14", "what is called there is not compiled any more"
    else:
        assert_same(found, train(reference, batches, sharded=False, call=dual(reference)))
    found = train(model, batches, sharded=True, call=jvp(call))
    assert_same(found, train(reference, batches, sharded=False, call=jvp(reference)))
    found = train(model, batches, sharded=True, call=lambda x: call(x).square().mean())
    assert_same(found, train(reference, batches, sharded=False, call=lambda x: reference(x).square().mean()))


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_in_forward_mode_train_as_unsharded_or_are_refused(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:tangents", way=way)


@pytest.mark.parametrize("way", WAYS)
def test_transforms_of_a_sharded_model_equal_those_of_the_whole_one(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:transforms", way=way)
