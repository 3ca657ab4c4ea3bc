"""Gathering and releasing units in eager code: what the fallback's hooks and the methods of modules are made of."""

from __future__ import annotations

import contextlib
import functools

import torch

from fsdp_passes._torch_compat import is_in_backward, outside_transforms
from fsdp_passes.collectives import Transfers, all_gather
from fsdp_passes.context import DelayedRelease, FsdpContext
from fsdp_passes.debug import debug_flags, poison
from fsdp_passes.errors import CollectiveError, PrefetchError
from fsdp_passes.gather_ops import GatherRequest, drop_started
from fsdp_passes.lookahead import Entry
from fsdp_passes.mesh import shard_group
from fsdp_passes.offload import fetch
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.regions import ALL_GATHER_REGION, close_regions_above
from fsdp_passes.starts import starting
from fsdp_passes.unit import FsdpUnit
from fsdp_passes.watchdog import await_named, note_awaited_on_stream

Gather = tuple[list[FsdpParameter], list[torch.Tensor], Transfers]  # parameters and their buffers


def start_gather(unit: FsdpUnit) -> None:
    """Start the unit's all-gather, unless its current values are gathered or on their way."""
    versions = [param.values_version for param in unit.params]
    if not unit.params or unit.gathered_versions == versions:
        return
    unit.check_group()
    finish_gather(unit)  # an older gather may still write into the same storage
    context, device = unit.context, unit.params[0].placeholder.device
    context.check_device(unit, device)
    # At most the unit that computes and the one that is gathered now are whole.
    context.drain_delayed_releases(0)
    stream = context.communication_stream(device)
    if stream is not None and not is_in_backward():
        # The optimizer wrote the shards on the compute stream; a gather that did not wait would send old values. In
        # the backward nothing writes them, and waiting would put the gather behind the compute that should hide it.
        stream.wait_event(context.weights_ready_event(device))
    # Behind a forward that left a part on each of fewer ranks, these have the values.
    is_kept = is_in_backward() and unit.kept_versions == versions
    group = unit.kept_group if is_kept else shard_group(unit.mesh)
    assert group is not None
    gathers: list[Gather] = []
    try:
        with context.on_communication_stream(device), outside_transforms():
            with starting(unit, ALL_GATHER_REGION):
                for params in _by_dtype(unit.params):
                    kept = [param.kept_part if is_kept else None for param in params]
                    inputs = [
                        fetch([param.shard()], device)[0].to(param.param_dtype) if part is None else part
                        for param, part in zip(params, kept, strict=True)
                    ]
                    outputs = [param.gather_buffer(part) for param, part in zip(params, kept, strict=True)]
                    transfers = Transfers()
                    gathers.append((params, outputs, transfers))  # before the start, which may be interrupted
                    all_gather(outputs, inputs, group, transfers)
            if unit.params[0].home is not None:
                context.offloading.note_reads(device)
            if stream is not None:
                _complete(gathers)  # the communication stream waits, not the host: NCCL runs on a stream of its own
    except Exception:
        _give_up(unit, gathers)
        raise
    except BaseException:  # somebody who interrupts does not want to wait: what touches the unit next does
        unit.pending_gather = functools.partial(_give_up, unit, gathers)
        raise
    done = stream.record_event() if stream is not None else None

    def wait() -> None:
        if done is None:
            await_named(unit, ALL_GATHER_REGION, group.group_name, lambda: _complete(gathers))
        else:
            # Without it the compute stream would read weights that have not arrived.
            torch.cuda.current_stream(device).wait_event(done)
            note_awaited_on_stream(unit, ALL_GATHER_REGION, group.group_name, device)

    unit.pending_gather = wait
    unit.gathered_versions = versions


def _give_up(unit: FsdpUnit, gathers: list[Gather]) -> None:
    """A gather of the unit could not be started, for lack of memory for instance: wait for those of its other dtypes,
    which still write, and queue the release of all."""
    unit.pending_gather = None
    for _, _, work in gathers:
        with contextlib.suppress(Exception):  # a rank has ended: what was raised says more
            work.wait()
    unit.gathered_versions = [param.values_version for param in unit.params]
    release(unit)


def _complete(gathers: list[Gather]) -> None:
    """Wait for collectives, and let their parameters have the results."""
    for params, outputs, work in gathers:
        work.wait()
        for param, output in zip(params, outputs, strict=True):
            param.take_gathered(output)


def finish_gather(unit: FsdpUnit) -> None:
    """Wait for the unit's all-gather if one is on its way."""
    if unit.pending_gather is not None:
        with outside_transforms():
            unit.pending_gather()
        unit.pending_gather = None


def release_kept(context: FsdpContext) -> None:
    """Before a new forward, release what an earlier one kept gathered and no backward released.

    Somebody may have written the parameters since, also through `.data`, which no version counter sees. Raises
    `MutatedParameterError` if somebody has written into a copy.
    """
    for unit in context.units:
        if not unit.is_held and not unit.is_kept:
            release(unit)
    context.drain_delayed_releases(0)
    context.copies.drop()


def release(unit: FsdpUnit) -> None:
    """Queue the release of the unit's gathered storage behind everything that was queued on the compute stream."""
    finish_gather(unit)
    if unit.gathered_versions is None:
        return
    unit.gathered_versions = None
    unit.is_kept = False
    params, context = list(unit.params), unit.context

    def drop() -> None:
        for param in params:
            if debug_flags().nan:
                with context.on_communication_stream(param.placeholder.device):  # in order with the next gather
                    poison(param.gather_buffer())  # keeps the storage: a late read gives NaN instead of a crash
            else:
                param.release()

    event = context.record_compute(params[0].placeholder.device)
    context.delayed_releases.append(DelayedRelease(event, drop))


def keep_parts(unit: FsdpUnit) -> None:
    """Before the release behind a forward: with `reshard_after_forward` as a number, keep this rank's part of what is
    gathered, for the gather over fewer ranks in the backward."""
    if unit.kept_group is None or not unit.is_unsharded or not torch.is_grad_enabled():
        return
    for param in unit.params:
        param.keep_part()
    unit.kept_versions = unit.gathered_versions


def drop_parts(unit: FsdpUnit) -> None:
    """The backward is over: forget what `keep_parts` kept."""
    unit.kept_versions = None
    for param in unit.params:
        param.kept_part = None


def _by_dtype(params: list[FsdpParameter]) -> list[list[FsdpParameter]]:
    groups: dict[torch.dtype, list[FsdpParameter]] = {}
    for param in params:
        groups.setdefault(param.param_dtype, []).append(param)
    return list(groups.values())


def start_ahead(unit: FsdpUnit, chosen: list[FsdpUnit] | None, expected: list[FsdpUnit], *, is_backward: bool) -> None:
    """Start the gathers that `unit` computes in front of: the user's choice, or else a compiled graph if one came next
    the last time, or else the eager unit that is expected."""
    for other in chosen or ():
        if other.context is not unit.context:
            found = f"unit {other.display_name!r} of another model"
            instead = "Choose among the units below one root, or call fully_shard on the module that holds both."
            raise PrefetchError(unit.display_name, "units of its own model", found, instead)
    lookahead = unit.context.lookahead
    entry = Entry(unit, False, is_backward, is_backward, is_backward or torch.is_grad_enabled())
    lookahead.enter(entry, functools.partial(start_gather, unit))
    following = lookahead.next_entry()
    if chosen is None and following is not None and isinstance(following.what, GatherRequest):
        # A graph inside of an eager unit (only its `forward` is compiled) copies what was gathered for that.
        if following.what.params[0].unit.gathered_versions is None:
            lookahead.start_next()
        return
    for other in expected if chosen is None else chosen:
        if other.unshards_in_backward or not is_backward:
            start_gather(other)


def undo_interrupted(context: FsdpContext) -> None:
    """A forward or backward that an exception left half-way: undo it."""
    if context.is_in_forward() or context.is_backward_callback_queued:
        undo(context)
    context.phases.clear()


def undo(context: FsdpContext) -> None:
    """Release what was gathered, forget what was queued, and drop the gradients that are not in `.grad` yet.

    They are incomplete on this rank, or belong to a step that was given up, and would be added to the next step's.
    """
    # Gradients that an earlier backward sent are complete; those of a backward that failed are not.
    are_complete = not context.is_backward_callback_queued
    context.forget_reductions()
    context.lookahead.interrupt()
    with contextlib.suppress(CollectiveError):  # the first one was raised already, and it says more
        drop_started(context)
    context.lookahead.started.clear()
    close_regions_above(0)
    context.copies.clear()
    for unit in context.units:
        unit.is_in_compiled_forward = unit.may_run_eagerly = unit.is_recomputed = False
        for scalar in unit.scalars:
            scalar.placeholder.grad = None
        drop_parts(unit)
        # A group that failed is not waited for: the unit's gather may still run, on a thread of gloo that would write
        # into memory that is gone. The unit keeps its memory, and its next use raises again.
        with contextlib.suppress(CollectiveError):
            release(unit)
    forget_whole_gradients(context)
    context.drain_delayed_releases(0)
    context.phases.clear()
    if are_complete:
        context.offloading.await_reads()  # hooks that are called next may write the shards
    context.offloading.land(is_wanted=are_complete)


def forget_whole_gradients(context: FsdpContext) -> None:
    """Drop what backwards without gradient sync have added up, and what an interrupted one has left."""
    for unit in context.units:
        for param in unit.params:
            param.placeholder.grad = param.accumulated_grad = param.partial_grad = None
