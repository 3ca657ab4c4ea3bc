"""An exception in the middle of a step, on every rank: the next step equals the reference's (situation 30)."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import CollectiveError
from fsdp_passes.regions import num_open_regions
from fsdp_passes.unit import unit_of
from tests.distributed.checks import WAYS, call_of, float_batches
from tests.faults import run
from tests.ranks import RankPool
from tests.test_damaged_caches import use_cache
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_interrupted"
DIM = 6
_trap = ""


class TrapError(Exception):
    pass


@torch.library.custom_op("fsdp_passes_test::pass_trap", mutates_args=())
def pass_trap(x: Tensor, where: str) -> Tensor:
    if where == _trap:
        raise TrapError
    return x.clone()


pass_trap.register_fake(lambda x, where: torch.empty_like(x))
pass_trap.register_autograd(
    lambda ctx, grad: (torch.ops.fsdp_passes_test.pass_trap(grad, "backward"), None),
    setup_context=lambda ctx, inputs, output: None,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1:
                x = torch.ops.fsdp_passes_test.pass_trap(x, "forward")
        return x.square().mean()


@contextlib.contextmanager
def trap(where: str) -> Iterator[None]:
    """A call that gets to `where` raises; leaving this catches it, and it must have come."""
    global _trap
    _trap = where
    try:
        with pytest.raises(TrapError):
            yield
    finally:
        _trap = ""


def steps(model: nn.Module, call: Callable[..., Tensor], where: str, *, is_sharded: bool) -> dict[str, Tensor]:
    """A step, one with three micro-batches whose second one raises and that is given up, and another step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = float_batches(5, 4, DIM)

    def run(index: int, *, is_synced: bool = True) -> None:
        if is_sharded:
            model.set_requires_gradient_sync(is_synced)  # type: ignore[operator]
        call(*(my_share(batches[index]) if is_sharded else batches[index])).backward()

    run(0)
    optimizer.step()
    optimizer.zero_grad()
    run(1, is_synced=False)
    if where == "hook":  # of a tensor, which is the user's code inside a backward
        loss = call(*(my_share(batches[2]) if is_sharded else batches[2]))
        loss.register_hook(_raise)
        with pytest.raises(TrapError):
            loss.backward()
    else:
        pending = torch._C._distributed_c10d._get_work_registry_size()
        with trap(where):
            run(2, is_synced=False)
        if is_sharded and call is not model:  # at once: nobody may call it again
            assert torch._C._distributed_c10d._get_work_registry_size() == pending
            assert num_open_regions() == 0
    optimizer.zero_grad()
    run(3, is_synced=False)
    run(4)
    optimizer.step()
    return {name: whole(param) for name, param in model.named_parameters()}


def _raise(_: Any) -> None:
    raise TrapError


def interrupted(way: str, where: str) -> None:
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    check(model, reference, call_of(model, way), where)


def check(model: nn.Module, reference: nn.Module, call: Callable[..., Tensor], where: str) -> None:
    pending = torch._C._distributed_c10d._get_work_registry_size()
    found = steps(model, call, where, is_sharded=True)
    assert torch._C._distributed_c10d._get_work_registry_size() == pending  # every collective was awaited
    assert num_open_regions() == 0
    expected = steps(reference, reference, where, is_sharded=False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    context = units[0].context
    assert not context.delayed_releases
    assert not context.delayed_reductions
    assert not context.started_reductions
    assert not context.lookahead.started
    assert all(unit.gathered_versions is None and not unit.accumulating for unit in units if not unit.is_root)
    dist.barrier()


@pytest.mark.parametrize(
    ("way", "where"),
    [
        *itertools.product(WAYS, ("forward", "backward", "hook")),
        ("eager", "backward"),
    ],
)
def test_a_step_given_up_in_the_middle_of_an_accumulation_leaves_no_gradient(
    two_ranks: RankPool, way: str, where: str
) -> None:
    two_ranks.run(f"{HERE}:interrupted", way=way, where=where)


def interrupted_with_caches(folder: str) -> int:
    """In a new process; how often AOTAutograd's cache was of use. Each rank has caches of its own below `folder`."""
    use_cache(os.path.join(folder, str(dist.get_rank())))
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    check(model, reference, torch.compile(model, backend=overlap_fsdp), "backward")
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def test_an_inductor_backward_that_raises_leaves_nothing_behind_out_of_autograd_s_cache_too(
    tmp_path: pathlib.Path,
) -> None:
    # PyTorch 2.11 lets nobody wrap what comes out of that cache.
    for is_warm in (False, True) if torch.__version__ >= "2.13" else (False,):
        outcomes = run(f"{HERE}:interrupted_with_caches", 2, folder=str(tmp_path))
        assert [outcome.error for outcome in outcomes] == ["", ""]
        assert [outcome.result > 0 for outcome in outcomes] == [is_warm, is_warm]


# ---- gathers that go on behind an error ------------------------------------------------------------------------------

WIDTH = 256


class TwoDtypes(nn.Module):
    """As a unit it is gathered with two collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).double()).float()


def make_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), TwoDtypes())


class InterruptedGather(TorchDispatchMode):
    """To the second gather rank 1 comes late; the third is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Two ranks exchange: a layer's gather is two receives.
        if func.namespace == "c10d":
            self.num_seen += 1.0 if "allgather" in str(func) else 0.5 if "recv" in str(func) else 0.0
            if self.num_seen > 2:
                raise KeyboardInterrupt
            if self.num_seen > 1:
                time.sleep(0.5 * dist.get_rank())
        return func(*args, **(kwargs or {}))


def interrupted_gather() -> None:
    model, reference = build(make_layers)
    fully_shard(model, units=["*"])
    model[0].set_modules_to_forward_prefetch([])  # whose gather would give the interrupted one new memory at once
    x = torch.ones(4, WIDTH)
    with InterruptedGather(), pytest.raises(KeyboardInterrupt):
        model(x)
    torch.testing.assert_close(model(x), reference(x))


def failed_group() -> None:
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    unknown_to_gloo = MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)
    failing = fully_shard(nn.Linear(DIM, DIM), mesh=mesh, mp_policy=unknown_to_gloo)
    with pytest.raises(CollectiveError, match="Invalid scalar type"):
        failing(torch.ones(1, DIM))
    model = fully_shard(make_layers(), mesh=mesh, units=["*"])
    for _ in range(2):
        with pytest.raises(CollectiveError, match="Invalid scalar type"):
            model(torch.ones(1, WIDTH))
        unit = unit_of(model[0])
        assert unit is not None
        assert all(param.placeholder.untyped_storage().nbytes() for param in unit.params)
    dist.barrier(group)  # behind the gather: gloo's thread is through with it


@pytest.mark.parametrize(
    ("case", "pool"),
    [("interrupted_gather", "two_ranks"), ("interrupted_gather", "four_ranks"), ("failed_group", "four_ranks")],
)
def test_a_gather_that_nobody_waited_for_keeps_its_memory(case: str, pool: str, request: pytest.FixtureRequest) -> None:
    """A thread of gloo still writes there: where the memory was released, that ended the process."""
    request.getfixturevalue(pool).run(f"{HERE}:{case}")
