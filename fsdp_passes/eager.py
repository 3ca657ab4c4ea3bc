"""The eager fallback: a sharded model that is not compiled gathers, overlaps and reduces through hooks.

It shares `FsdpContext`, the process groups and the region names with the compiled path. In compiled code the hooks only
cast inputs and outputs, which the compiler traces.

    pre_forward(i):   start(i) unless prefetched ; start(i + 1) ; wait(i)
    post_forward(i):  queue the release of i
    pre_backward(i):  start(i) unless prefetched ; start(i - 1) ; start queued reductions ; wait(i)
    post_backward(i): pack gradients ; queue the release of i ; queue the reduction of i
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from fsdp_passes._torch_compat import (
    all_gather_coalesced,
    call_after_backward,
    is_in_backward,
    is_in_compiled_region,
    is_tracing_higher_order_op,
    never_compile_alone,
    tree_leaves,
    tree_map_only,
)
from fsdp_passes.context import DelayedRelease, FsdpContext, Phase
from fsdp_passes.debug import debug_flags, poison
from fsdp_passes.gather_ops import drop_started
from fsdp_passes.lookahead import Entry
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.reduction import reduce_gradients
from fsdp_passes.regions import (
    BACKWARD_COMPUTE,
    FORWARD_COMPUTE,
    close_regions_above,
    pop_region,
    push_region,
    region_name,
)
from fsdp_passes.unit import FsdpUnit, unit_of


def install_hooks(module: nn.Module) -> None:
    """Let the unit of `module` gather and release around its forward and backward."""
    module.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_post_forward, always_call=True)


# ---- gather and release ----------------------------------------------------------------------------------------------


def start_gather(unit: FsdpUnit) -> None:
    """Start the unit's all-gather, unless its current values are gathered or on their way."""
    versions = [param.values_version for param in unit.params]
    if not unit.params or unit.gathered_versions == versions:
        return
    finish_gather(unit)  # an older gather may still write into the same storage
    context, device = unit.context, unit.params[0].shard().device
    # At most the unit that computes and the one that is gathered now are whole.
    context.drain_delayed_releases(0)
    stream = context.communication_stream(device)
    if stream is not None and not is_in_backward():
        # The optimizer wrote the shards on the compute stream; a gather that did not wait would send old values. In
        # the backward nothing writes them, and waiting would put the gather behind the compute that should hide it.
        stream.wait_event(context.weights_ready_event(device))
    works = []
    push_region(region_name(unit.display_name, "all_gather"))
    with context.on_communication_stream(device):
        for params in _by_dtype(unit.params):
            inputs = [param.shard().to(param.param_dtype) for param in params]
            outputs = [param.gather_buffer() for param in params]
            works.append(all_gather_coalesced(outputs, inputs, unit.mesh.get_group()))
        if stream is not None:
            for work in works:
                work.wait()  # the communication stream waits, not the host: NCCL runs on a stream of its own
    pop_region()
    done = stream.record_event() if stream is not None else None

    def wait() -> None:
        if done is None:
            for work in works:
                work.wait()
        else:
            # Without it the compute stream would read weights that have not arrived.
            torch.cuda.current_stream(device).wait_event(done)

    unit.pending_gather = wait
    unit.gathered_versions = versions


def finish_gather(unit: FsdpUnit) -> None:
    """Wait for the unit's all-gather if one is on its way."""
    if unit.pending_gather is not None:
        unit.pending_gather()
        unit.pending_gather = None


def release_kept(context: FsdpContext) -> None:
    """Before a new forward, release what an earlier one kept gathered and no backward released.

    Somebody may have written the parameters since, also through `.data`, which no version counter sees.
    """
    for unit in context.units:
        if not unit.is_held:
            release(unit)
    context.drain_delayed_releases(0)


def release(unit: FsdpUnit) -> None:
    """Queue the release of the unit's gathered storage behind everything that was queued on the compute stream."""
    if unit.gathered_versions is None:
        return
    finish_gather(unit)
    unit.gathered_versions = None
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


def _by_dtype(params: list[FsdpParameter]) -> list[list[FsdpParameter]]:
    groups: dict[torch.dtype, list[FsdpParameter]] = {}
    for param in params:
        groups.setdefault(param.param_dtype, []).append(param)
    return list(groups.values())


# ---- forward ---------------------------------------------------------------------------------------------------------


@never_compile_alone
def _pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unit = unit_of(module)
    assert unit is not None
    if torch.compiler.is_compiling():
        if not is_tracing_higher_order_op():
            unit.is_in_compiled_forward = True  # the compiler replays this at a graph break, before eager code runs
    elif is_in_compiled_region():
        unit.may_run_eagerly = True
    else:
        _gather_for_forward(unit)
    dtype = unit.mp_policy.param_dtype
    if dtype is None or not unit.mp_policy.cast_forward_inputs:
        return None
    return _cast(args, dtype), _cast(kwargs, dtype)


@torch.compiler.disable
def _gather_for_forward(unit: FsdpUnit) -> None:
    context = unit.context
    if is_in_backward():  # activation checkpointing recomputes the unit
        for owner in (unit, *unit.borrows_from):
            start_gather(owner)
        for owner in (unit, *unit.borrows_from):
            finish_gather(owner)
        return
    for param in unit.params:
        param.sync_requires_grad()  # frozen or unfrozen since the last forward
    if unit.is_root and context.phases:
        _undo_interrupted(context)
    if not context.is_in_forward():
        release_kept(context)
        context.begin_forward()
    context.enter(unit, Phase.FORWARD)
    if unit not in context.forward_order:
        context.forward_order.append(unit)
    for owner in (unit, *unit.borrows_from):
        start_gather(owner)
    _start_ahead(unit, unit.forward_prefetch, context.next_in_forward(unit), is_backward=False)
    for owner in (unit, *unit.borrows_from):
        finish_gather(owner)
        for param in owner.params:
            _watch_gradient(param)
    push_region(region_name(unit.display_name, FORWARD_COMPUTE))


def _start_ahead(unit: FsdpUnit, chosen: list[FsdpUnit] | None, expected: list[FsdpUnit], *, is_backward: bool) -> None:
    """Start the gathers that `unit` computes in front of: the user's choice, or else a compiled graph if one came next
    the last time, or else the eager unit that is expected."""
    lookahead = unit.context.lookahead
    entry = Entry(unit, False, is_backward, is_backward, is_backward or torch.is_grad_enabled())
    lookahead.enter(entry, functools.partial(start_gather, unit))
    following = lookahead.next_entry()
    if chosen is None and following is not None and following.is_graph:
        lookahead.start_next()
        return
    for other in expected if chosen is None else chosen:
        start_gather(other)


def _undo_interrupted(context: FsdpContext) -> None:
    """A forward or backward that an exception left half-way: release what it gathered, forget what it queued.

    Its gradients are incomplete on this rank and would be added to the next step's.
    """
    if context.is_in_forward() or context.is_backward_callback_queued:
        context.forget_reductions()
        context.lookahead.interrupt()
        drop_started(context)
        close_regions_above(0)
        for unit in context.units:
            unit.is_in_compiled_forward = unit.may_run_eagerly = False
            for param in unit.params:
                param.placeholder.grad = None
            release(unit)
        context.drain_delayed_releases(0)
    context.phases.clear()


@never_compile_alone
def _post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    dtype = unit.mp_policy.output_dtype
    if dtype is not None:
        output = _cast(output, dtype)
    if torch.compiler.is_compiling():
        if not is_tracing_higher_order_op():
            unit.is_in_compiled_forward = False
    elif unit.may_run_eagerly:
        unit.may_run_eagerly = False  # all of it was compiled
    elif not is_in_backward():
        _end_forward(unit, output)
    return output


@torch.compiler.disable
def _end_forward(unit: FsdpUnit, output: Any) -> None:
    context = unit.context
    if output is None and sys.exc_info()[0] is not None:  # the forward raised; torch calls the hook all the same
        if unit.is_root:
            _undo_interrupted(context)
        return
    pop_region()
    context.enter(unit, Phase.RESTING)
    leaves = tree_leaves(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if tensors:
        hook = functools.partial(_pre_backward, unit)
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda grad: hook(), mode="any")
    # An output that hides its tensors in an object of unknown type cannot announce the backward: stay gathered.
    hides_tensors = torch.is_grad_enabled() and any(not _is_plain(leaf) for leaf in leaves)
    is_borrowed = any(unit in other.borrows_from for other in context.units if context.phase(other) is Phase.FORWARD)
    for owner in (unit, *unit.borrows_from) if not hides_tensors and not is_borrowed else ():
        if owner.reshards_after_forward or not torch.is_grad_enabled():
            release(owner)
    if not context.is_in_forward():
        context.drain_delayed_releases(0)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | complex | str | bytes)


@never_compile_alone
def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `values` in `dtype`."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


@never_compile_alone
def gather_for_eager_read(unit: FsdpUnit) -> None:
    """Make the unit's parameters whole when eager code reads them in a forward that did not gather them: between two
    graphs, or outside of their own module (`head.weight` in a chunked loss)."""
    if unit.may_run_eagerly:
        unit.may_run_eagerly = False
        _gather_for_forward(unit)
        return
    context = unit.context
    if context.is_in_forward() or any(u.is_in_compiled_forward or u.may_run_eagerly for u in context.units):
        _gather_on_demand(unit)


@torch.compiler.disable
def _gather_on_demand(unit: FsdpUnit) -> None:
    """Make the unit's parameters whole for eager code that no hook prepared.

    They stay whole until the backward has ended, or without gradients until the next compiled graph runs: what reads
    them is not known.
    """
    if not is_in_backward():
        for param in unit.params:
            param.sync_requires_grad()
    start_gather(unit)
    _start_ahead(unit, None, [], is_backward=False)
    finish_gather(unit)
    for param in unit.params:
        _watch_gradient(param)
    if unit not in unit.context.on_demand:
        unit.context.on_demand.append(unit)


def release_on_demand(context: FsdpContext) -> None:
    """Release what `gather_on_demand` gathered, when no backward will."""
    if context.on_demand and not torch.is_grad_enabled():
        for unit in context.on_demand:
            release(unit)
        context.on_demand.clear()
        context.drain_delayed_releases(0)


# ---- backward --------------------------------------------------------------------------------------------------------


def _pre_backward(unit: FsdpUnit) -> None:
    context = unit.context
    _queue_end_of_backward(context)
    if context.phase(unit) is Phase.BACKWARD:
        return
    context.enter(unit, Phase.BACKWARD)
    unit.ready_grads.clear()
    for owner in (unit, *unit.borrows_from):
        start_gather(owner)
    _start_ahead(unit, unit.backward_prefetch, context.next_in_backward(unit), is_backward=True)
    # Behind the all-gather: somebody waits for that soon, and on one stream it would queue behind the reductions.
    context.drain_delayed_reductions(0)
    # One reduction may stay on the wire while this unit computes; older ones have had a whole unit's time.
    context.finish_reductions(1)
    for owner in (unit, *unit.borrows_from):
        finish_gather(owner)
    context.switch_backward_region(region_name(unit.display_name, BACKWARD_COMPUTE))


def _queue_end_of_backward(context: FsdpContext) -> None:
    if not context.is_backward_callback_queued:
        context.is_backward_callback_queued = True
        call_after_backward(functools.partial(_end_backward, context))


def _watch_gradient(param: FsdpParameter) -> None:
    """Learn when the parameter's gradient is complete. Registered once for each placeholder."""
    if not getattr(param.placeholder, "_fsdp_is_watched", False) and param.placeholder.requires_grad:
        param.placeholder._fsdp_is_watched = True  # type: ignore[attr-defined]
        param.placeholder.register_post_accumulate_grad_hook(lambda _: _gradient_is_ready(param))


def _gradient_is_ready(param: FsdpParameter) -> None:
    unit = param.unit
    _queue_end_of_backward(unit.context)
    unit.ready_grads.add(param)
    trainable = [other for other in unit.params if other.placeholder.requires_grad]
    if len(unit.ready_grads) < len(trainable):
        return
    reduce_gradients(unit, trainable)
    unit.ready_grads.clear()
    # A frozen parameter's last reader announces nothing: such a unit stays gathered until the backward has ended.
    if len(trainable) == len(unit.params):
        release(unit)
        unit.context.finished_backward.append(unit)
        unit.context.enter(unit, Phase.RESTING)


def _end_backward(context: FsdpContext) -> None:
    """Finish what the hooks could not: units with unused or frozen parameters, the last reductions and releases."""
    context.is_backward_callback_queued = False
    context.switch_backward_region(None)
    for unit in context.units:
        with_grads = [param for param in unit.params if param.placeholder.grad is not None]
        if with_grads:
            reduce_gradients(unit, with_grads)
        unit.ready_grads.clear()
        release(unit)
    drop_started(context)
    context.phases.clear()
    context.on_demand.clear()
    context.finished_backward.clear()
    context.drain_delayed_reductions(0)
    context.finish_reductions(0)
    context.drain_delayed_releases(0)
