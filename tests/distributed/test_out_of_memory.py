"""No memory for what an all-gather makes: on one rank, which the others then miss, and on all of them together."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import CollectiveError
from fsdp_passes.unit import unit_of
from tests.faults import catch, run
from tests.ranks import RankPool
from tests.training import build, whole

HERE = "tests.distributed.test_out_of_memory"
# Above 32 MiB, so that the C library asks the system for each one and gives it back: 36 MiB of float32.
ROWS, DIM = 9 << 10, 1 << 10
HEADROOM_BYTES = 20 << 20  # less than the large weight, more than anything else that a step needs
TIMEOUT_S = 6.0
_where = ""  # where memory becomes short

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to know how much memory is in use")


def in_use_bytes() -> int:
    """Address space of this process, which is what the limit is about."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run_short() -> None:
    """From here on there is no memory for the large weight."""
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes() + HEADROOM_BYTES, resource.RLIM_INFINITY))


@torch.library.custom_op("fsdp_passes_test::come_to_limit", mutates_args=())
def come_to_limit(x: Tensor) -> Tensor:
    if _where == "forward":
        run_short()
    return x.clone()


come_to_limit.register_fake(torch.empty_like)
come_to_limit.register_autograd(lambda ctx, grad: grad)


@contextlib.contextmanager
def short_of_memory(where: str) -> Iterator[None]:
    """Memory becomes short there: in the first layer, or between forward and backward."""
    global _where
    _where = where
    try:
        yield
    finally:
        _where = ""
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Layer(nn.Module):
    """A small layer, in whose forward memory may become short."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fsdp_passes_test.come_to_limit(torch.tanh(self.inner(x)))


class Table(nn.Module):
    """A large weight of which a few columns are read, so that its gradient is the only other large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))  # another dtype: a gather of its own, and first
        self.weight = nn.Parameter(torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM) / (ROWS * DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[-1, :4] + self.bias.float()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.table, self.last = Layer(), nn.Linear(4, 4), Table(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(self.middle(self.first(x)))).square().mean()


def sharded(way: str) -> tuple[nn.Module, Any, nn.Module]:
    model, reference = build(Model)
    for parts in (model.table, reference.table):
        parts.weight.requires_grad_(False)
    fully_shard(model, units=["first", "middle", "table", "last"])
    model.set_collective_timeout(TIMEOUT_S)
    call = model if way == "fallback" else torch.compile(model, backend=overlap_fsdp, options={"inner": way})
    return model, call, reference


def step(model: nn.Module, call: Any) -> Tensor:
    loss = call(torch.arange(8.0).reshape(2, 4) / 8)
    if _where == "backward":
        run_short()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad
    model.zero_grad()
    return loss.detach()


# ---- all ranks together ----------------------------------------------------------------------------------------------


def all_run_short(way: str, where: str) -> str:
    """A step, one in which every rank has too little memory, which is given up, and another; the error's text."""
    model, call, reference = sharded(way)
    torch.testing.assert_close(step(model, call), step(reference, reference), rtol=0, atol=1e-6)
    pending = torch._C._distributed_c10d._get_work_registry_size()
    with short_of_memory(where):
        error, _ = catch(RuntimeError, lambda: step(model, call))
    assert error is not None
    model.zero_grad()
    dist.barrier()
    for _ in range(2):
        torch.testing.assert_close(step(model, call), step(reference, reference), rtol=0, atol=1e-6)
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param), reference.get_parameter(name).detach(), rtol=0, atol=1e-6)
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    stored = {p.name: p.placeholder.untyped_storage().nbytes() for u in units for p in u.params if not u.is_root}
    assert not any(stored.values()), stored
    assert torch._C._distributed_c10d._get_work_registry_size() == pending
    return f"{error} {getattr(error, '__notes__', '')}"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["fallback", "aot_eager"])
def test_ranks_that_run_short_together_may_catch_it_and_go_on(two_ranks: RankPool, way: str, where: str) -> None:
    for text in two_ranks.run(f"{HERE}:all_run_short", way=way, where=where):
        assert "can't allocate memory" in text, text
        assert sys.version_info < (3, 11) or "unit 'table': expected to start its all_gather" in text, text


# ---- one rank alone --------------------------------------------------------------------------------------------------


def one_runs_short(way: str, where: str) -> dict[str, Any]:
    model, call, _ = sharded(way)
    step(model, call)
    with short_of_memory(where if dist.get_rank() == 1 else ""):
        error, waited_s = catch(RuntimeError, lambda: step(model, call))
    return {**vars(error), "kind": type(error).__name__, "text": str(error), "total_s": waited_s}


@pytest.mark.parametrize(("way", "where"), [("fallback", "backward"), ("aot_eager", "forward")])
def test_a_rank_that_runs_short_alone_raises_and_the_others_miss_it(way: str, where: str) -> None:
    left, short = (outcome.result for outcome in run(f"{HERE}:one_runs_short", 2, way=way, where=where))
    assert "can't allocate memory" in short["text"], short
    assert left["kind"] == CollectiveError.__name__, left
    assert (left["unit"], left["collective"], left["missing_ranks"]) == ("table", "all_gather", (1,)), left
    assert left["total_s"] < TIMEOUT_S + 5
