"""Methods of a model other than `forward`: registered ones gather as a forward does; else layers gather themselves, and
the root's own parameters are gathered by `unshard()`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard, register_fsdp_forward_method
from fsdp_passes.unit import unit_of
from tests.distributed.checks import WAYS, call_of, float_batches
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_other_methods"
DIM = 6


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(DIM, DIM)  # of the root
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.outward = nn.Linear(DIM, DIM)

    def encode(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inward(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.outward(self.encode(x)) - x).square().mean()

    @torch.no_grad()
    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self.outward(self.encode(x))
        return x


def compare_and_step(model: nn.Module, reference: nn.Module, way: str) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert param.grad is not None, f"{way}: {name} has no gradient"
        assert expected.grad is not None
        grad = whole(param.grad)
        torch.testing.assert_close(grad, expected.grad, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        each.zero_grad()


def called_between_steps(way: str) -> None:
    model, reference = build(Autoencoder)
    assert isinstance(reference, Autoencoder)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    for batch in float_batches(3, 4, DIM):
        (x,) = my_share(batch)
        model.unshard()  # type: ignore[operator]
        torch.testing.assert_close(call.generate(x, 2), reference.generate(x, 2), rtol=0, atol=1e-6)
        torch.testing.assert_close(call.encode(x), reference.encode(x), rtol=0, atol=1e-6)
        model.reshard()  # type: ignore[operator]
        found, expected = call(x), reference(batch[0])
        found.backward()
        expected.backward()
        compare_and_step(model, reference, way)


def registered(way: str) -> None:
    """Trains through `encode` and through a forward that calls it, generates in between, and from a copy."""
    model, reference = build(Autoencoder)
    fully_shard(model, units=["layers.*"])
    for name in ("encode", "generate"):
        register_fsdp_forward_method(model, name)
    model = copy.deepcopy(model)
    forward, encode = call_of(model, way), call_of(model.encode, way)  # type: ignore[arg-type]
    for batch in float_batches(3, 4, DIM):
        (x,) = my_share(batch)
        generated = model.generate(x, 2)  # type: ignore[operator]
        torch.testing.assert_close(generated, reference.generate(x, 2), rtol=0, atol=1e-6)  # type: ignore[operator]
        assert_released(model.layers)  # type: ignore[arg-type]  # the root stays whole until a backward, or the next forward
        for call, expected in ((encode, reference.encode), (forward, reference)):
            for output in (call(x), expected(batch[0])):  # type: ignore[operator]
                (output if output.ndim == 0 else output.square().mean()).backward()
            # Compiled code reads what `generate` left whole, and leaves it so.
            assert_released(model if way == "fallback" else model.layers)  # type: ignore[arg-type]
        compare_and_step(model, reference, way)


def assert_released(model: nn.Module) -> None:
    gathered = [name for name, module in model.named_modules() if (unit := unit_of(module)) and unit.is_unsharded]
    assert gathered == [], gathered


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.inward(x)

    def encode(self, x: Tensor) -> Tensor:
        self.inward(x)
        raise ValueError("not today")


def raising() -> None:
    model, reference = build(Raises)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    (x,) = float_batches(1, 4, DIM)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match="not today"):
            model.encode(x)  # type: ignore[operator]
        assert_released(model)  # the next forward begins anew
        torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_registered_methods_gather_as_a_forward_does(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:registered", way=way)


def test_a_registered_method_that_raises_leaves_nothing_gathered(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:raising")


def test_what_is_not_sharded_stays_as_it_is_and_a_name_must_exist() -> None:
    model = Autoencoder()
    register_fsdp_forward_method(model, "encode")
    assert "encode" not in vars(model)
    with pytest.raises(AttributeError, match="decode"):
        register_fsdp_forward_method(model, "decode")


@pytest.mark.parametrize("way", WAYS)
def test_encode_and_generate_compute_what_the_unsharded_model_does(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:called_between_steps", way=way)
