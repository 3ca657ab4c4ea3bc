"""No memory for what a collective makes: on one rank, which the others then miss, and on all of them together."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import CollectiveError
from fsdp_passes.unit import unit_of
from tests.distributed.checks import float_batches
from tests.faults import catch, run
from tests.graphs import one_rank as one_rank
from tests.inductor_code import NO_CACHE, kernels_that_do_nothing
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_out_of_memory"
DIM = 6
TIMEOUT_S = 6.0
_mode: Any = None  # what is switched on in the first layer's forward


class NoMemory(TorchDispatchMode):
    """Behind the next one, collectives of one kind ("all_gather", "reduce_scatter", "all_reduce") find no memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind.replace("_", "")
        self.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = func.namespace in ("c10d", "_c10d_functional", "fsdp_passes")
        if is_collective and self.kind in str(func).replace("_", ""):
            self.num_seen += 1
            if self.num_seen == 2:
                raise torch.OutOfMemoryError("simulated: no memory for a collective")
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("fsdp_passes_test::run_short", mutates_args=())
def run_short(x: Tensor) -> Tensor:
    if _mode is not None:
        _mode.__enter__()
    return x.clone()


run_short.register_fake(torch.empty_like)
run_short.register_autograd(lambda ctx, grad: grad)


class Model(nn.Module):
    """In layers of two dtypes the eager fallback's gather is two collectives: the second one finds no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.scales = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, (layer, scale) in enumerate(zip(self.layers, self.scales, strict=True)):
            x = torch.tanh(layer(x)) + scale(x.double()).float()
            if index == 0:
                x = torch.ops.fsdp_passes_test.run_short(x)
        return x.square().mean()


def sharded(
    way: str, timeout_s: float, kind: str = "all_gather", *, nvtx: bool = True
) -> tuple[nn.Module, Any, nn.Module]:
    """With replicas where `kind` is the collective between these."""
    model, reference = build(Model)
    shape = (dist.get_world_size(), 1) if kind == "all_reduce" else (dist.get_world_size(),)
    fully_shard(model, mesh=init_device_mesh("cpu", shape), units=["layers.*", "scales.*"])
    model.set_collective_timeout(timeout_s)
    options = {"inner": way, "nvtx": nvtx}
    call = model if way == "fallback" else torch.compile(model, backend=overlap_fsdp, options=options)
    return model, call, reference


def step(
    model: nn.Module, call: Any, index: int, short: str = "", *, kind: str = "all_gather", is_sharded: bool = True
) -> None:
    """`short`: the phase in which there is no memory for collectives of `kind`."""
    global _mode
    (x,) = float_batches(5, 4, DIM)[index]
    _mode = NoMemory(kind) if short == "forward" else None
    try:
        loss = call(*my_share((x,)) if is_sharded else (x,))
        with NoMemory(kind) if short == "backward" else contextlib.nullcontext():
            loss.backward()
    finally:
        if _mode is not None and _get_current_dispatch_mode() is _mode:
            _mode.__exit__(None, None, None)
        _mode = None
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
    model.zero_grad()


def all_run_short(way: str, where: str, kind: str, nvtx: bool) -> tuple[str, str]:
    """A step, one in which no rank has the memory and that is given up, and two more; the error."""
    model, call, reference = sharded(way, 60.0, kind, nvtx=nvtx)
    step(model, call, 0)
    pending = torch._C._distributed_c10d._get_work_registry_size()
    error, _ = catch(Exception, lambda: step(model, call, 1, where, kind=kind))
    assert error is not None
    model.zero_grad()
    for index in (2, 3):
        step(model, call, index)
    for index in (0, 2, 3):
        step(reference, reference, index, is_sharded=False)
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param), reference.get_parameter(name).detach(), rtol=0, atol=1e-6)
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None and not unit.is_root]
    stored = {p.name: p.placeholder.untyped_storage().nbytes() for unit in units for p in unit.params}
    assert not any(stored.values()), stored
    assert torch._C._distributed_c10d._get_work_registry_size() == pending
    return type(error).__name__, " ".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize(
    ("kind", "where"),
    [("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"), ("all_reduce", "backward")],
)
@pytest.mark.parametrize(("way", "nvtx"), [("fallback", True), ("aot_eager", True), ("aot_eager", False)])
def test_ranks_that_run_short_together_may_catch_it_and_go_on(
    way: str, nvtx: bool, where: str, kind: str, request: pytest.FixtureRequest
) -> None:
    # Two ranks exchange in the fallback, and the backend sees no collective there.
    pool: RankPool = request.getfixturevalue("four_ranks" if way == "fallback" else "two_ranks")
    for error, notes in pool.run(f"{HERE}:all_run_short", way=way, where=where, kind=kind, nvtx=nvtx):
        assert error == "OutOfMemoryError", "it can be caught as what it is"
        assert sys.version_info < (3, 11) or f"expected to start its {kind}" in notes, notes


@pytest.mark.parametrize("nvtx", [True, False])
@pytest.mark.usefixtures("one_rank")
def test_a_start_that_fails_in_generated_code_is_named(nvtx: bool) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)), units=["*"])
    call = torch.compile(model, backend=overlap_fsdp, options={"nvtx": nvtx, "inductor": NO_CACHE})
    with kernels_that_do_nothing():
        call(torch.ones(2, DIM)).sum().backward()  # which compiles it
        loss = call(torch.ones(2, DIM)).sum()
        with NoMemory("reduce_scatter"), pytest.raises(torch.OutOfMemoryError) as caught:
            loss.backward()
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert sys.version_info < (3, 11) or "unit '0': expected to start its reduce_scatter" in notes, notes


def one_runs_short(way: str, where: str) -> dict[str, Any]:
    model, call, _ = sharded(way, TIMEOUT_S)
    step(model, call, 0)
    error, waited_s = catch(Exception, lambda: step(model, call, 1, where if dist.get_rank() == 1 else ""))
    return {**vars(error), "kind": type(error).__name__, "text": str(error), "total_s": waited_s}


def test_a_rank_that_runs_short_alone_raises_and_the_others_miss_it() -> None:
    left, short, *others = run(f"{HERE}:one_runs_short", 4, way="fallback", where="backward")
    assert {one.error for one in (left, short, *others)} == {""}
    assert short.result["kind"] == "OutOfMemoryError", short
    assert left.result["kind"] == CollectiveError.__name__, left
    assert (left.result["collective"], left.result["missing_ranks"]) == ("all_gather", (1,)), left
    assert left.result["total_s"] < TIMEOUT_S + 5
