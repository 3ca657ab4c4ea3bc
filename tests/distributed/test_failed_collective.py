"""A collective that fails on one rank, on its way or where it is started: each rank ends with an error that says so."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes._torch_compat import default_store
from tests.faults import catch, run

HERE = "tests.distributed.test_failed_collective"
DIM = 8
TIMEOUT_S = 6.0
_fault: Callable[[], None] | None = None  # what happens on this rank where the model comes to `_where`
_where = ""


@torch.library.custom_op("fsdp_passes_test::meet_fault", mutates_args=())
def meet_fault(x: Tensor, where: str) -> Tensor:
    if where == _where and _fault is not None:
        _fault()
    return x.clone()


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.layer = inputs[1].split()[0]


def _meet_in_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.fsdp_passes_test.meet_fault(grad, f"{ctx.layer} backward"), None


meet_fault.register_fake(lambda x, where: torch.empty_like(x))
meet_fault.register_autograd(_meet_in_backward, setup_context=_save_place)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fsdp_passes_test.meet_fault(torch.tanh(self.inner(x)), f"{self.index} forward")


def train(mesh: DeviceMesh | None, way: str, where: str, fault: Any) -> dict[str, Any]:
    """Three steps with a model of five units; the fault comes in the last one. What the error says."""
    global _fault, _where
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(index) for index in range(5)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_collective_timeout(TIMEOUT_S)
    call = model if way == "fallback" else torch.compile(model, backend=overlap_fsdp, options={"inner": way})

    def step(around_backward: contextlib.AbstractContextManager[Any]) -> None:
        loss = call(torch.ones(2, DIM)).square().sum()
        with around_backward:
            loss.backward()

    for _ in range(2):
        step(contextlib.nullcontext())
    if where == "backward":  # autograd gives each of its nodes the modes that were on where it was called
        error, waited_s = catch(Exception, lambda: step(fault or contextlib.nullcontext()))
    else:
        _fault, _where = fault, where
        error, waited_s = catch(Exception, lambda: step(contextlib.nullcontext()))
    assert error is not None
    return {**vars(error), "kind": type(error).__name__, "text": str(error), "total_s": waited_s}


def my_mesh(num_pairs: int) -> tuple[int, DeviceMesh | None]:
    """The ranks form pairs: which one is mine, and its mesh."""
    if num_pairs == 1:
        return 0, None
    pairs = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(num_pairs)]
    mine = dist.get_rank() // 2
    return mine, DeviceMesh.from_group(pairs[mine], "cpu")


# ---- on its way ------------------------------------------------------------------------------------------------------

CUT = [("fallback", "2 forward"), ("fallback", "0 backward"), ("aot_eager", "2 forward")]


def cut_connections() -> None:
    """End this process's connections to other ranks, as a broken network would; the store's stays."""
    store: Any = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for descriptor in os.listdir("/proc/self/fd"):
        # Suppressed: it is no socket, has no peer, or is gone by now.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
            is_network = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_network and store.port not in (connection.getpeername()[1], connection.getsockname()[1]):
                connection.shutdown(socket.SHUT_RDWR)


def lose_connections(cases: list[tuple[str, str]]) -> dict[str, Any]:
    mine, mesh = my_mesh(len(cases))
    return train(mesh, *cases[mine], cut_connections if dist.get_rank() % 2 else None)


@pytest.mark.parametrize("cases", [CUT, [("inductor", "0 backward")]], ids=["eager", "inductor"])
def test_a_connection_that_breaks_in_the_middle_of_a_step_is_named_on_both_sides(cases: list[tuple[str, str]]) -> None:
    outcomes = run(f"{HERE}:lose_connections", 2 * len(cases), cases=cases)
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    for rank, outcome in enumerate(outcomes):
        way, where = cases[rank // 2]
        seen = outcome.result
        assert seen["kind"] == "CollectiveError", (way, where, seen)
        assert seen["collective"] == ("all_gather" if "forward" in where else "reduce_scatter"), (way, where, seen)
        assert seen["unit"] in ({"3", "4"} if "forward" in where else {"0", "1"}), (way, where, seen)
        assert seen["missing_ranks"] == (), "both are alive"
        assert f"rank {rank ^ 1} failed in the {seen['collective']} of unit" in seen["text"], (way, where, seen)
        assert seen["total_s"] < 2 * TIMEOUT_S, "a receive ends at once, but a send in gloo only at the timeout"


# ---- where it is started ---------------------------------------------------------------------------------------------

REFUSED = [("fallback", "all_gather"), ("fallback", "reduce_scatter"), ("aot_eager", "reduce_scatter")]


class RefuseNext(TorchDispatchMode):
    """The next collective of one kind is given buffers of wrong sizes, and the backend refuses it."""

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.kind, self.group, self.is_over = kind, group, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = func.namespace in ("c10d", "_c10d_functional", "fsdp_passes")
        if is_collective and not self.is_over and self.kind.replace("_", "") in str(func).replace("_", ""):
            self.is_over = True
            one, both = torch.empty(2), [torch.empty(3), torch.empty(5)]
            if self.kind == "all_gather":
                dist.all_gather(both, one, group=self.group)
            else:
                dist.reduce_scatter(one, both, group=self.group)
        return func(*args, **(kwargs or {}))


def refuse(cases: list[tuple[str, str]]) -> dict[str, Any]:
    mine, mesh = my_mesh(len(cases))
    way, kind = cases[mine]
    is_odd = dist.get_rank() % 2 == 1
    mode = RefuseNext(kind, None if mesh is None else mesh.get_group())
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_passes").addHandler(handler)
    if kind == "all_gather":
        found = train(mesh, way, "1 forward", mode.__enter__ if is_odd else None)
    else:
        found = train(mesh, way, "backward", mode if is_odd else None)
    if is_odd:
        time.sleep(TIMEOUT_S + 4)  # alive, and not there
    return {**found, "logged": logged}


@pytest.mark.parametrize("cases", [REFUSED, [("inductor", "all_gather")]], ids=["eager", "inductor"])
def test_a_collective_that_the_backend_refuses_on_one_rank_is_named_and_the_others_miss_that_rank(
    cases: list[tuple[str, str]],
) -> None:
    outcomes = run(f"{HERE}:refuse", 2 * len(cases), cases=cases)
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    for pair, (way, kind) in enumerate(cases):
        left, refused = outcomes[2 * pair].result, outcomes[2 * pair + 1].result
        # What the layer before it computes behind was to hide it, or the loss.
        unit = refused["logged"][0].split("'")[1]
        assert unit in ({"2", "3"} if kind == "all_gather" else {"4"}), (way, kind, refused)
        assert refused["kind"] != "CollectiveError", "the backend's own error"
        text = f"unit '{unit}': expected to start its {kind}, found that it cannot be started on this rank. Unless all"
        assert refused["logged"][0].startswith(text), (way, kind, refused)
        assert f"{refused['kind']}: {refused['text'].splitlines()[0]}" in refused["logged"][0], "and what it says"
        assert refused["total_s"] < TIMEOUT_S, "at once"
        if sys.version_info >= (3, 11):
            assert refused["__notes__"][0].startswith(text), (way, kind, refused)
        assert left["kind"] == "CollectiveError", (way, kind, left)
        assert (left["unit"], left["collective"], left["missing_ranks"]) == (unit, kind, (2 * pair + 1,)), (way, left)
        assert f"rank {2 * pair + 1} is alive and waits for none" in left["text"]
        assert left["total_s"] < TIMEOUT_S + 5
