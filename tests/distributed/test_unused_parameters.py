"""Parameters that a step does not use have no gradient, as unsharded and with FSDP2; ranks that disagree on that."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_passes import fully_shard
from fsdp_passes.errors import FsdpError, ScheduleWarning
from tests.distributed.checks import call_of, compiled
from tests.faults import catch, run
from tests.ranks import RankPool
from tests.training import whole

HERE = "tests.distributed.test_unused_parameters"
DIM = 4
# Micro-batches: whether each takes the branch, and whether only the last one reduces gradients.
STEPS = [([True], True), ([False], True), ([True, False], True), ([True, False], False), ([False, True], False)]
STEPS += [([False, False], False)]


class _GivesNone(torch.autograd.Function):
    """`x * weight`, without a gradient for `weight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad * weight, None


class Reads(nn.Module):
    """Reads two parameters without gradients for them, and never one; the other unit has all of its own."""

    def __init__(self, *, has_unread: bool) -> None:
        super().__init__()
        self.used = nn.Linear(DIM, DIM)
        self.detached, self.given_none = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.randn(DIM))
        if has_unread:
            self.unread = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return _GivesNone.apply(torch.tanh(self.used(x)) * self.detached.detach(), self.given_none)  # type: ignore[no-any-return]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Reads(has_unread=True), Reads(has_unread=False)
        self.branch, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.branch_scale, self.unread = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor, takes_branch: bool) -> Tensor:
        x = self.second(self.first(x))
        if takes_branch:
            x = self.branch(x) * self.branch_scale
        return self.last(x).square().mean()


UNITS = ["first", "second", "branch", "last"]


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def have_no_gradients(way: str, replicas: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 1) if replicas else (2,), mesh_dim_names=("r", "s") if replicas else ("s",))
    for branches, syncs in STEPS[:1] if way == "inductor" else STEPS:  # it takes seconds for each graph
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = Branches()
        model, twin = copy.deepcopy(reference), copy.deepcopy(reference)
        fully_shard(model, mesh=mesh, units=UNITS)
        for name in UNITS:
            fsdp2.fully_shard(twin.get_submodule(name), mesh=mesh)
        fsdp2.fully_shard(twin, mesh=mesh)
        call = call_of(model, way)
        optimizers = [torch.optim.AdamW(m.parameters(), weight_decay=0.1) for m in (reference, twin, model)]
        for _ in range(2):
            for index, takes_branch in enumerate(branches):
                x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(index))
                is_reduced = syncs or index == len(branches) - 1
                for module in (twin, model):
                    set_sync = module.set_requires_all_reduce if replicas else module.set_requires_gradient_sync
                    set_sync(is_reduced)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", ScheduleWarning)
                    for run_model in (reference, twin, call):
                        run_model(x, takes_branch).backward()
            for (name, expected), other, param in zip(
                reference.named_parameters(), twin.parameters(), model.parameters(), strict=True
            ):
                where = f"{name}, {branches}, {syncs}"
                grads = [None if p.grad is None else whole(p.grad) for p in (expected, other, param)]
                assert (grads[0] is None) == (grads[2] is None), (where, grads)
                # FSDP2 does not all-reduce what earlier micro-batches left where the last one has no gradient.
                assert (grads[0] is None) == (grads[1] is None) or (replicas and not syncs), (where, grads)
                if grads[0] is not None:
                    torch.testing.assert_close(grads[2], grads[0], msg=lambda m, w=where: f"{w}: {m}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, expected), param in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(param), expected.detach(), msg=lambda m, n=name: f"{n}: {m}")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, takes_branch: bool) -> Tensor:
        x = self.first(x)
        y = self.branch(x)
        return self.last(x + y if takes_branch else x + y.detach()).square().mean()


TIMEOUT_S = 6.0
LATEST_S = 40.0  # on a busy machine


def disagree() -> tuple[str, str, float]:
    """The first rank of each pair takes a branch that the second does not. Units of the branch are gathered by both, so
    that only the gradients differ."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    torch.manual_seed(0)
    model = fully_shard(Gated(), mesh=DeviceMesh.from_group(pairs[pair], "cpu"), units=["*"])
    model.set_collective_timeout(TIMEOUT_S)

    call: Any = model if pair == 0 else compiled(model, agreement_timeout_s=TIMEOUT_S)

    def steps() -> None:
        call(torch.ones(2, DIM), True).backward()
        for _ in range(2):
            call(torch.ones(2, DIM), dist.get_rank() % 2 == 0).backward()

    error, waited_s = catch(FsdpError, steps)
    return type(error).__name__, str(error), waited_s


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fallback", "aot_eager", "inductor"])
def test_parameters_that_a_step_does_not_use_have_no_gradient(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:have_no_gradients", way=way, replicas=False)


@pytest.mark.parametrize("way", ["fallback", "aot_eager"])
def test_replicas_leave_unused_parameters_without_gradient(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:have_no_gradients", way=way, replicas=True)


def test_ranks_that_disagree_on_what_they_used_raise_in_time() -> None:
    outcomes = run(f"{HERE}:disagree", 4)
    assert [outcome.error for outcome in outcomes] == [""] * 4
    kinds, texts, waits = zip(*(outcome.result for outcome in outcomes), strict=True)
    # The fallback's ranks wait in different collectives; of compiled ones, the second is about to run another graph.
    assert kinds == ("CollectiveError", "CollectiveError", "CollectiveError", "ScheduleDisagreementError")
    assert "unit 'first': expected every rank to take part in its reduce_scatter" in texts[0]
    assert "unit 'first': expected every rank to take part in its all_gather" in texts[1]
    assert "unit 'branch'" in texts[2]
    assert "no answer from rank 2" in texts[3]
    assert max(waits) < LATEST_S
