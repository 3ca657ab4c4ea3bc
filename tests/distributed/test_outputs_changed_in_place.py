"""Outputs of units that are views and are changed in place: the hook that gathers for the backward stays."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard
from tests.distributed.checks import assert_trains_as_unsharded, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train

HERE = "tests.distributed.test_outputs_changed_in_place"
DIM = 6


class First(nn.Linear):
    """Of an input of three dimensions a linear layer returns a view, and here also views of that."""

    def __init__(self, form: str) -> None:
        super().__init__(DIM, DIM)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        assert y._base is not None
        return {"tuple": (None, y.transpose(0, 1), y[..., 0]), "halves": {"a": y[..., :3], "b": y[..., 3:]}}.get(
            self.form, y
        )


class Outer(nn.Module):
    """Changes what a unit inside of it returns, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(DIM)), First("one")

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * self.scale).mul_(2)


class Changes(nn.Module):
    """Changes what its first unit returns."""

    def __init__(self, form: str, *, in_place: bool = True) -> None:
        super().__init__()
        self.form, self.in_place = form, in_place
        self.first = Outer() if form == "nested" else First(form)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found = self.call_first(x.unsqueeze(1).tanh().requires_grad_())
        if self.form == "tuple":
            F.relu(found[1], self.in_place)
            x = found[1].transpose(0, 1) * found[2].unsqueeze(-1)
        elif self.form == "halves":
            x = torch.cat([found["b"], F.relu(found["a"], self.in_place)], -1)
        elif self.form == "part":
            found[..., :2] *= 3
            x = found
        else:
            x = F.relu(found, self.in_place)
        return F.relu(self.second(x), self.in_place).square().mean()

    def call_first(self, x: Tensor) -> Any:
        return checkpoint(self.first, x, use_reentrant=False) if self.form == "checkpoint" else self.first(x)


FORMS = ("one", "part", "tuple", "halves", "nested", "checkpoint")


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def forms_train(forms: tuple[str, ...]) -> None:
    """As unsharded, with one gather in each direction."""
    for form in forms:
        units = ["first", "second"] if form != "nested" else ["first.inner", "first", "second"]
        assert_trains_as_unsharded(
            functools.partial(Changes, form),
            float_batches(3, 8, DIM),
            way="fallback",
            shard=functools.partial(fully_shard, units=units),
            sends={"gathered": dict.fromkeys(units, 2)},
        )


def mixed_precision() -> None:
    """Bit by bit what the same model computes that changes nothing in place."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16)
    results = []
    for in_place in (True, False):
        model, _ = build(functools.partial(Changes, "one", in_place=in_place))
        fully_shard(model, units=["first", "second"], mp_policy=policy)
        results.append(train(model, float_batches(3, 8, DIM), sharded=True))
    assert_same(*results, atol=0)


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_views_that_a_unit_returns_may_be_changed_in_place(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:forms_train", forms=FORMS)


def test_outputs_in_bf16_may_be_changed_in_place(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:mixed_precision")
