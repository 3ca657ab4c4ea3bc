"""Weights that leave the code that gathered them, and what stands where a sharded parameter was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard
from fsdp_passes.errors import ReplacedParameterError
from tests.distributed.checks import WAYS, call_of, compiled, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train

HERE = "tests.distributed.test_handed_out_weights"
DIM = 6
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda w: w.t(),
    "rows": lambda w: {"some": [w[:2], w[3]]},
    "detached": lambda w: (w.detach(), w),
    "cast": lambda w: w.double(),
}


class HandsOut(nn.Module):
    """Its first unit returns views of its weight, which the root reads behind the second unit."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.second, self.form = _First(form), nn.Linear(DIM, DIM), form

    def forward(self, x: Tensor) -> Tensor:
        x, views = self.first(x)
        x = self.second(x)
        leaves = torch.utils._pytree.tree_leaves(views)
        return x.square().mean() + sum(view.float().sin().mean() for view in leaves)


class _First(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.randn(DIM, DIM)), form

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return torch.tanh(x @ self.weight), FORMS[self.form](self.weight)


def views_train(way: str) -> None:
    for form in FORMS:
        model, reference = build(lambda form=form: HandsOut(form))  # type: ignore[misc]
        fully_shard(model, units=["first", "second"])
        batches = float_batches(2, 4, DIM)
        found = train(model, batches, sharded=True, call=call_of(model, way))
        assert_same(found, train(reference, batches, sharded=False))


@pytest.mark.parametrize("way", WAYS)
def test_views_of_a_weight_that_a_unit_returns_have_its_values_and_gradients(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:views_train", way=way)


def function_returns_weight(inner: str) -> None:
    """Also over a graph break, where uncompiled code reads it."""
    model, reference = build(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))

    def returning(module: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda x: (module(x), module[0].weight)

    def breaking(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            weight = module[0].weight
            x = module(x)
            return x.square().mean() + _outside(weight)

        return run

    fully_shard(model, units=["0", "1"])
    batches = float_batches(2, 4, DIM)
    with_weight, plain = compiled(returning(model), inner), returning(reference)

    def loss_of(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            out, weight = call(x)
            return out.square().mean() + weight.sin().mean()

        return loss

    found = train(model, batches, sharded=True, call=loss_of(with_weight))
    assert_same(found, train(reference, batches, sharded=False, call=loss_of(plain)))
    found = train(model, batches, sharded=True, call=compiled(breaking(model), inner))
    assert_same(found, train(reference, batches, sharded=False, call=breaking(reference)))


@torch.compiler.disable
def _outside(weight: Tensor) -> Tensor:
    return weight.sin().mean()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_weight_that_leaves_a_compiled_function_carries_its_gradient_back(two_ranks: RankPool, inner: str) -> None:
    two_ranks.run(f"{HERE}:function_returns_weight", inner=inner)


def replaced(what: str) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), units=["0", "1"])
    x = torch.ones(2, DIM)
    swapped = {}
    if what == "functional_call":
        swapped = {name: param * 2 for name, param in model.named_parameters()}
    elif what == "functional_call of whole tensors":
        swapped = {"0.bias": torch.ones(DIM)}
    else:
        model[0].bias = None if what == "nothing" else nn.Parameter(torch.ones(DIM))
    with pytest.raises(ReplacedParameterError, match=r"^0\.(weight|bias): expected .* found "):
        torch.func.functional_call(model, swapped, (x,))


@pytest.mark.parametrize("what", ["nothing", "whole", "functional_call", "functional_call of whole tensors"])
def test_a_replaced_parameter_is_named(two_ranks: RankPool, what: str) -> None:
    two_ranks.run(f"{HERE}:replaced", what=what)
