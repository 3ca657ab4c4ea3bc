"""Gradients on meshes of two dimensions, outside of graphs: reduced over the shards, they wait for the all-reduce over
the replicas, or take part in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fsdp_passes._torch_compat import all_reduce_coalesced
from fsdp_passes.context import FinishReduction
from fsdp_passes.division import GradientDivision, division_over
from fsdp_passes.gradients import WriteGradients, keep_until_read, write_gradients
from fsdp_passes.mesh import num_replicas, replica_group
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.regions import ALL_REDUCE_REGION
from fsdp_passes.starts import starting
from fsdp_passes.unit import FsdpUnit
from fsdp_passes.watchdog import await_named, note_awaited_on_stream


def pass_on(
    unit: FsdpUnit,
    params: list[FsdpParameter],
    grads: list[torch.Tensor],
    division: GradientDivision,
    done: torch.cuda.Event | None,
    write: WriteGradients,
    *,
    reduce: bool,
) -> FinishReduction | None:
    """What a reduce-scatter made goes to the replicas, together with what waits for them; or waits too.

    Args:
        params, grads: of one dtype; each gradient has `rows_per_rank` rows and is written to.
        division: of the reduce-scatter, whose `after` has not been applied.
        done: behind the reduce-scatter; None on the CPU.
        write: takes what the all-reduce makes.
        reduce: whether to start the all-reduce.

    Returns:
        What waits for the all-reduce and writes the gradients; None when none was started.
    """
    context, device = unit.context, grads[0].device
    waiting = [param.partial_grad for param in params]
    made = context.record_compute(device) if any(grad is not None for grad in waiting) else None
    with torch.no_grad(), context.on_replica_stream(device):
        if done is not None:
            # Not behind all that the compute stream was given meanwhile, unless that made what waits.
            stream = torch.cuda.current_stream(device)
            stream.wait_event(done)
            if made is not None:
                stream.wait_event(made)
            keep_until_read([*grads, *(grad for grad in waiting if grad is not None)])
        for param, grad, earlier in zip(params, grads, waiting, strict=True):
            if division.after != 1.0:
                grad.mul_(division.after)
            if earlier is not None:
                grad.add_(earlier)
            param.partial_grad = None if reduce else grad
        behind = context.record_compute(device)
    if reduce:
        return _start_all_reduce(unit, params, grads, None, write)
    if behind is not None:
        torch.cuda.current_stream(device).wait_event(behind)  # the next micro-batch adds to them
    return None


def reduce_partial_gradients(unit: FsdpUnit) -> None:
    """Queue the all-reduce of gradients that wait for nothing else."""
    groups: dict[torch.dtype, list[FsdpParameter]] = {}
    for param in unit.params:
        if param in unit.accumulating_partially:
            groups.setdefault(param.reduce_dtype, []).append(param)
    for params in groups.values():
        grads = _take(params)
        device = grads[0].device
        start = functools.partial(_start_all_reduce, unit, params, grads, unit.context.record_compute(device))
        unit.context.enqueue_reduction(device, start)


def _take(params: Sequence[FsdpParameter]) -> list[torch.Tensor]:
    grads = []
    for param in params:
        assert param.partial_grad is not None
        grads.append(param.partial_grad)
        param.partial_grad = None
    return grads


def _start_all_reduce(
    unit: FsdpUnit,
    params: list[FsdpParameter],
    grads: list[torch.Tensor],
    made: torch.cuda.Event | None,
    write_reduced: WriteGradients = write_gradients,
) -> FinishReduction:
    """Average `grads` in place, behind what the stream of the replicas was given and behind `made`."""
    context, device = unit.context, grads[0].device
    group = replica_group(unit.mesh)
    assert group is not None
    # All of the division that the user has set is in the first reduction.
    factor = None if unit.divide_factor is None else 1.0
    name, dtype = params[0].replica_group_name, params[0].reduce_dtype
    division = division_over(name, device, num_replicas(unit.mesh), dtype, factor)
    with starting(unit, ALL_REDUCE_REGION), torch.no_grad(), context.on_replica_stream(device):
        if made is not None:
            torch.cuda.current_stream(device).wait_event(made)
        if division.before != 1.0:
            for grad in grads:
                grad.mul_(division.before)
        work = all_reduce_coalesced(grads, group, average=division.reduce_op == "avg")
        done = None
        if device.type == "cuda":
            keep_until_read(grads)
            work.wait()  # the stream of the replicas waits, not the host
            done = torch.cuda.current_stream(device).record_event()

    def finish(write: bool) -> None:
        if done is None:
            await_named(unit, ALL_REDUCE_REGION, group.group_name, work.wait)
        else:
            torch.cuda.current_stream(device).wait_event(done)  # as for a reduce-scatter
            note_awaited_on_stream(unit, ALL_REDUCE_REGION, group.group_name, device)
        if write:
            keep_until_read(grads)
            write_reduced(params, grads, division)

    return finish
