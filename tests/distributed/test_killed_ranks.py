"""A rank that is killed in a gather, a reduction, the optimizer or while it compiles, or that raises alone: in each
case the other one ends with an error that names it."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import CollectiveError
from tests.faults import catch, run

HERE = "tests.distributed.test_killed_ranks"
DIM = 8
TIMEOUT_S = 5.0
LATEST_S = 30.0  # on a busy machine; the default group's own timeout is 60 s
_deadly = ""  # what this process is to die in
_trap = ""  # what is to raise in this process


class TrapError(Exception):
    pass


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KilledIn(TorchDispatchMode):
    """This process ends when it has started its second collective of one kind, or its second send or receive of one
    tensor: two ranks of the fallback exchange."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.num_left = 2

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled models run as eager ones under a mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "fsdp_passes", "_c10d_functional") and self.kind in str(func).replace("_", ""):
            self.num_left -= 1
            if self.num_left == 0:
                kill_self()
        return result


@torch.library.custom_op("fsdp_passes_test::stumble", mutates_args=())
def stumble(x: Tensor, where: str) -> Tensor:
    if where == _trap:
        raise TrapError(where)
    return x.clone()


@stumble.register_fake
def _(x: Tensor, where: str) -> Tensor:
    if _deadly == "compilation":
        kill_self()
    return torch.empty_like(x)


stumble.register_autograd(
    lambda ctx, grad: (torch.ops.fsdp_passes_test.stumble(grad, "backward"), None),
    setup_context=lambda ctx, inputs, output: None,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fsdp_passes_test.stumble(torch.tanh(self.inner(x)), "forward")


def inside(where: str, phase: str) -> contextlib.AbstractContextManager[Any]:
    """Around a phase, "forward" or "backward", of a rank that is to end in "<collective> in <phase>"."""
    kind, _, wanted = where.partition(" in ")
    return KilledIn(kind) if wanted == phase else contextlib.nullcontext()


def train(model: nn.Module, call: Any, where: str, *, is_victim: bool) -> None:
    """Three steps; in the second one the victim dies or raises."""
    global _deadly, _trap
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "hook":
        model.get_parameter("1.inner.weight").register_post_accumulate_grad_hook(_hook)
    for index in range(3):
        _deadly = _trap = where if is_victim and index == 1 else ""
        rows = 3 if where == "compilation" and index == 1 else 2  # another shape: both compile again
        with inside(_deadly, "forward"):
            loss = call(torch.ones(rows, DIM)).square().sum()
        with inside(_deadly, "backward"):
            loss.backward()
        optimizer.step(kill_self if _deadly == "optimizer" else None)  # type: ignore[arg-type]
        optimizer.zero_grad()


def _hook(_: Tensor) -> None:
    if _trap == "hook":
        raise TrapError("hook")


STARTS = ("allgather in forward", "allgather in backward", "reducescatter in backward")
KILLED = [("fallback", where) for where in ("recv in forward", "send in forward", "send in backward")]
KILLED += [("aot_eager", where) for where in STARTS]
KILLED += [("fallback", "optimizer"), ("aot_eager", "compilation")]
RAISES = [("aot_eager", "forward"), ("fallback", "backward"), ("fallback", "hook")]
PAIRS = [*KILLED, *RAISES]
TRIPLES = [("fallback", where) for where in STARTS]  # three ranks use the collectives of gloo
GROUPS = [(way, where, 2) for way, where in PAIRS] + [(way, where, 3) for way, where in TRIPLES]
ENDS = [*accumulate(size for _, _, size in GROUPS)]
RANKS = [tuple(range(end - size, end)) for end, (_, _, size) in zip(ENDS, GROUPS, strict=True)]


def end_in_each_way() -> dict[str, Any]:
    """The ranks form groups; the second one of each group ends, in another way."""
    rank = dist.get_rank()
    groups = [dist.new_group([*ranks]) for ranks in RANKS]
    place = next(index for index, ranks in enumerate(RANKS) if rank in ranks)
    way, where, _ = GROUPS[place]
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    fully_shard(model, mesh=DeviceMesh.from_group(groups[place], "cpu"), units=["*"])
    model.set_collective_timeout(TIMEOUT_S)
    call: Any = model
    if way != "fallback":
        options = {"inner": way, "agreement_timeout_s": TIMEOUT_S}
        call = torch.compile(model, backend=overlap_fsdp, dynamic=False, options=options)
    if rank == RANKS[place][1]:
        train(model, call, where, is_victim=True)
        raise AssertionError("expected to end before")
    error, _ = catch(CollectiveError, lambda: train(model, call, where, is_victim=False))
    assert isinstance(error, CollectiveError), (way, where)
    return {**vars(error), "text": str(error)}


def test_a_rank_that_ends_in_any_way_is_named_by_the_others() -> None:
    outcomes = run(f"{HERE}:end_in_each_way", RANKS[-1][-1] + 1)
    for (way, where, _), (first, second, *others) in zip(GROUPS, RANKS, strict=True):
        victim = outcomes[second]
        if (way, where) in RAISES:
            assert f"TrapError: {where}" in victim.error, (way, where, victim)
        else:
            assert victim.exit_code == -signal.SIGKILL, (way, where, victim)
        for survivor in (outcomes[rank] for rank in (first, *others)):
            assert survivor.exit_code == 0, (way, where, survivor)
            seen = survivor.result
            assert seen is not None, (way, where, survivor.error)
            assert seen["missing_ranks"] == (second,), (way, where, seen)
            texts = (
                f"rank {second} gives no sign of life; it has probably ended",
                # On a busy machine the store may not answer in time either; in a pair, only one rank can be missing.
                f"no answer from rank {second}, nor from the store",
            )
            assert any(text in seen["text"] for text in texts), (way, where, seen)
            assert seen["unit"] in ("0", "1", "2", "3"), (way, where, seen)
            if where in ("optimizer", "compilation"):
                assert (seen["unit"], seen["collective"]) == ("0", "all_gather"), (way, where, seen)
            assert seen["waited_s"] < LATEST_S, (way, where, seen)
