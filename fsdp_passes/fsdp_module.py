"""FsdpModule: the methods that a module gains when it becomes a unit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from fsdp_passes.context import Phase, set_mesh_timeout
from fsdp_passes.errors import NotAUnitError, OptionValueError, PrefetchError, UnitInUseError
from fsdp_passes.gathering import finish_gather, release, start_gather, undo
from fsdp_passes.unit import FsdpUnit, unit_of
from fsdp_passes.unsupported import UnsupportedMethods


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unit: FsdpUnit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are whole; on CUDA the current stream waits, not the host."""
        finish_gather(self._unit)
        self._unit.context.offloading.await_reads()  # the caller may write the shards now


class FsdpModule(UnsupportedMethods):
    """Mixed into the class of every module that `fully_shard` was called on; the methods are FSDP2's.

    What decides about values (gradient sync, the divide factor) and about resharding between forward and backward acts
    on compiled code too. The rest acts on the eager fallback only: in compiled code the schedule is in the graph, which
    gathers and releases for itself.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters. With `async_op`, returns a handle whose `wait` completes it."""
        unit = _own_unit(self)
        start_gather(unit)
        unit.is_held = True
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
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
        _own_unit(self).forward_prefetch = _listed_units(self, modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units while this one computes its backward, instead of the one that came before it."""
        _own_unit(self).backward_prefetch = _listed_units(self, modules)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients over the ranks, for accumulation over micro-batches.

        With False each rank adds its gradients up, whole and in `reduce_dtype`; `.grad` of the sharded parameters stays
        as it is. The first backward with True reduces the sum. Compiled code has a second graph for this, without
        reductions: the switch costs one compilation, at the first time. That second graph also runs the backward that
        ends the accumulation, and the sum is reduced behind it.

        `recurse`: for the units nested in this one too.
        """
        for unit in _units(self, recurse):
            unit.syncs_gradients = unit.reduces_replicas = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards and backwards inside add gradients up without reducing them: `set_requires_gradient_sync(False)`,
        and back to what it was."""
        before = [(unit, unit.syncs_gradients, unit.reduces_replicas) for unit in _units(self, True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, syncs_gradients, reduces_replicas in before:
                unit.syncs_gradients, unit.reduces_replicas = syncs_gradients, reduces_replicas

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards all-reduce gradients over replicas, for accumulation over micro-batches on a mesh of two
        dimensions. Without replicas it changes nothing.

        With False each rank adds up its rows, reduced over the shards, in `reduce_dtype`; `.grad` of the sharded
        parameters stays as it is. The first backward with True all-reduces the sum. Compiled code has a second graph
        for this, without all-reduces, which also runs the backward that ends the accumulation: the sum is all-reduced
        behind it. `set_requires_gradient_sync` sets this too.

        `recurse`: for the units nested in this one too.
        """
        for unit in _units(self, recurse):
            unit.reduces_replicas = requires_all_reduce

    def sync_replicas(self) -> None:
        """Overwrite the parameters of all replicas with those of the first, in this unit and in those nested in it.

        `fully_shard` does this itself. Call it where ranks initialized the shards on their own (`to_empty`, then random
        numbers from a seed for each rank). Every rank calls it.
        """
        for unit in _units(self, True):
            unit.sync_replicas()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backwards end with a wait for their reductions. With False, `.grad` is complete only behind
        a later backward with True: the reductions overlap with the forward in between. A compiled graph of the whole
        model waits all the same."""
        _own_unit(self).context.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by `factor` (> 0) instead of by the number of ranks. Compiled code is
        compiled anew."""
        if factor <= 0:
            raise OptionValueError("set_gradient_divide_factor", factor, "a factor above 0")
        _own_unit(self).divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """An older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    # ---- what stays gathered -----------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are dropped between forward and backward. Compiled code is compiled anew."""
        if not isinstance(reshard_after_forward, bool):
            raise OptionValueError("set_reshard_after_forward", reshard_after_forward, "True or False")
        for unit in _units(self, recurse):
            unit.reshard_after_forward, unit.kept_group = reshard_after_forward, None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are dropped behind a backward. With False the next forward does not gather them again,
        unless an optimizer wrote them. Writes through `.data` in between are not seen. In compiled code every graph
        gathers for itself."""
        for unit in _units(self, recurse):
            unit.reshards_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the backward gathers this unit's parameters. False is for units whose gradients can be computed
        without them (an embedding). Compiled backwards gather only what they read."""
        _own_unit(self).unshards_in_backward = unshard_in_backward

    def set_collective_timeout(self, timeout_s: float) -> None:
        """Let collectives of this unit and of those nested in it wait at most `timeout_s` seconds (> 0) for a missing
        rank; then every other rank gets a `CollectiveError` that names it. Acts on the units' process groups, and so on
        other collectives of these groups too; all ranks should set the same."""
        if not 0 < timeout_s < math.inf:
            raise OptionValueError("set_collective_timeout", timeout_s, "a finite number of seconds above 0")
        for mesh in dict.fromkeys(unit.mesh for unit in _units(self, True)):
            set_mesh_timeout(mesh, float(timeout_s))

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception left half-way, and gradients that were accumulated without
        sync. The next forward does so by itself when the exception came out of this model's own code."""
        undo(_own_unit(self).context)


def _units(module: object, recurse: bool) -> list[FsdpUnit]:
    own = _own_unit(module)
    assert isinstance(module, nn.Module)
    nested = [unit_of(child) for child in module.modules()] if recurse else [own]
    return [unit for unit in nested if unit is not None]


def _listed_units(module: object, listed: object) -> list[FsdpUnit]:
    """The units of the listed modules. That they are of one model is checked where they are gathered: the root may be
    sharded later."""
    own = _own_unit(module)
    is_single = isinstance(listed, nn.Module) and not isinstance(listed, nn.ModuleList)  # also an nn.Sequential
    if is_single or not isinstance(listed, Iterable):
        found = f"a single {type(listed).__name__}"
        raise PrefetchError(own.display_name, "a list of modules", found, "Pass [module], and [] for none.")
    return [_own_unit(one) for one in listed]


def _own_unit(module: object) -> FsdpUnit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise NotAUnitError(type(module).__name__)
    return unit
