"""What runs around a compiled graph on each call: shards in, gradients out.

It runs on the host before every graph, for hundreds of parameters, and nothing hides it when a step is short. So each
loop over parameters reads each attribute once and makes no call that it can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_passes._torch_compat import has_gradient_hooks, is_in_backward, make_dtensor, tangents_of, writes_gradient
from fsdp_passes.context import ensure_reduce_group
from fsdp_passes.copies import check_copies
from fsdp_passes.eager_backward import gradient_sinks, queue_end_of_backward, watch_backward
from fsdp_passes.errors import ForwardModeError, StaleParametersError
from fsdp_passes.gather_ops import await_left_behind
from fsdp_passes.gathering import forget_whole_gradients, undo_interrupted
from fsdp_passes.gradients import write_at_home
from fsdp_passes.mesh import REDUCE_GROUP_SUFFIX
from fsdp_passes.options import OverlapOptions
from fsdp_passes.parameter import FsdpParameter, GradientSink, fsdp_parameters_at
from fsdp_passes.passes._uses import ParameterUse
from fsdp_passes.reduction import reduce_at_once, reduce_late
from fsdp_passes.regions import close_backward_regions, close_regions_above, num_open_regions
from fsdp_passes.stand_in import are_active

Compiled = Callable[..., Any]


class HandOut(torch.autograd.Function):
    """Sharded parameters in, what the graph takes for them out; in backward, its gradients in and DTensors out.

    The graph takes this rank's padded shard and reduces the gradient; or for the last `num_whole` parameters the tensor
    without storage whose gradient comes whole. That one is reduced here, while the next graph computes, and reaches
    `.grad` before the backward ends.

    One node for all parameters of a graph: a node per parameter would cost more than a small layer's compute.
    """

    @staticmethod
    def forward(
        ctx: Any, params: list[FsdpParameter], num_whole: int, reduce_group_suffix: str, *sharded: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.params, ctx.first_whole, ctx.suffix = params, len(params) - num_whole, reduce_group_suffix
        ctx.set_materialize_grads(False)  # what the graph makes no gradient for has none, as without sharding
        # Leaves, which autograd's nodes behind this one hold anyway.
        ctx.sharded, ctx.versions = sharded, [param._version for param in sharded]
        # Fresh aliases: autograd writes its history into the tensors that a Function returns.
        taken = [param.padded_local for param in params[: ctx.first_whole]]
        taken += [param.placeholder for param in params[ctx.first_whole :]]
        return tuple([tensor.detach() for tensor in taken])

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        for param, now, version in zip(ctx.params, ctx.sharded, ctx.versions, strict=True):
            if now._version != version:  # the backward has gathered what was written
                raise StaleParametersError(param.unit.display_name)
        first = ctx.first_whole
        reduced: list[torch.Tensor | None] = [
            *grads[:first],
            *_reduce_behind_graph(ctx.params[first:], grads[first:], ctx.next_functions[first:], ctx.suffix),
        ]
        for index, (param, grad) in enumerate(zip(ctx.params, reduced, strict=True)):
            if grad is not None and param.local_rows != param.rows_per_rank:
                reduced[index] = grad[: param.local_rows]
        _leave_at_home(ctx.params, reduced, ctx.next_functions)
        results: list[DTensor | None] = []
        for param, grad in zip(ctx.sharded, reduced, strict=True):
            results.append(None if grad is None else make_dtensor(grad, param))
        return None, None, None, *results


def _reduce_behind_graph(
    params: Sequence[FsdpParameter], grads: Sequence[Any], receivers: Sequence[tuple[Any, int]], suffix: str
) -> list[torch.Tensor | None]:
    """Reduce whole gradients of one unit while autograd goes on.

    `receivers`: the nodes of autograd that take the results. Padded shards are returned where they cannot come later:
    to a caller of `torch.autograd.grad`, where only some are to be written, and where autograd has hooks to call, once
    with the sum. Else None for all.
    """
    if not params:
        return []
    context = params[0].unit.context
    whole = {param: grad for param, grad in zip(params, grads, strict=True) if grad is not None}
    if not whole:
        return [None] * len(params)
    if not all(writes_gradient(node) for node, _ in receivers) or any(
        has_gradient_hooks(param.sharded_param) for param in params
    ):
        reduced = reduce_at_once(params[0].unit, whole, suffix)
        return [reduced.get(param) for param in params]
    queue_end_of_backward(context)
    reduce_late(params[0].unit, whole, suffix)
    num_late = len(context.delayed_reductions)
    # The gathers of the next graph are on their way: nothing that is waited for sooner queues behind these reductions.
    context.drain_delayed_reductions(0)
    # They stay on the wire while the next graph computes; those before them have had this graph's time.
    context.finish_reductions(num_late)
    return [None] * len(params)


def _leave_at_home(
    params: Sequence[FsdpParameter], grads: list[torch.Tensor | None], receivers: Sequence[tuple[Any, int]]
) -> None:
    """Gradients of offloaded parameters, which the graph has sent to the CPU: they are taken out of `grads`, and
    written when the backward has ended. Autograd would read them on the host before they have come.

    Autograd runs this on the thread of the CPU's nodes, beside the one that queues the device's work.

    `receivers`: as for `_reduce_behind_graph`, and where that returns gradients, the host waits for them here.
    """
    at_home = [i for i, grad in enumerate(grads) if grad is not None and params[i].home is not None]
    if not at_home:
        return
    context = params[at_home[0]].unit.context
    if not all(writes_gradient(receivers[i][0]) for i in at_home) or any(
        has_gradient_hooks(params[i].sharded_param) for i in at_home
    ):
        context.offloading.await_reads()  # a hook may write the shards
        context.offloading.await_sent()
        return
    queue_end_of_backward(context)
    write_at_home([params[i] for i in at_home], [grad for i in at_home if (grad := grads[i]) is not None])
    for i in at_home:
        grads[i] = None


class CompiledCall:
    """A compiled graph that takes the placeholders which Dynamo passes, and computes with the shards behind them.

    The positions are the graph's; the parameters are those of each call. One artifact serves every layer with the same
    code. A parameter that was frozen or unfrozen since the graph was compiled needs another graph: a gradient would be
    missing or reduced for nothing. So does one whose group, dtypes or resharding differ from what the graph assumes.

    Attributes:
        inner: the compiled graph; it takes shards in place of placeholders, and labels behind all other inputs.
        recompile: takes the same arguments as a call, and compiles for them.
        positions: where the graph's inputs are placeholders of sharded parameters.
        label_from: for each label, the index in `positions` of a parameter of its unit.
        sinks: where it sends their gradients.
        stand_in: takes the arguments of a call as one sequence; what it returns, a call returns while warming up.
        enables_grad: whether it computes with gradients where they are off around the call.
        constants: `graph_constants` of the parameters that it was compiled for.
        unit_constants: those of the unit of each parameter.
        requires_grad: whether each of them required a gradient.
    """

    def __init__(
        self,
        inner: Compiled,
        recompile: Compiled,
        uses: Sequence[ParameterUse],
        label_from: Sequence[int],
        settings: OverlapOptions,
        stand_in: Compiled,
        *,
        enables_grad: bool = False,
    ) -> None:
        self.inner = inner
        self.recompile = recompile
        self.positions = tuple(use.position for use in uses)
        self.label_from = tuple(label_from)
        self.constants = [use.param.graph_constants for use in uses]
        self.unit_constants = [use.param.unit.graph_constants for use in uses]
        self.requires_grad = [use.param.placeholder.requires_grad for use in uses]
        self.sinks = [use.sink for use in uses]
        self._is_last = [use.is_last for use in uses]
        # These sinks are the units' choice. The others never change: those of frozen parameters and of the last unit.
        self._with_units_sink = [
            index for index, needs_grad in enumerate(self.requires_grad) if needs_grad and not self._is_last[index]
        ]
        self._units_sinks = [self.sinks[index] for index in self._with_units_sink]
        # These gradients are not reduced in the graph, or not over the replicas; the others are, if there are any.
        self._with_sink = [index for index, sink in enumerate(self.sinks) if sink is not GradientSink.SHARD]
        self._is_reduced = [
            needs_grad and sink is GradientSink.SHARD
            for needs_grad, sink in zip(self.requires_grad, self.sinks, strict=True)
        ]
        self._reduced = [index for index, is_reduced in enumerate(self._is_reduced) if is_reduced]
        self._is_offloaded = any(use.param.home is not None for use in uses)
        self.stand_in = stand_in
        self.enables_grad = enables_grad
        self._has_two_groups = not settings.unify_communication_stream

    def __call__(self, *args: Any) -> Any:
        params = fsdp_parameters_at(args, self.positions)
        sharded = [param.adopt_current() for param in params]
        if not self._fits(params, sharded):
            return self.recompile(*args)
        if are_active():
            return self.stand_in(args)
        params[0].unit.check_group()
        if tangents_of(args):
            raise ForwardModeError(params[0].unit.display_name)
        inputs = list(args)
        # Inside of `inference_mode`, enabling gradients changes nothing.
        needs_grad = torch.is_grad_enabled() or (self.enables_grad and not torch.is_inference_mode_enabled())
        sinks, is_watched = self._hand_out(inputs, params, sharded, needs_grad)
        for index in self.label_from:
            inputs.append(params[index].unit.label)
        inputs += sinks
        if self._has_two_groups:
            for mesh in dict.fromkeys(params[index].mesh for index in self.label_from):
                ensure_reduce_group(mesh)
        context = params[0].unit.context
        if context.copies:
            check_copies(context)
        if not is_in_backward():
            if context.is_backward_callback_queued:
                undo_interrupted(context)  # the backward before this call raised
            context.is_grad_enabled = needs_grad
            close_backward_regions()
        context.lookahead.open_requests = None
        depth = num_open_regions()
        try:
            outputs = self.inner(*inputs)
        except BaseException as error:
            context.lookahead.interrupt()
            await_left_behind(error)
            if not is_in_backward():
                forget_whole_gradients(context)  # of earlier micro-batches: their step is given up
            raise
        finally:
            close_regions_above(depth)
        if is_watched or self._is_offloaded:
            watch_backward(context, outputs)
        if self._is_offloaded and not is_in_backward() and not context.is_in_forward():
            context.offloading.await_reads()  # the caller may write the shards now
        return outputs

    def _fits(self, params: list[FsdpParameter], sharded: list[nn.Parameter]) -> bool:
        """Whether the graph was compiled for such parameters; if not, their placeholders follow them."""
        # Dynamo's guards see to it that the placeholders require gradients as they did when it was compiled.
        fits = [param.requires_grad for param in sharded] == self.requires_grad
        if not fits:
            for param in params:
                param.sync_requires_grad()
        if not fits or [param.graph_constants for param in params] != self.constants:
            return False
        units = [param.unit for param in params]
        constants = {unit: unit.graph_constants for unit in set(units)}
        if [constants[unit] for unit in units] != self.unit_constants:
            return False
        sinks = {unit: unit.gradient_sink for unit in constants}
        return [sinks[units[index]] for index in self._with_units_sink] == self._units_sinks

    def _hand_out(
        self, inputs: list[Any], params: list[FsdpParameter], sharded: list[nn.Parameter], needs_grad: bool
    ) -> tuple[list[torch.Tensor], bool]:
        """Put shards in the placeholders' places. Returns the sinks of the gradients that are not reduced in the graph,
        or not over the replicas, and whether gradients stay in some of them until the backward has ended."""
        for position, param, is_reduced in zip(self.positions, params, self._is_reduced, strict=True):
            if not (needs_grad and is_reduced):
                inputs[position] = param.padded_local
        late = [i for i in self._with_sink if needs_grad and self._is_last[i] and not params[i].unit.accumulates_grads]
        through = self._reduced + late if needs_grad else []
        sinks: dict[int, torch.Tensor] = {}
        if through:
            suffix = REDUCE_GROUP_SUFFIX if self._has_two_groups else ""
            with torch.enable_grad():
                taken = HandOut.apply([params[i] for i in through], len(late), suffix, *[sharded[i] for i in through])
            for index, tensor in zip(through, taken, strict=True):
                if self._is_reduced[index]:
                    inputs[self.positions[index]] = tensor
                else:
                    sinks[index] = tensor
        others = [index for index in self._with_sink if index not in sinks]
        sinks.update(zip(others, gradient_sinks([(params[i], self.sinks[i]) for i in others]), strict=True))
        return [sinks[index] for index in self._with_sink], bool(others)
