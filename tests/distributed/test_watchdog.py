"""A rank that dies or leaves is named, with the unit and the collective that waits for it (situation 13)."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes._torch_compat import default_store
from fsdp_passes.errors import CollectiveError
from tests.distributed.checks import call_of
from tests.faults import catch, run

HERE = "tests.distributed.test_watchdog"
DIM = 8
TIMEOUT_S = 6.0
LATEST_S = 30.0  # on a busy machine; the default group's own timeout is 60 s
_deadly = ""  # the phase in which this process is to end


@torch.library.custom_op("fsdp_passes_test::die", mutates_args=())
def die(x: Tensor, phase: str) -> Tensor:
    if phase == _deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


die.register_fake(lambda x, phase: torch.empty_like(x))
die.register_autograd(
    lambda ctx, grad: (torch.ops.fsdp_passes_test.die(grad, "backward"), None),
    setup_context=lambda ctx, inputs, output: None,
)


class Layer(nn.Module):
    def __init__(self, is_deadly: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.is_deadly = is_deadly

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        return torch.ops.fsdp_passes_test.die(y, "forward") if self.is_deadly else y


def make(mesh: DeviceMesh | None = None, layers: int = 5) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(index == 2) for index in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(call: Any) -> None:
    call(torch.ones(2, DIM)).square().sum().backward()


# ---- a rank that leaves early ----------------------------------------------------------------------------------------

LEFT = [("fallback", (0, 1)), ("aot_eager", (2, 3)), ("inductor", (4, 5)), ("aot_eager", (6, 7, 8))]


def leave() -> dict[str, Any]:
    """In each group the second rank has one batch less than the others and does nothing until they are ready."""
    groups = [dist.new_group([*ranks]) for _, ranks in LEFT]
    place = next(index for index, (_, ranks) in enumerate(LEFT) if dist.get_rank() in ranks)
    way, ranks = LEFT[place]
    model = make(DeviceMesh.from_group(groups[place], "cpu"), layers=2)
    if way == "fallback":
        model.set_collective_timeout(TIMEOUT_S)
        call: Any = model
    else:
        call = torch.compile(model, backend=overlap_fsdp, options={"inner": way, "collective_timeout_s": TIMEOUT_S})
    for _ in range(3):
        step(call)
    store = default_store()
    if dist.get_rank() == ranks[1]:
        store.wait([f"ready/{rank}" for rank in ranks if rank != ranks[1]], datetime.timedelta(seconds=120))
        return {}
    error, waited_s = catch(CollectiveError, lambda: step(call))
    assert isinstance(error, CollectiveError)
    again, again_s = catch(CollectiveError, lambda: step(call))
    store.set(f"ready/{dist.get_rank()}", "")
    assert again is not None
    assert again_s < TIMEOUT_S / 2, "a group that failed is not tried again"
    return {**vars(error), "text": str(error), "total_s": waited_s}


def test_a_rank_with_fewer_batches_is_named_within_the_timeout() -> None:
    outcomes = run(f"{HERE}:leave", 9)
    assert [outcome.error for outcome in outcomes] == [""] * 9
    for way, (first, left, *others) in LEFT:
        for rank in (first, *others):
            seen = outcomes[rank].result
            assert (seen["unit"], seen["collective"], seen["missing_ranks"]) == ("0", "all_gather", (left,)), (
                way,
                seen,
            )
            assert (
                f"rank {left} is alive and waits for none: its last was the reduce_scatter of unit '0'" in seen["text"]
            )
            assert "all ranks must run as many steps, in an evaluation too" in seen["text"]
            assert seen["total_s"] < LATEST_S


# ---- a rank that dies ------------------------------------------------------------------------------------------------

PHASES = [("fallback", "forward"), ("fallback", "backward"), ("aot_eager", "forward"), ("aot_eager", "backward")]
PHASES += [("aot_eager", "between"), ("fallback", "first")]


def die_in_each_phase() -> dict[str, Any]:
    """The ranks form pairs; in each the second one dies, every pair in another phase."""
    global _deadly
    rank = dist.get_rank()
    pairs = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(len(PHASES))]
    way, phase = PHASES[rank // 2]
    model = make(DeviceMesh.from_group(pairs[rank // 2], "cpu"))
    model.set_collective_timeout(TIMEOUT_S)
    call = call_of(model, way)
    is_victim = rank % 2 == 1
    if is_victim and phase == "first":
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        global _deadly
        for index in range(4):
            if is_victim and index == 2:
                _deadly = phase
                torch.ops.fsdp_passes_test.die(torch.ones(1), "between")
            step(call)

    error, waited_s = catch(CollectiveError, train)
    assert isinstance(error, CollectiveError)
    return {**vars(error), "text": str(error), "total_s": waited_s}


def test_a_rank_killed_in_any_phase_is_named_and_the_others_end() -> None:
    outcomes = run(f"{HERE}:die_in_each_phase", 2 * len(PHASES))
    expected_units = {
        "forward": {"3", "4"},  # what the victim's compute of unit 2 was to hide, or the one behind it
        "backward": {"0", "1", "2", "3"},
        "between": {"0"},
        "first": {"0"},
    }
    for pair, (way, phase) in enumerate(PHASES):
        survivor, victim = outcomes[2 * pair], outcomes[2 * pair + 1]
        assert victim.exit_code == -signal.SIGKILL
        assert survivor.exit_code == 0, (way, phase, survivor)
        seen = survivor.result
        assert seen is not None, (way, phase, survivor.error)
        assert seen["missing_ranks"] == (2 * pair + 1,), (way, phase, seen)
        assert seen["unit"] in expected_units[phase], (way, phase, seen)
        assert f"rank {2 * pair + 1} gives no sign of life" in seen["text"]


def host_dies() -> dict[str, Any]:
    """Rank 0, which hosts the store, dies; rank 1 must neither hang nor need the store."""
    global _deadly
    model = make()
    model.set_collective_timeout(TIMEOUT_S)
    for index in range(3):
        if dist.get_rank() == 0 and index == 2:
            _deadly = "backward"
        error, waited_s = catch(CollectiveError, lambda: step(model))
        if isinstance(error, CollectiveError):
            return {**vars(error), "text": str(error), "total_s": waited_s}
    raise AssertionError("nothing was raised")


def test_without_the_store_s_host_a_rank_still_ends_with_an_error() -> None:
    killed, survivor = run(f"{HERE}:host_dies", 2, is_rank_0_host=True)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.exit_code == 0
    assert survivor.result is not None, survivor.error
    assert survivor.result["missing_ranks"] == (0,)
    assert survivor.result["total_s"] < LATEST_S
    assert "no answer from rank 0, nor from the store" in survivor.result["text"]
