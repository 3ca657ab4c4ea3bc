"""The backward half of the eager fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fsdp_passes._torch_compat import call_after_backward, with_bases_of_views
from fsdp_passes.context import FsdpContext, Phase
from fsdp_passes.errors import StaleParametersError
from fsdp_passes.gather_ops import drop_started
from fsdp_passes.gathering import drop_parts, finish_gather, release, start_ahead, start_gather
from fsdp_passes.parameter import FsdpParameter, GradientSink
from fsdp_passes.reduction import take_gradients
from fsdp_passes.regions import BACKWARD_COMPUTE, region_name
from fsdp_passes.replicas import reduce_partial_gradients
from fsdp_passes.unit import FsdpUnit


@torch.compiler.disable  # a forward that is compiled in parts may call the backward
def pre_backward(unit: FsdpUnit) -> None:
    context = unit.context
    queue_end_of_backward(context)
    if context.phase(unit) is not Phase.RESTING:  # its backward has begun, or its own forward has called this backward
        return
    context.enter(unit, Phase.BACKWARD)
    unit.ready_grads.clear()
    unit.has_input_grads = unit.are_grads_reduced = False
    for owner in (unit, *unit.borrows_from):
        if not owner.unshards_in_backward:
            continue
        start_gather(owner)
        if owner.forward_versions is not None and owner.forward_versions != owner.gathered_versions:
            raise StaleParametersError(owner.display_name)
    start_ahead(unit, unit.backward_prefetch, context.next_in_backward(unit), is_backward=True)
    # Behind the all-gather: somebody waits for that soon, and on one stream it would queue behind the reductions.
    context.drain_delayed_reductions(0)
    # One reduction may stay on the wire while this unit computes; older ones have had a whole unit's time.
    context.finish_reductions(1)
    for owner in (unit, *unit.borrows_from):
        finish_gather(owner)
    context.switch_backward_region(region_name(unit.display_name, BACKWARD_COMPUTE))


def gradient_sinks(params: Sequence[tuple[FsdpParameter, GradientSink]]) -> list[nn.Parameter]:
    """What a compiled graph that does not reduce the gradients of `params`, or not over the replicas, takes behind its
    labels. The sinks are watched, so that a gradient that arrives there is added up or reduced as in the fallback."""
    sinks = []
    for param, kind in params:
        watch_gradient(param) if kind is GradientSink.WHOLE else _watch_partial(param)
        sink = param.sink(kind)
        assert sink is not None
        sinks.append(sink)
    return sinks


@torch.compiler.disable
def queue_end_of_backward(context: FsdpContext) -> None:
    """Finish what this backward leaves, when it has ended."""
    if not context.is_backward_callback_queued:
        context.is_backward_callback_queued = True
        context.makes_graph = torch.is_grad_enabled()
        call_after_backward(functools.partial(_end_backward, context))


def watch_backward(context: FsdpContext, outputs: Sequence[object]) -> None:
    """Learn when a backward through `outputs` begins and whether it ends: one that raises must leave no gradient."""
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    announce_backward(tensors, functools.partial(queue_end_of_backward, context))


def announce_backward(outputs: Sequence[torch.Tensor], announce: Callable[[], None]) -> None:
    """Call `announce` once in each backward, when it comes to the first of `outputs`; also where their user changes
    them in place, as `ReLU(inplace=True)` does."""
    tensors = with_bases_of_views([output for output in outputs if output.requires_grad])
    if tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: announce(), mode="any")


def watch_gradient(param: FsdpParameter) -> None:
    """Learn when the parameter's gradient is complete. Registered once for each placeholder."""
    if not getattr(param.placeholder, "_fsdp_is_watched", False) and param.placeholder.requires_grad:
        param.placeholder._fsdp_is_watched = True  # type: ignore[attr-defined]
        param.placeholder.register_post_accumulate_grad_hook(functools.partial(_gradient_is_ready, param))


def _watch_partial(param: FsdpParameter) -> None:
    """Learn that a gradient waits for the replicas. Registered once for each sink."""
    sink = param.partial
    if not getattr(sink, "_fsdp_is_watched", False):
        sink._fsdp_is_watched = True  # type: ignore[attr-defined]
        sink.register_post_accumulate_grad_hook(functools.partial(_partial_is_ready, param))


@torch.compiler.disable
def _partial_is_ready(param: FsdpParameter, _: torch.Tensor) -> None:
    if param.partial_grad is None:
        return  # autograd came by without a gradient
    param.unit.accumulating_partially.add(param)
    queue_end_of_backward(param.unit.context)


@torch.compiler.disable
def _gradient_is_ready(param: FsdpParameter, _: torch.Tensor) -> None:
    unit = param.unit
    queue_end_of_backward(unit.context)
    unit.ready_grads.add(param)
    trainable = [other for other in unit.params if other.placeholder.requires_grad]
    if len(unit.ready_grads) < len(trainable):
        return
    take_gradients(unit, _with_gradients(unit))
    unit.ready_grads.clear()
    unit.are_grads_reduced = True
    if len(trainable) == len(unit.params) or unit.has_input_grads:
        _finish_backward(unit)


def _with_gradients(unit: FsdpUnit) -> list[FsdpParameter]:
    """The parameters that this backward made a gradient for, or with sync an earlier one without. Autograd comes to
    others, too: a graph or an `autograd.Function` may read a parameter and give it none."""
    is_synced = unit.syncs_gradients
    return [
        param
        for param in unit.params
        if param.placeholder.grad is not None or (is_synced and param.accumulated_grad is not None)
    ]


@torch.compiler.disable
def unit_has_input_gradients(unit: FsdpUnit) -> None:
    """The gradients of the unit's inputs are made; with those of its trainable parameters, its backward is over."""
    unit.has_input_grads = True
    if unit.are_grads_reduced or not any(param.placeholder.requires_grad for param in unit.params):
        _finish_backward(unit)
        # The gather of the unit before the next one has been started by now: nothing else would drain it for a while.
        unit.context.drain_delayed_releases(0)


def _release_behind_backward(unit: FsdpUnit) -> None:
    if unit.context.phase(unit) is Phase.FORWARD or unit.is_borrowed_in(Phase.FORWARD):
        return  # a forward that has called this backward goes on reading it
    if unit.context.makes_graph:
        return  # a backward through this one reads it, and nothing announces it there
    drop_parts(unit)
    if unit.reshards_after_backward:
        release(unit)
    elif unit.gathered_versions is not None:
        unit.is_kept = True


def _finish_backward(unit: FsdpUnit) -> None:
    context = unit.context
    if context.phase(unit) is Phase.FORWARD:
        return
    context.finished_backward.append(unit)
    context.enter(unit, Phase.RESTING)
    # A unit around or beside this one may still read a weight of it, above all a frozen one, whose last reader makes no
    # gradient for it. What this unit borrowed has waited for the same reason.
    for owner in (unit, *unit.borrows_from):
        if owner in context.finished_backward and not owner.is_borrowed_in(Phase.BACKWARD):
            _release_behind_backward(owner)


@torch.compiler.disable
def _end_backward(context: FsdpContext) -> None:
    """Finish what the hooks could not: units with unused parameters, or with frozen ones and no input that needs a
    gradient; the last reductions and releases. A forward that has called this backward goes on behind it."""
    context.is_backward_callback_queued = False
    context.switch_backward_region(None)
    for unit in context.units:
        with_grads = _with_gradients(unit)
        if with_grads:
            take_gradients(unit, with_grads)
        unit.ready_grads.clear()
        unit.is_recomputed = False
        _release_behind_backward(unit)
    drop_started(context)
    context.phases = {unit: phase for unit, phase in context.phases.items() if phase is Phase.FORWARD}
    context.finished_backward.clear()
    context.drain_delayed_reductions(0)
    if context.is_last_backward:
        context.finish_reductions(0)
        _reduce_what_waits_for_replicas(context)
    context.drain_delayed_releases(0)
    # First the reads: a gradient that lands calls hooks, and one of them may step an optimizer, which writes shards.
    context.offloading.await_reads()
    context.offloading.end_backward(is_last=context.is_last_backward)
    if not context.is_in_any_forward():
        context.copies.drop()


def _reduce_what_waits_for_replicas(context: FsdpContext) -> None:
    """All-reduce what compiled graphs and earlier backwards left, once the user asks for it again."""
    for unit in context.units:
        if unit.accumulating_partially and unit.syncs_gradients and unit.reduces_replicas:
            reduce_partial_gradients(unit)
    context.drain_delayed_reductions(0)
    context.finish_reductions(0)
