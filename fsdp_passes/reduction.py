"""Gradients of the eager fallback, and those that compiled graphs leave whole: packed, reduced, and written into the
sharded parameters' `.grad`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_passes._torch_compat import group_of, has_gradient_hooks
from fsdp_passes.collectives import reduce_scatter
from fsdp_passes.context import FinishReduction
from fsdp_passes.division import GradientDivision, division_over
from fsdp_passes.gradients import WriteGradients, keep_until_read, write_gradients
from fsdp_passes.layout import scattered_from_whole
from fsdp_passes.mesh import num_replicas, shard_group
from fsdp_passes.offload import CPU
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.regions import REDUCE_SCATTER_REGION
from fsdp_passes.replicas import pass_on
from fsdp_passes.starts import starting
from fsdp_passes.unit import FsdpUnit
from fsdp_passes.watchdog import await_named, note_awaited_on_stream


def take_gradients(unit: FsdpUnit, params: list[FsdpParameter]) -> None:
    """Take the placeholders' gradients: queue their reduction, or with gradient sync off add them to those that wait
    for it."""
    if unit.syncs_gradients:
        reduce_gradients(unit, params)
        return
    for param in params:
        # In the reduction's dtype: bf16 would lose small gradients in a sum of many.
        param.accumulated_grad = _whole_gradient(param)


def reduce_gradients(unit: FsdpUnit, params: list[FsdpParameter]) -> None:
    """Take the gradients of placeholders and those that wait, pack them and queue their reduction."""
    unit.check_group()
    _queue(unit, {param: _whole_gradient(param) for param in params}, shard_group(unit.mesh))


def reduce_late(
    unit: FsdpUnit,
    grads: dict[FsdpParameter, torch.Tensor],
    group_suffix: str,
    write: WriteGradients = write_gradients,
) -> None:
    """Queue the reduction of whole gradients of one unit that a compiled graph left.

    Args:
        group_suffix: behind the name of the group that carries it.
        write: takes what was reduced, on the compute stream.
    """
    unit.check_group()
    group = group_of(shard_group(unit.mesh).group_name + group_suffix)
    whole = {param: grad.detach().to(param.reduce_dtype) for param, grad in grads.items()}
    _queue(unit, whole, group, write, is_from_graph=True)


def reduce_at_once(
    unit: FsdpUnit, grads: dict[FsdpParameter, torch.Tensor], group_suffix: str
) -> dict[FsdpParameter, torch.Tensor]:
    """As `reduce_late`, with the same collectives, but wait for them. Returns the reduced gradients, shape
    (rows_per_rank, *rest), in the parameters' dtype; without those that wait for an all-reduce over the replicas."""
    reduced: dict[FsdpParameter, torch.Tensor] = {}

    def keep(params: Sequence[FsdpParameter], outputs: Sequence[torch.Tensor], division: GradientDivision) -> None:
        for param, output in zip(params, outputs, strict=True):
            whole = output.mul_(division.after).to(param.orig_dtype)
            reduced[param] = whole if param.home is None else whole.to(CPU)  # which waits for it

    reduce_late(unit, grads, group_suffix, keep)
    unit.context.drain_delayed_reductions(0)
    unit.context.finish_reductions(0)
    return reduced


def _queue(
    unit: FsdpUnit,
    grads: dict[FsdpParameter, torch.Tensor],
    group: dist.ProcessGroup,
    write: WriteGradients = write_gradients,
    *,
    is_from_graph: bool = False,
) -> None:
    """Pack whole gradients, which are in the reduction's dtype, and queue one reduction for each dtype.

    Takes them out of `grads`: the fallback holds none of them besides what is packed.
    """
    groups: dict[torch.dtype, list[FsdpParameter]] = {}
    for param in grads:
        groups.setdefault(param.reduce_dtype, []).append(param)
    for dtype, params in groups.items():
        device = grads[params[0]].device
        division = division_over(params[0].group_name, device, group.size(), dtype, unit.divide_factor)
        packed = [_pack(param, grads.pop(param), division) for param in params]
        start = _Reduction(unit, params, packed, division, group, write, is_from_graph=is_from_graph).start
        unit.context.enqueue_reduction(packed[0].device, start)


def _whole_gradient(param: FsdpParameter) -> torch.Tensor:
    """Take what the placeholder has and what waits, in the reduction's dtype."""
    grad, waiting = param.placeholder.grad, param.accumulated_grad
    param.placeholder.grad = param.accumulated_grad = None
    if grad is None:
        assert waiting is not None
        return waiting
    grad = grad.to(param.reduce_dtype)
    return grad if waiting is None else waiting.add_(grad)


def _pack(param: FsdpParameter, grad: torch.Tensor, division: GradientDivision) -> torch.Tensor:
    """The whole gradient in the reduction's dtype, contiguous and as the reduce-scatter takes it: the parts
    of all ranks one behind the other, padding last."""
    if division.before != 1.0:
        grad = grad * division.before
    grad = scattered_from_whole(grad, param.world_size, param.shard_dim)
    if grad.shape == param.gathered_shape:
        return grad.contiguous()
    packed = grad.new_zeros(param.gathered_shape)
    packed[: grad.shape[0]].copy_(grad)
    return packed


class _Reduction:
    """One reduce-scatter, from its packed input to the sharded gradients; or to the all-reduce over the replicas, where
    there are some."""

    def __init__(
        self,
        unit: FsdpUnit,
        params: list[FsdpParameter],
        packed: list[torch.Tensor],
        division: GradientDivision,
        group: dist.ProcessGroup,
        write: WriteGradients,
        *,
        is_from_graph: bool,
    ) -> None:
        self.unit = unit
        self.params = params
        self.division = division
        self.group = group
        self.write = write
        self.is_from_graph = is_from_graph
        self.is_final = num_replicas(unit.mesh) == 1
        self.reduces_replicas = unit.reduces_replicas
        # Held until the reduction is done: their memory belongs to the compute stream, which could reuse it at once.
        self.packed = packed

    def start(self) -> FinishReduction:
        """Start it on the communication stream; call the result with True to wait for it and write the gradients, or
        with False to wait only."""
        context, device = self.unit.context, self.packed[0].device
        with context.on_communication_stream(device):
            with starting(self.unit, REDUCE_SCATTER_REGION):
                outputs = [
                    packed.new_empty(param.shard_shape) for param, packed in zip(self.params, self.packed, strict=True)
                ]
                average = self.division.reduce_op == "avg"
                work = reduce_scatter(outputs, self.packed, self.group, average=average)
            done = None
            if device.type == "cuda":
                work.wait()  # the communication stream waits, not the host
                # Hooks are the user's code and may step an optimizer: they run on the compute stream, behind the wait.
                # Another graph may add to the same `.grad`, which autograd does on the compute stream.
                has_hooks = any(has_gradient_hooks(param.sharded_param) for param in self.params)
                is_written = self.is_final and not has_hooks and not self.is_from_graph
                if self.params[0].home is not None:
                    # Sent to the CPU from here; hooks and other graphs' gradients meet it behind the backward.
                    is_written = self.is_final and self.write is write_gradients
                if is_written:
                    write_gradients(self.params, outputs, self.division)
                done = torch.cuda.current_stream(device).record_event()

        name = self.group.group_name

        def finish(write: bool) -> FinishReduction | None:
            if done is None:
                await_named(self.unit, REDUCE_SCATTER_REGION, name, work.wait)
            else:
                # The optimizer must not read gradients that are still being reduced, and the packed inputs must not
                # be reused before the reduction has read them.
                torch.cuda.current_stream(device).wait_event(done)
                note_awaited_on_stream(self.unit, REDUCE_SCATTER_REGION, name, device)
            self.packed = []
            if not write or (done is not None and is_written):
                return None
            if not self.is_final:
                reduce = self.reduces_replicas
                return pass_on(self.unit, self.params, outputs, self.division, done, self.write, reduce=reduce)
            keep_until_read(outputs)
            self.write(self.params, outputs, self.division)
            return None

        return finish
