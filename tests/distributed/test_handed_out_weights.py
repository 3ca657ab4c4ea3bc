"""Weights, and views of them, that leave the unit that gathered them: their memory is released before they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.unit import unit_of
from tests.distributed.checks import call_of, float_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train, whole

HERE = "tests.distributed.test_handed_out_weights"
DIM = 6
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t(),
    "rows": lambda w: {"some": [w[2:], w[3]], "none": None},
    "detached": lambda w: (w.detach(), w),
    "cast": lambda w: w.double(),
    "expanded": lambda w: w[:, :1].expand(DIM, DIM),
}


class First(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.randn(DIM, DIM)), form

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return torch.tanh(x @ self.weight), FORMS[self.form](self.weight)


def _used(views: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(views) if leaf is not None]
    return torch.stack([view.float().sin().mean() for view in leaves]).sum()


class HandsOut(nn.Module):
    """Its first unit returns views of its weight, which the root reads behind the second unit."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.second = First(form), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, views = self.first(x)
        return self.second(x).square().mean() + _used(views)


class Outer(nn.Module):
    """Returns a view of the weight of a unit nested in it, whose own forward may not have run."""

    def __init__(self, *, runs_inner: bool) -> None:
        super().__init__()
        self.inner, self.bias, self.runs_inner = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM)), runs_inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x) if self.runs_inner else x
        return torch.tanh(x + self.bias), self.inner.weight.t()


class HandsOutNested(nn.Module):
    def __init__(self, *, runs_inner: bool) -> None:
        super().__init__()
        self.first, self.second = Outer(runs_inner=runs_inner), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, view = self.first(x)
        return self.second(x).square().mean() + _used(view)


class HandsOutTied(nn.Module):
    """The last unit returns a view of a weight that the first one owns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = First("rows"), nn.Linear(DIM, DIM), First("transposed")
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x, rows = self.first(x)
        x, transposed = self.third(self.second(x))
        return x.square().mean() + _used((rows, transposed))


@torch.compiler.disable
def _outside(weight: Tensor) -> Tensor:
    return weight.sin().sum()


@dataclasses.dataclass
class Result:  # not known to pytree
    loss: Tensor
    weight: Tensor


class LeavesBehind(nn.Module):
    """Its weight leaves the compiled code in other ways than as an output; the loss is complete all the same."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), how
        self.others: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor | Result:
        weight = self.first.weight
        if self.how == "an argument ahead of all else":
            return _outside(weight) + self._compute(x)
        loss = self._compute(x)
        if self.how == "an object's attribute":
            return Result(loss, weight)
        if self.how == "a list":
            self.others.append(weight)
            return loss
        if self.how == "a variable":
            torch._dynamo.graph_break()
            return loss + (weight * 2).sin().sum()
        if self.how == "a variable from no_grad":
            with torch.no_grad():
                weight = self.first.weight
                torch._dynamo.graph_break()
                loss2 = loss * 2
                torch._dynamo.graph_break()
            return loss + loss2 + weight.sin().sum()
        return loss + _outside(weight)

    def _compute(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


LEAVES = ["an argument ahead of all else", "an argument", "an object's attribute", "a list", "a variable"]
LEAVES += ["a variable from no_grad"]


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _trains(make: Callable[[], nn.Module], units: list[str], way: str, **how: Any) -> None:
    model, reference = build(make)
    fully_shard(model, units=units, **how)
    call: Any = model
    if way == "each layer":
        model.first.compile(backend=overlap_fsdp, options={"inner": "aot_eager"})
    else:
        call = call_of(model, way)
    batches = float_batches(3, 4, DIM)
    found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(reference, batches, sharded=False))
    with torch.no_grad():
        torch.testing.assert_close(call(*batches[0]), reference(*batches[0]), rtol=0, atol=1e-5)


def views_train(way: str) -> None:
    for form in FORMS:
        torch._dynamo.reset()
        _trains(lambda form=form: HandsOut(form), ["first", "second"], way)  # type: ignore[misc]


def views_of_others_train(way: str) -> None:
    for runs_inner in (True, False):
        torch._dynamo.reset()
        _trains(lambda r=runs_inner: HandsOutNested(runs_inner=r), ["first", "first.inner", "second"], way)  # type: ignore[misc]
    torch._dynamo.reset()
    _trains(HandsOutTied, ["first", "second", "third"], way)


def weights_that_leave_compiled_code(inner: str) -> None:
    for how in LEAVES:
        torch._dynamo.reset()
        model, reference = build(lambda how=how: LeavesBehind(how))  # type: ignore[misc]
        fully_shard(model, units=["first", "second"])

        def loss_of(module: LeavesBehind, call: Any) -> Callable[[Tensor], Tensor]:
            def loss(x: Tensor) -> Tensor:
                found = call(x)
                if isinstance(found, Result):
                    return found.loss + found.weight.sin().sum()
                return found + sum(weight.sin().sum() for weight in module.others[-1:])

            return loss

        batches = float_batches(3, 4, DIM)
        found = train(model, batches, sharded=True, call=loss_of(model, call_of(model, inner)))
        assert_same(found, train(reference, batches, sharded=False, call=loss_of(reference, reference)))


def units_that_stay_gathered() -> None:
    """What the root returns is read behind the backward, and without gradients; what another unit that is not resharded
    returns has its gradient."""
    model, reference = build(lambda: First("transposed"))
    fully_shard(model)
    x = torch.ones(2, DIM)
    out, view = model(x)
    assert view._base is None
    out.square().mean().backward()
    assert torch.equal(view, reference.weight.t())
    with torch.no_grad():
        assert torch.equal(model(x)[1], reference.weight.t())
    _trains(lambda: HandsOut("transposed"), ["first", "second"], "fallback", reshard_after_forward=False)


def only_views_are_copied() -> None:
    """Other outputs, also views of inputs, are handed on as they are; the addresses that are known are those of what is
    gathered."""
    first = nn.Identity()
    first.scale = nn.Parameter(torch.ones(DIM))
    model = fully_shard(nn.Sequential(first, nn.Linear(DIM, DIM)), units=["0", "1"])
    unit = unit_of(model)
    assert unit is not None
    addresses = unit.context.gathered_addresses
    x = torch.ones(2, DIM).t().t()
    returned = []
    seen = []
    first.register_forward_hook(lambda module, args, output: returned.append(output is args[0]))
    first.register_forward_pre_hook(lambda *_: seen.append(first.scale.data_ptr() in addresses))
    for _ in range(2):
        model(x).sum().backward()
    assert returned == seen == [True, True]
    assert addresses == set()


def checkpointed(use_reentrant: bool) -> None:
    model, reference = build(lambda: HandsOut("transposed"))
    fully_shard(model, units=["first", "second"])

    def run(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            x, view = checkpoint(module.first, x, use_reentrant=use_reentrant)
            return module.second(x).square().mean() + _used(view)

        return loss

    batches = float_batches(3, 4, DIM)
    found = train(model, batches, sharded=True, call=run(model))
    assert_same(found, train(reference, batches, sharded=False, call=run(reference)))


class HandsOutHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class ViewOfHead(HandsOutHead):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)), self.head.weight.t()


def tensor_parallel_outputs(kind: str) -> None:
    """A root whose output is a result that is still on its way, a DTensor, or a DTensor around a view of a weight."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, reference = build(ViewOfHead if kind == "view" else HandsOutHead)
    output = Shard(-1) if kind == "sharded" else Replicate()
    parallelize_module(
        model.head, mesh["tp"], ColwiseParallel(output_layouts=output, use_local_output=kind != "dtensor")
    )
    fully_shard(model, mesh=mesh["dp"], units=["body", "head"])
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        found, expected = model(x), reference(x)
        if kind == "view":
            (found, view), (expected, expected_view) = found, expected
            assert isinstance(view, DTensor)
            torch.testing.assert_close(whole(view), expected_view.detach())
            found, expected = torch.cat([found, view.full_tensor()]), torch.cat([expected, expected_view])
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if kind == "sharded":
            expected = expected.chunk(2, -1)[mesh["tp"].get_local_rank()]
        torch.testing.assert_close(found * 1, expected)
        if kind != "sharded":
            found.square().mean().backward()
            expected.square().mean().backward()
            for (name, param), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
                torch.testing.assert_close(whole(param.grad), other[1].grad, msg=lambda m, n=name: f"{n}: {m}")


AUXILIARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elementwise": lambda x, w: w.square().mean(),
    "product": lambda x, w: (w @ w.t()).mean(),
    "of the input": lambda x, w: torch.tanh(x @ w).mean(),
}


class Auxiliary(nn.Module):
    """Each layer leaves a loss of its weight in an attribute, computed behind its output, alone or in a tuple."""

    class Layer(nn.Linear):
        def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], is_tuple: bool) -> None:
            super().__init__(DIM, DIM)
            self.compute, self.is_tuple, self.loss = compute, is_tuple, torch.zeros(())

        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            self.loss = self.compute(x, self.weight)
            return (output, None) if self.is_tuple else output

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], is_tuple: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(compute, is_tuple) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x[0] if isinstance(x, tuple) else x)
        return x.square().mean() + sum(layer.loss for layer in self.layers)


def auxiliary_losses(is_tuple: bool) -> None:
    for compute in AUXILIARY.values():
        _trains(lambda c=compute: Auxiliary(c, is_tuple), ["layers.*"], "fallback")  # type: ignore[misc]


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fallback", "aot_eager", "each layer"])
def test_views_of_a_weight_that_a_unit_returns_have_its_values_and_gradients(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:views_train", way=way)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_weight_that_leaves_compiled_code_has_its_values_and_gradient(two_ranks: RankPool, inner: str) -> None:
    """Not the placeholder from which the code was traced: that is empty, and reading it ends the process."""
    two_ranks.run(f"{HERE}:weights_that_leave_compiled_code", inner=inner)


@pytest.mark.parametrize("way", ["fallback", "aot_eager"])
def test_views_of_nested_and_of_tied_weights_have_values_and_gradients(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:views_of_others_train", way=way)


def test_views_of_a_weight_that_stays_gathered_outlive_the_backward(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:units_that_stay_gathered")


def test_outputs_that_are_no_views_of_weights_are_not_copied(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:only_views_are_copied")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_unit_returns_a_view_of_its_weight(two_ranks: RankPool, use_reentrant: bool) -> None:
    two_ranks.run(f"{HERE}:checkpointed", use_reentrant=use_reentrant)


@pytest.mark.parametrize("kind", ["asynchronous", "sharded", "dtensor", "view"])
def test_outputs_of_tensor_parallel_units_are_handed_on(two_ranks: RankPool, kind: str) -> None:
    two_ranks.run(f"{HERE}:tensor_parallel_outputs", kind=kind)


@pytest.mark.parametrize("is_tuple", [False, True])
def test_an_auxiliary_loss_behind_a_units_output_reads_the_whole_weight(two_ranks: RankPool, is_tuple: bool) -> None:
    two_ranks.run(f"{HERE}:auxiliary_losses", is_tuple=is_tuple)
