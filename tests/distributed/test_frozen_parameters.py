"""Frozen parameters: gathered, never reduced; and parameters that are frozen and unfrozen between steps."""

from __future__ import annotations

import functools
import unittest.mock
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from fsdp_passes import fully_shard, reduction
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.unit import unit_of
from tests.distributed.checks import WAYS, assert_trains_as_unsharded, call_of, collectives, compiled, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, recorded_all_gathers, train, whole

HERE = "tests.distributed.test_frozen_parameters"


class LoraLinear(nn.Module):
    """A frozen linear layer and a trainable low-rank adapter beside it."""

    def __init__(self, dim: int, out: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(dim, out).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.b = nn.Parameter(torch.randn(out, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class LoraBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim).requires_grad_(False)
        self.up = LoraLinear(dim, 25)
        self.down = LoraLinear(25, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LoraModel(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16).requires_grad_(False)
        self.layers = nn.Sequential(*(LoraBlock() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.stem(x)).square().mean()


def lora_as_a_whole(way: str) -> None:
    found = assert_trains_as_unsharded(
        LoraModel,
        float_batches(3, 8, 16),
        way=way,
        shard=functools.partial(fully_shard, units=["layers.*"]),
        sends={
            "gathered": {"root": 2, "layers.0": 10, "layers.1": 10},
            "reduced": {"layers.0": 4, "layers.1": 4},
        },
    )
    assert all(name.split(".")[-1] in ("a", "b") for name in found.grads)
    torch.manual_seed(0)
    for name, value in LoraModel().named_parameters():
        if not value.requires_grad:
            assert torch.equal(found.params[name], value), name


def adversarial_inputs(way: str) -> None:
    """The gradient of an input, a leaf, for what is trained with; the model's first unit is partly frozen."""

    def make() -> nn.Module:
        return LoraModel().layers

    def attacked(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (grad,) = torch.autograd.grad(call(x).square().mean(1).sum(), x)
            return call(x.detach() + grad / 10).square().mean()

        return loss

    model, reference = build(make)
    fully_shard(model, units=["*"])
    batches = float_batches(3, 8, 16)
    found = train(model, batches, sharded=True, call=attacked(call_of(model, way)))
    assert_same(found, train(reference, batches, sharded=False, call=attacked(reference)))


def whole_blocks_in_a_backward() -> int:
    """The most blocks that are gathered at once while the fallback runs a backward."""
    model = LoraModel(layers=6)
    fully_shard(model, units=["layers.*"])
    units = [unit_of(layer) for layer in model.layers]
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        gathered = [p.placeholder.untyped_storage().size() > 0 for unit in units if unit for p in unit.params[:1]]
        most = max(most, sum(gathered))

    for layer in model.layers:
        layer.up.register_full_backward_hook(count)
    for batch in float_batches(2, 8, 16):
        model(*my_share(batch)).backward()
    return most


def lora_blocks_compiled_one_by_one() -> None:
    """The root has no parameter of its own here: it only calls one compiled block after another."""
    model, reference = build(lambda: nn.Sequential(*(LoraBlock() for _ in range(4))))
    fully_shard(model, units=["*"])
    for block in model:
        block.__dict__["forward"] = compiled(block.forward)

    def loss_of(module: nn.Module) -> object:
        return lambda x: module(x).square().mean()

    batches = float_batches(3, 8, 16)
    with record_compilations() as records:
        found = train(model, batches, sharded=True, call=loss_of(model))
    assert_same(found, train(reference, batches, sharded=False, call=loss_of(reference)))
    # Block 0's input is data and needs no gradient, the input of the other three does.
    assert len(records) == 2
    for record in records:  # each block's gradients are reduced behind its graph
        assert not any(line.startswith("reduce_scatter") for line in collectives(record, "backward"))
    with unittest.mock.patch("fsdp_passes.compiled_call.reduce_late", wraps=reduction.reduce_late) as seen:
        loss_of(model)(*my_share(batches[0])).backward()
    assert [len(call.args[1]) for call in seen.call_args_list] == [4] * 4, "the four adapters of each block"
    with recorded_all_gathers("") as gathers:
        loss_of(model)(*my_share(batches[0])).backward()
    assert len(gathers) == 8, gathers


@pytest.mark.parametrize("way", WAYS)
def test_lora_reduces_adapters_only_and_leaves_the_base_as_it_was(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:lora_as_a_whole", way=way)


@pytest.mark.parametrize("way", WAYS)
def test_partly_frozen_blocks_give_the_gradient_of_an_input_that_is_a_leaf(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:adversarial_inputs", way=way)


def test_blocks_with_frozen_weights_are_released_as_the_backward_of_the_fallback_passes(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:whole_blocks_in_a_backward") == [2, 2]


def test_lora_blocks_compiled_one_by_one_compile_once_per_kind_of_input(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:lora_blocks_compiled_one_by_one")


# ---- integer weights -------------------------------------------------------------------------------------------------


class QuantizedLinear(nn.Module):
    """Frozen uint8 weights with a trainable fp32 scale per row."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(0, 256, (out, dim), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(out, 1) / 128)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.to(x.dtype) - 128) * self.scale.to(x.dtype))


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(QuantizedLinear(8, 7), nn.Tanh(), QuantizedLinear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Reader(nn.Module):
    """Gives its integer weight away bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(256, dtype=torch.uint8).view(-1, 2)[:5], requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, mask: Tensor) -> Tensor:
        return self.weight ^ mask


def integer_weights(way: str) -> None:
    assert_trains_as_unsharded(
        Quantized,
        float_batches(3, 8, 8),
        way=way,
        shard=functools.partial(fully_shard, units=["layers.0", "layers.2"]),
    )
    model, original = build(Quantized)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with record_compilations() as records:
        call_of(model, way)(my_share(float_batches(1, 8, 8)[0])[0].bfloat16()).backward()
    if way != "fallback":
        assert sorted(collectives(records[0], "forward")) == ["all_gather root bfloat16 2", "all_gather root uint8 2"]
        assert all("uint8" not in line for line in collectives(records[0], "backward") if "reduce" in line)
    for name, param in original.named_parameters():
        assert model.get_parameter(name).dtype == param.dtype
        assert torch.equal(whole(model.get_parameter(name)), param), name

    reader, reference = build(Reader)
    fully_shard(reader, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    mask = torch.tensor([0, 255], dtype=torch.uint8)
    assert torch.equal(call_of(reader, way)(mask), reference(mask))


@pytest.mark.parametrize("way", WAYS)
def test_frozen_integer_weights_are_never_cast_and_arrive_bit_by_bit(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:integer_weights", way=way)


# ---- freezing between steps ------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def freeze_and_unfreeze(way: str, names: list[str]) -> None:
    model, reference = build(Mlp)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step, (x,) in enumerate(float_batches(7, 8, 8)):
        if step in (2, 4, 6):
            for module in (model, reference):
                for name in names:
                    module.get_parameter(name).requires_grad_(step == 4)
        call(*my_share((x,))).backward()
        reference(x).backward()
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None) == (name in names and step in (2, 3, 6)), name
            if expected.grad is not None:
                torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-6, msg=f"{step} {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_frozen_between_steps_gets_no_gradient_from_the_next_step_on(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:freeze_and_unfreeze", way=way, names=["layers.2.weight"])


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_frozen_between_steps_passes_the_gradient_through(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:freeze_and_unfreeze", way=way, names=["layers.2.weight", "layers.2.bias"])


def unfreeze_later(way: str) -> None:
    model, reference = build(Mlp)
    for module in (model, reference):
        module.layers[0].requires_grad_(False)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    (x,) = float_batches(1, 8, 8)[0]
    for expect_grad in (False, True):
        for module in (model, reference):
            module.layers[0].requires_grad_(expect_grad)
            module.zero_grad()
        call(*my_share((x,))).backward()
        reference(x).backward()
        assert (model.layers[0].weight.grad is not None) == expect_grad
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_frozen_when_it_was_sharded_can_be_unfrozen_after_the_first_step(
    two_ranks: RankPool, way: str
) -> None:
    two_ranks.run(f"{HERE}:unfreeze_later", way=way)
