"""FsdpModule: the methods that a module gains when it becomes a unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_passes.context import Phase
from fsdp_passes.errors import NotAUnitError, UnitInUseError
from fsdp_passes.gathering import finish_gather, release, start_gather
from fsdp_passes.unit import FsdpUnit, unit_of


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unit: FsdpUnit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are whole; on CUDA the current stream waits, not the host."""
        finish_gather(self._unit)


class FsdpModule:
    """Mixed into the class of every module that `fully_shard` was called on; the methods are FSDP2's.

    They act on the eager fallback. In compiled code the schedule is in the graph.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters. With `async_op`, returns a handle whose `wait` completes it."""
        unit = _own_unit(self)
        start_gather(unit)
        unit.is_held = True
        if async_op:
            return UnshardHandle(unit)
        finish_gather(unit)
        return None

    def reshard(self) -> None:
        """Release this unit's gathered parameters. Raises `UnitInUseError` while its forward or backward runs."""
        unit = _own_unit(self)
        phase = unit.context.phase(unit)
        if phase is not Phase.RESTING:
            raise UnitInUseError(unit.display_name, phase.value)
        unit.is_held = False
        release(unit)
        unit.context.drain_delayed_releases(0)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units while this one computes its forward, instead of the one that followed it last time."""
        _own_unit(self).forward_prefetch = [_own_unit(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units while this one computes its backward, instead of the one that came before it."""
        _own_unit(self).backward_prefetch = [_own_unit(module) for module in modules]


def _own_unit(module: object) -> FsdpUnit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise NotAUnitError(type(module).__name__)
    return unit
