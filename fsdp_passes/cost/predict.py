"""What a graph's steps take on a cluster, for any number of ranks: durations, and the timeline that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_passes.cost.collectives import all_reduce_us, collective_us
from fsdp_passes.cost.hardware import Cluster
from fsdp_passes.cost.op_cost import OpCost
from fsdp_passes.cost.simulate import TimedStep, simulate
from fsdp_passes.cost.steps import Step
from fsdp_passes.cost.timeline import MemoryPoint, Timeline
from fsdp_passes.schedule import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Bucket

ONE_ROW = "communication"
ROWS = {
    ALL_GATHER: "all_gather stream",
    REDUCE_SCATTER: "reduce_scatter stream",
    ALL_REDUCE: "all_reduce stream",
}


@dataclasses.dataclass(frozen=True)
class GraphModel:
    """One graph with what a prediction needs.

    Attributes:
        phase: "forward" or "backward".
        steps: in the order to predict.
        unit_names: by unit index.
        world_size: ranks over which parameters are sharded, as traced; there may be several replicas of them.
        kept: gathers whose results the forward saved for this backward (the root's); alive all the time.
        has_one_stream: whether all-gathers and reduce-scatters share a communication stream.
    """

    phase: str
    steps: tuple[Step, ...]
    unit_names: tuple[str, ...]
    world_size: int
    kept: tuple[Bucket, ...] = ()
    has_one_stream: bool = True

    def unit_name(self, unit: int | None) -> str:
        """Display name; "" for no unit."""
        return self.unit_names[unit] if unit is not None and unit < len(self.unit_names) else ""

    def row_of(self, bucket: Bucket) -> str:
        """The communication row that a collective queues on. Replicas have a group of their own."""
        return ONE_ROW if self.has_one_stream and bucket.kind != ALL_REDUCE else ROWS[bucket.kind]

    def is_kept(self, bucket: Bucket) -> bool:
        """Whether it gathers what fewer ranks kept from the forward: as many as were traced, whatever the others."""
        return bucket.kind == ALL_GATHER and bucket.num_ranks not in (0, self.world_size)

    def bucket_bytes(self, bucket: Bucket, world_size: int) -> int:
        """Bytes of a bucket's whole tensors, padded for `world_size` ranks; of an all-reduce, of a rank's rows."""
        if world_size == self.world_size or self.is_kept(bucket):
            return bucket.num_bytes
        whole: int = sum(shape.padded_rows(world_size) * shape.bytes_per_row for shape in bucket.shapes)
        return whole // world_size if bucket.kind == ALL_REDUCE else whole

    def bucket_us(self, bucket: Bucket, cluster: Cluster, world_size: int) -> float:
        """How long a collective takes with the parameters sharded over `world_size` ranks."""
        num_bytes = self.bucket_bytes(bucket, world_size)
        if bucket.kind == ALL_REDUCE:
            return all_reduce_us(num_bytes, bucket.num_ranks, world_size, cluster)
        return collective_us(num_bytes, bucket.num_ranks if self.is_kept(bucket) else world_size, cluster)

    def timed_steps(self, cluster: Cluster, world_size: int) -> list[TimedStep]:
        """Steps with durations; with two streams reduce-scatters have a row of their own, all-reduces always."""
        timed = []
        for step in self.steps:
            unit, bucket = self.unit_name(step.unit), step.bucket
            if bucket is None:
                duration = op_us(step.cost, cluster) if step.cost is not None else 0.0
                if step.is_per_rank:
                    duration *= self.world_size / world_size
                timed.append(TimedStep("compute", step.name, unit, self.phase, duration))
                continue
            row, num_bytes = self.row_of(bucket), self.bucket_bytes(bucket, world_size)
            duration = self.bucket_us(bucket, cluster, world_size) if step.kind == "start" else 0.0
            timed.append(
                TimedStep(step.kind, step.name, unit, self.phase, duration, bucket, row, bucket.kind, num_bytes)
            )
        return timed

    def timeline(self, cluster: Cluster, world_size: int | None = None, title: str = "") -> Timeline:
        """The predicted timeline; by default for the ranks that the graph was traced for."""
        world_size = world_size or self.world_size
        spans, times = simulate(self.timed_steps(cluster, world_size))
        return Timeline(title or self.phase, spans, tuple(self._memory_curve(times, world_size)))

    def _memory_curve(self, times: Sequence[float], world_size: int) -> list[MemoryPoint]:
        until = alive_until(self.steps)
        changes: dict[float, int] = {}
        for index, step in enumerate(self.steps):
            if step.kind == "start" and step.bucket in until:
                num_bytes, end = self.bucket_bytes(step.bucket, world_size), until[step.bucket]
                changes[times[index]] = changes.get(times[index], 0) + num_bytes
                if end < len(self.steps):
                    changes[times[end]] = changes.get(times[end], 0) - num_bytes
        alive = sum(bucket.num_bytes for bucket in self.kept)
        points = [MemoryPoint(0.0, alive)]
        for time_us in sorted(changes):
            alive += changes[time_us]
            points = points if time_us > 0 else []
            points.append(MemoryPoint(time_us, alive))
        return points


def op_us(cost: OpCost, cluster: Cluster) -> float:
    """Roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is longer. Light
    operations are bound by memory."""
    accelerator = cluster.accelerator
    memory_s = float(cost.num_bytes) / (accelerator.memory_bandwidth * accelerator.memory_efficiency)
    compute_s = float(cost.flops) / accelerator.flops_of(cost.dtype) if cost.is_heavy else 0.0
    return max(memory_s, compute_s) * 1e6


def alive_until(steps: Sequence[Step]) -> dict[Bucket, int]:
    """Gather -> index of the step behind which its results are dropped; kept ones live to the end.

    Only what the graph returns is kept, also of a unit that does not reshard: its backward may not need the weight, as
    that of an embedding does not.
    """
    last: dict[Bucket, int] = {}
    kept = {step.bucket for step in steps if step.is_kept}
    for index, step in enumerate(steps):
        for bucket in (*step.reads, *([step.bucket] if step.bucket is not None else [])):
            if bucket.kind == ALL_GATHER:
                last[bucket] = index
    return {bucket: len(steps) if bucket in kept else index for bucket, index in last.items()}
