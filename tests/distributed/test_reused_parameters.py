"""A parameter that is read more than once, under one name or two, is gathered and reduced once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, assert_trains_as_unsharded, call_of, float_batches
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_reused_parameters"


# ---- tied embedding and head -----------------------------------------------------------------------------------------


def tied_parameters(way: str, units: list[str], gathered: dict[str, int], regathered: list[str]) -> None:
    found = assert_trains_as_unsharded(
        functools.partial(Transformer, layers=2, hidden=64, tied=True),
        token_batches(3, 4, 8),
        way=way,
        shard=functools.partial(fully_shard, units=units),
        sends={"gathered": gathered, "regathered": regathered},
    )
    assert "embed.weight" in found.params
    assert "head.weight" not in found.params, "named_parameters() lists a tied parameter once"

    model = fully_shard(Transformer(layers=1, hidden=64, tied=True), units=units[:1])
    assert model.head.weight is model.embed.weight
    call_of(model, way)(*my_share(token_batches(1, 4, 8)[0])).backward()
    assert model.head.weight is model.embed.weight
    assert model.head.weight.grad is model.embed.weight.grad


@pytest.mark.parametrize("way", WAYS)
def test_tied_embedding_and_head_in_the_root_are_gathered_and_reduced_once(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(
        f"{HERE}:tied_parameters",
        way=way,
        units=["layers.*"],
        gathered={"root": 3, "layers.0": 11, "layers.1": 11},
        regathered=["layers.0", "layers.1"],
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_tied_embedding_that_is_a_unit_of_its_own_serves_the_head_in_the_root(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(
        f"{HERE}:tied_parameters",
        way=way,
        units=["embed", "layers.*"],
        gathered={"embed": 1, "layers.0": 11, "layers.1": 11, "root": 2},
        regathered=["embed", "layers.0", "layers.1"],
    )


# ---- a frozen tied weight, read in front of its owner ----------------------------------------------------------------


class Product(nn.Module):
    def __init__(self, weight: nn.Parameter, trains: bool) -> None:
        super().__init__()
        self.weight = weight
        self.scale = nn.Parameter(torch.ones(12)) if trains else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight)
        return x if self.scale is None else x * self.scale


class ReadBeforeItsOwner(nn.Module):
    """The backward of `second`, a unit, is over before the one of `first`, which reads the same frozen weight."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(12, 12) / 12**0.5, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(12))
        self.first, self.second = Product(weight, False), Product(weight, trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * self.scale)).square().mean()


def frozen_weight_read_before_its_owner(way: str, units: list[str], trains: bool) -> None:
    assert_trains_as_unsharded(
        functools.partial(ReadBeforeItsOwner, trains),
        float_batches(3, 8, 12),
        way=way,
        shard=functools.partial(fully_shard, units=units),
    )


@pytest.mark.parametrize("trains", [False, True], ids=["all of the owner frozen", "a part of the owner frozen"])
@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_weight_outlives_its_owners_backward_for_the_root_that_reads_it_too(
    two_ranks: RankPool, way: str, trains: bool
) -> None:
    two_ranks.run(f"{HERE}:frozen_weight_read_before_its_owner", way=way, units=["second"], trains=trains)


# ---- one weight, several reads ---------------------------------------------------------------------------------------


class ReadTwice(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + (2 * x) @ self.weight


class TwoReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(ReadTwice(), ReadTwice())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Recurrent(nn.Module):
    """The layer runs three times, with another layer in between."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.step = nn.Linear(dim, dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.mix(torch.tanh(self.step(x)))
        return torch.tanh(self.step(x)).square().mean()


def reads_of_one_weight(way: str) -> None:
    assert_trains_as_unsharded(
        TwoReadTwice,
        float_batches(3, 8, 12),
        way=way,
        shard=functools.partial(fully_shard, units=["layers.*"]),
        # The first layer's input is data: its backward needs no weight.
        sends={"gathered": {"layers.0": 1, "layers.1": 1}, "regathered": ["layers.1"]},
    )


def recurrence(way: str) -> None:
    assert_trains_as_unsharded(
        Recurrent,
        float_batches(3, 8, 12),
        way=way,
        shard=functools.partial(fully_shard, units=["step", "mix"]),
        # The fallback cannot see the next call coming: it gathers a layer each time that it is called.
        sends=None if way == "fallback" else {"gathered": {"step": 2, "mix": 2}},
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_read_twice_in_a_forward_is_gathered_and_reduced_once(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:reads_of_one_weight", way=way)


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "fallback"])
def test_a_layer_that_is_called_repeatedly_in_a_forward_is_gathered_and_reduced_once(
    two_ranks: RankPool, way: str
) -> None:
    two_ranks.run(f"{HERE}:recurrence", way=way)


# ---- one model, several calls ----------------------------------------------------------------------------------------


class Preference(nn.Module):
    """A preference loss: the model is called for the chosen and for the rejected answer, then one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))


def two_calls_before_one_backward(way: str) -> None:
    def loss_of(policy: object) -> object:
        def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
            margin = policy(chosen) - policy(rejected)  # type: ignore[operator]
            return -nn.functional.logsigmoid(margin).mean()

        return loss

    model, reference = build(Preference)
    fully_shard(model.policy, units=["0", "2"])
    batches = [(*a, *b) for a, b in zip(float_batches(3, 8, 12), float_batches(6, 8, 12)[3:], strict=True)]
    found = train(model, batches, sharded=True, call=loss_of(call_of(model.policy, way)))
    assert_same(found, train(reference, batches, sharded=False, call=loss_of(reference.policy)))


def summed_losses(way: str) -> None:
    """Two calls, their losses summed, one backward."""
    model, reference = build(functools.partial(Transformer, layers=1, hidden=64))
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    first, second = token_batches(2, 4, 8)
    (call(*my_share(first)) + 3 * call(*my_share(second))).backward()
    (reference(*first) + 3 * reference(*second)).backward()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), expected.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_called_twice_before_one_backward_trains_as_unsharded(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:two_calls_before_one_backward", way=way)


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_of_two_compiled_losses_has_the_gradient_of_the_sum(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:summed_losses", way=way)
