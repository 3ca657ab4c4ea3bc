"""FsdpContext: what a root and all units nested in it share, in both ways of running."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_passes._torch_compat import group_timeout_s, register_group_alias
from fsdp_passes.errors import CollectiveError, DeviceError, PhaseError
from fsdp_passes.kept_copies import KeptCopies
from fsdp_passes.lookahead import LookAhead
from fsdp_passes.mesh import REDUCE_GROUP_SUFFIX, replica_group, shard_group
from fsdp_passes.offload import Offloading
from fsdp_passes.regions import pop_region, push_region
from fsdp_passes.streams import Purpose, Streams
from fsdp_passes.unit import FsdpUnit
from fsdp_passes.watchdog import set_collective_timeout


class FinishReduction(Protocol):
    """Waits for a reduction, and with `write` lets its results go on: into `.grad`, or into the reduction that follows.

    Returns what waits for that one; None when none was started.
    """

    def __call__(self, write: bool, /) -> FinishReduction | None: ...


class Phase(enum.Enum):
    """Where a unit is between two optimizer steps."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


ALLOWED_TRANSITIONS = {
    (Phase.RESTING, Phase.FORWARD),
    (Phase.FORWARD, Phase.RESTING),
    (Phase.FORWARD, Phase.BACKWARD),
    (Phase.RESTING, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.RESTING),
}


@dataclasses.dataclass
class DelayedRelease:
    """Gathered storage that is dropped once its last reader is done.

    Attributes:
        consumer_event: recorded on the compute stream behind the last use; None on the CPU, where the use is over when
            the release is queued.
        release: drops the storage.
    """

    consumer_event: torch.cuda.Event | None
    release: Callable[[], None]


@dataclasses.dataclass
class DelayedReduction:
    """Packed gradients whose reduction has not been started.

    Attributes:
        consumer_event: recorded on the compute stream where the gradients were packed; None on the CPU.
        start: starts the reduction and returns what waits for it.
    """

    consumer_event: torch.cuda.Event | None
    start: Callable[[], FinishReduction]


class FsdpContext:
    """Shared by a root and all units nested in it.

    Attributes:
        units: every unit, innermost first.
        forward_order: the units in the order in which the running (or last) forward entered them.
        previous_order: that of the forward before it, from which the next unit to gather follows.
        phases: the phase of each unit; units that are not in it are resting.
        delayed_releases: gathered storage that waits for its reader.
        delayed_reductions: gradients that wait for a place behind the next all-gather.
        started_reductions: reductions on the wire, oldest first, each with what waits for it and writes the gradients.
        finished_backward: units whose gradients are all reduced in the running backward.
        copies: what eager code gets of parameters that it reads outside of their unit's own code.
        lookahead: the order of graphs and eager units, and the gathers that were started ahead of graphs.
        offloading: copies of shards and gradients that live on the CPU.
        gathered_addresses: where the memory of each gathered parameter begins, until it is dropped.
        makes_graph: whether the running backward can be differentiated (`create_graph=True`).
        is_last_backward: whether a backward ends with a wait for its reductions; else the next one waits for them.
        is_grad_enabled: whether gradients were enabled where the running compiled graph was called.
    """

    def __init__(self) -> None:
        self.units: list[FsdpUnit] = []
        self.forward_order: list[FsdpUnit] = []
        self.previous_order: list[FsdpUnit] = []
        self.phases: dict[FsdpUnit, Phase] = {}
        self.delayed_releases: collections.deque[DelayedRelease] = collections.deque()
        self.delayed_reductions: collections.deque[DelayedReduction] = collections.deque()
        self.started_reductions: collections.deque[FinishReduction] = collections.deque()
        self.is_backward_callback_queued = self.makes_graph = False
        self.copies = KeptCopies()
        self.finished_backward: list[FsdpUnit] = []
        self.lookahead = LookAhead()
        self.offloading = Offloading()
        self.gathered_addresses: set[int] = set()
        self.is_grad_enabled = True
        self.is_last_backward = True
        self._streams = Streams()
        self._weights_ready: torch.cuda.Event | None = None
        self._backward_region: str | None = None
        self._device: torch.device | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpContext:
        """Nothing runs in a copy, and it has not seen an order yet. Each copied unit enters itself: a copy of a part of
        the model must not bring the rest along."""
        memo[id(self)] = new = FsdpContext()
        return new

    def adopt(self, other: FsdpContext) -> None:
        """Take over the units of a context whose root is nested in ours."""
        for unit in other.units:
            unit.context = self
        self.units.extend(other.units)
        other.units = []
        self.gathered_addresses |= other.gathered_addresses

    # ---- orders ------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The outermost unit is about to run: remember the last order, and what the optimizer has queued by now."""
        self.previous_order, self.forward_order = self.forward_order, []
        self._weights_ready = None

    def next_in_forward(self, unit: FsdpUnit) -> list[FsdpUnit]:
        """The unit that followed `unit` in the forward before, if any: it is gathered while `unit` computes."""
        order = self.previous_order
        index = order.index(unit) + 1 if unit in order else len(order)
        return order[index : index + 1]

    def next_in_backward(self, unit: FsdpUnit) -> list[FsdpUnit]:
        """The unit that `unit` followed in the forward, if any, unless its backward is over: a root that only has a
        head is done first, although it entered its forward first."""
        index = self.forward_order.index(unit) if unit in self.forward_order else 0
        before = self.forward_order[index - 1 : index] if index > 0 else []
        return [other for other in before if other not in self.finished_backward]

    def switch_backward_region(self, name: str | None) -> None:
        """Close the open backward region and open another. One follows the other: a unit's gradients may be complete
        after the next unit's backward has begun, so that ranges that nest would be closed in the wrong order."""
        if self._backward_region is not None:
            pop_region()
        self._backward_region = name
        if name is not None:
            push_region(name)

    # ---- phases ------------------------------------------------------------------------------------------------------

    def phase(self, unit: FsdpUnit) -> Phase:
        return self.phases.get(unit, Phase.RESTING)

    def is_in_forward(self) -> bool:
        """Whether any unit's forward is running (or was left by an exception)."""
        return any(phase is Phase.FORWARD for phase in self.phases.values())

    def is_in_any_forward(self) -> bool:
        """As `is_in_forward`, or a forward runs of which parts or all are compiled."""
        return self.is_in_forward() or any(unit.is_in_compiled_forward or unit.may_run_eagerly for unit in self.units)

    def enter(self, unit: FsdpUnit, phase: Phase) -> None:
        """Move `unit` to `phase`. Raises `PhaseError` for a transition that is not allowed."""
        before = self.phase(unit)
        if before is not phase and (before, phase) not in ALLOWED_TRANSITIONS:
            raise PhaseError(unit.display_name, before.value, phase.value)
        self.phases[unit] = phase

    def check_device(self, unit: FsdpUnit, device: torch.device) -> None:
        """Raise `DeviceError` when `unit` is elsewhere than the units that ran before. A model that moves as a whole
        begins anew."""
        if device != self._device:
            others = [other.params[0].placeholder.device for other in self.units if other.params and other is not unit]
            if self._device in others:
                raise DeviceError(unit.display_name, str(self._device), str(device))
            self._device, self._weights_ready = device, None

    # ---- streams -----------------------------------------------------------------------------------------------------

    def communication_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of all-gathers and reduce-scatters, or None on the CPU (gloo runs on threads of its own)."""
        return self._streams.get(Purpose.COMMUNICATION, device)

    def on_communication_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Allocate and run on the communication stream."""
        return self._streams.on(Purpose.COMMUNICATION, device)

    def on_replica_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Run on the stream of the all-reduces over replicas."""
        return self._streams.on(Purpose.REPLICAS, device)

    def on_cast_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Allocate and run on the stream of the casts ahead of compiled code's all-gathers."""
        return self._streams.on(Purpose.CASTS, device)

    def record_compute(self, device: torch.device) -> torch.cuda.Event | None:
        """An event behind everything that was queued on the compute stream; None on the CPU."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def weights_ready_event(self, device: torch.device) -> torch.cuda.Event:
        """Behind everything that the compute stream was given before this forward, the optimizer's step above all.

        Outside a forward (`unshard()` by hand) the event is recorded anew: the optimizer may have stepped since.
        """
        if self._weights_ready is None or not self.is_in_forward():
            self._weights_ready = torch.cuda.current_stream(device).record_event()
        return self._weights_ready

    def _communication_waits_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            stream = self.communication_stream(event.device)
            assert stream is not None
            stream.wait_event(event)

    # ---- delayed releases and reductions -----------------------------------------------------------------------------

    def drain_delayed_releases(self, target_length: int) -> None:
        """Release the oldest gathered storage until at most `target_length` releases wait."""
        while len(self.delayed_releases) > target_length:
            delayed = self.delayed_releases.popleft()
            # The storage goes back to the communication stream's pool. Without this wait the next all-gather could be
            # given the same memory and write into weights that the compute stream still reads.
            self._communication_waits_for(delayed.consumer_event)
            delayed.release()

    def enqueue_reduction(self, device: torch.device, start: Callable[[], FinishReduction]) -> None:
        """Queue a reduction behind the packing that was just queued on the compute stream."""
        self.delayed_reductions.append(DelayedReduction(self.record_compute(device), start))

    def drain_delayed_reductions(self, target_length: int) -> None:
        """Start the oldest reductions until at most `target_length` wait to be started."""
        while len(self.delayed_reductions) > target_length:
            delayed = self.delayed_reductions.popleft()
            # The reduction reads what the compute stream packed; it waits for that and for nothing queued later.
            self._communication_waits_for(delayed.consumer_event)
            self.started_reductions.append(delayed.start())

    def finish_reductions(self, target_length: int) -> None:
        """Wait for the oldest reductions on the wire until at most `target_length` are left, and those that follow
        them: an all-reduce over replicas starts behind its reduce-scatter and has one more unit's time. With 0, for
        all."""
        following = []
        while len(self.started_reductions) > target_length:
            following.append(self.started_reductions.popleft()(True))
        self.started_reductions.extend(finish for finish in following if finish is not None)
        if target_length == 0 and self.started_reductions:
            self.finish_reductions(0)

    def forget_reductions(self) -> None:
        """After an exception: drop what was queued; wait for what is on the wire, which other ranks take part in, and
        drop it too if it belongs to the backward that failed. What an earlier backward left there is complete."""
        self.delayed_reductions.clear()
        while self.started_reductions:
            with contextlib.suppress(CollectiveError):  # the first one was raised already, and it says more
                following = self.started_reductions.popleft()(not self.is_backward_callback_queued)
                if following is not None:
                    self.started_reductions.append(following)
        self.is_backward_callback_queued = False
        self.finished_backward.clear()
        self._backward_region = None


# By the group itself and weakly: a group that was destroyed takes its second group along.
_reduce_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def ensure_reduce_group(mesh: DeviceMesh) -> None:
    """Create the second group of `unify_communication_stream=False`, once per mesh.

    Creating a group waits for the other ranks, so this is called at the first execution of a graph and never while
    compiling: ranks may compile at different times, but they all reach the first execution.
    """
    group = shard_group(mesh)
    if group in _reduce_groups:
        return
    ranks = dist.get_process_group_ranks(group)
    timeout = datetime.timedelta(seconds=group_timeout_s(group))
    second: Any = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc="fsdp_reduce")
    register_group_alias(group.group_name + REDUCE_GROUP_SUFFIX, second)
    _reduce_groups[group] = second


def set_mesh_timeout(mesh: DeviceMesh, timeout_s: float) -> None:
    """Let the later collectives of the mesh's groups wait at most `timeout_s` seconds."""
    for group in (shard_group(mesh), replica_group(mesh)):
        if group is not None:
            set_collective_timeout(group.group_name, timeout_s)
            if group in _reduce_groups:
                _reduce_groups[group].set_timeout(datetime.timedelta(seconds=timeout_s))
