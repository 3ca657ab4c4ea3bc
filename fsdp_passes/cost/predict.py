"""The timeline that a graph's steps and a cluster predict."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_passes.cost.collectives import collective_us
from fsdp_passes.cost.hardware import Cluster
from fsdp_passes.cost.op_cost import OpCost
from fsdp_passes.cost.simulate import TimedStep, simulate
from fsdp_passes.cost.steps import Step
from fsdp_passes.cost.timeline import MemoryPoint, Timeline
from fsdp_passes.schedule import ALL_GATHER, REDUCE_SCATTER, Bucket

ONE_ROW = "communication"


def op_us(cost: OpCost, cluster: Cluster) -> float:
    """Roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is longer. Light
    operations are bound by memory."""
    accelerator = cluster.accelerator
    memory_s = float(cost.num_bytes) / (accelerator.memory_bandwidth * accelerator.memory_efficiency)
    compute_s = float(cost.flops) / accelerator.flops_of(cost.dtype) if cost.is_heavy else 0.0
    return max(memory_s, compute_s) * 1e6


def timed_steps(
    steps: Sequence[Step],
    *,
    phase: str,
    cluster: Cluster,
    world_size: int,
    unit_names: Sequence[str],
    unify_communication_stream: bool,
) -> list[TimedStep]:
    """Steps with durations; with two streams reduce-scatters have a row of their own."""
    timed = []
    for step in steps:
        unit = unit_names[step.unit] if step.unit is not None and step.unit < len(unit_names) else ""
        bucket = step.bucket
        if bucket is None:
            duration = op_us(step.cost, cluster) if step.cost is not None else 0.0
            timed.append(TimedStep("compute", step.name, unit, phase, duration))
            continue
        rows = {ALL_GATHER: ONE_ROW, REDUCE_SCATTER: ONE_ROW}
        if not unify_communication_stream:
            rows = {ALL_GATHER: "all_gather stream", REDUCE_SCATTER: "reduce_scatter stream"}
        duration = collective_us(bucket.num_bytes, world_size, cluster) if step.kind == "start" else 0.0
        timed.append(
            TimedStep(
                step.kind, step.name, unit, phase, duration, bucket, rows[bucket.kind], bucket.kind, bucket.num_bytes
            )
        )
    return timed


def predict_timeline(
    title: str, steps: Sequence[Step], timed: Sequence[TimedStep], *, kept: Sequence[Bucket] = ()
) -> Timeline:
    """The timeline of one graph.

    `kept`: gathers of the forward whose results the backward still reads (the root's); they are alive all the time.
    """
    spans, times = simulate(timed)
    return Timeline(title, spans, tuple(_memory_curve(steps, times, kept)))


def alive_until(steps: Sequence[Step]) -> dict[Bucket, int]:
    """Gather -> index of the step behind which its results are dropped; kept ones live to the end."""
    last: dict[Bucket, int] = {}
    for index, step in enumerate(steps):
        for bucket in (*step.reads, *([step.bucket] if step.bucket is not None else [])):
            if bucket.kind == ALL_GATHER:
                last[bucket] = index
    return {bucket: index if bucket.reshard else len(steps) for bucket, index in last.items()}


def _memory_curve(steps: Sequence[Step], times: Sequence[float], kept: Sequence[Bucket]) -> list[MemoryPoint]:
    until = alive_until(steps)
    changes: dict[float, int] = {}
    for index, step in enumerate(steps):
        if step.kind == "start" and step.bucket in until:
            changes[times[index]] = changes.get(times[index], 0) + step.bucket.num_bytes
            end = until[step.bucket]
            if end < len(steps):
                changes[times[end]] = changes.get(times[end], 0) - step.bucket.num_bytes
    alive = sum(bucket.num_bytes for bucket in kept)
    points = [MemoryPoint(0.0, alive)]
    for time_us in sorted(changes):
        alive += changes[time_us]
        if time_us == 0.0:
            points = []
        points.append(MemoryPoint(time_us, alive))
    return points
