"""A graph's cost as closed forms in the sequence length, the batch, the number of ranks and the link's bandwidth.

    step time = compute + sum over waits of their exposed time

The compute is a roofline per operation, max(FLOPs / rate, bytes / bandwidth), summed. A wait for a collective M that
was started C of compute ago is exposed for max(0, M - C). On one communication row M also queues behind the collective
P before it, started D of compute before this wait: then it is P + M - D, less what P's own wait was exposed for. Longer
queues are not followed, so that a step whose communication piles up takes longer than the formula says.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import sympy

from fsdp_passes.cost.collectives import bandwidth, between_replicas, latency_us
from fsdp_passes.cost.hardware import Cluster
from fsdp_passes.cost.op_cost import OpCost
from fsdp_passes.cost.predict import GraphModel, alive_until
from fsdp_passes.schedule import ALL_GATHER, ALL_REDUCE, Bucket

WORLD_SIZE = sympy.Symbol("world_size", positive=True, integer=True)
BANDWIDTH = sympy.Symbol("bandwidth", positive=True)  # bytes per second of one rank
LATENCY_US = sympy.Symbol("latency_us", nonnegative=True)  # of one collective
SHARE = (WORLD_SIZE - 1) / WORLD_SIZE  # of a whole tensor, what a rank receives


def input_symbol(name: str) -> sympy.Symbol:
    """The symbol of a size of the model's inputs ("length")."""
    return sympy.Symbol(name, positive=True, integer=True)


@dataclasses.dataclass(frozen=True)
class Race:
    """Communication against the compute that could hide it.

    Attributes:
        communication_us, compute_us: expressions.
        arithmetic_us: the compute where products are bound by arithmetic: a polynomial in the sizes.
    """

    communication_us: sympy.Expr
    compute_us: sympy.Expr
    arithmetic_us: sympy.Expr

    @property
    def shortfall_us(self) -> sympy.Expr:
        """What is left over; negative when all is hidden."""
        return self.communication_us - self.compute_us


@dataclasses.dataclass(frozen=True)
class Exposure:
    """Waits of one kind.

    Attributes:
        count: number of such waits in the graph.
        own: the awaited collective, since its start.
        queued: together with the one before it on its row, since the start of that one; None for the first.
        before: the one before it, until its own wait; None for the first.
        is_avoidable: False where nothing worth the name runs before the wait (the first gather, the last reductions).
        label: the first of them, for messages.
    """

    count: int
    own: Race
    queued: Race | None
    before: Race | None
    is_avoidable: bool
    label: str

    @property
    def each_us(self) -> sympy.Expr:
        """The exposed time of one such wait."""
        terms = [sympy.Integer(0), self.own.shortfall_us]
        if self.queued is not None and self.before is not None:
            terms.append(self.queued.shortfall_us - sympy.Max(0, self.before.shortfall_us, evaluate=False))
        return sympy.Max(*terms, evaluate=False)


@dataclasses.dataclass(frozen=True)
class GraphCost:
    """Closed forms of one graph. Bytes are those of one rank; times are microseconds.

    Attributes:
        phase: "forward" or "backward".
        communication_bytes: that a rank receives.
        flops: of matrix products, convolutions and attention.
        compute_us: all operations, one behind the other.
        exposures: the waits.
        peak_unsharded_bytes: most bytes of gathered parameters alive at once, the root's included.
    """

    phase: str
    communication_bytes: sympy.Expr
    flops: sympy.Expr
    compute_us: sympy.Expr
    exposures: tuple[Exposure, ...]
    peak_unsharded_bytes: sympy.Expr

    @property
    def exposed_us(self) -> sympy.Expr:
        """Communication that nothing hides."""
        return sympy.Add(*[exposure.count * exposure.each_us for exposure in self.exposures])

    @property
    def step_us(self) -> sympy.Expr:
        """From the graph's beginning to its end."""
        return self.compute_us + self.exposed_us


class _Work:
    """A sum of rooflines, equal ones counted, with all memory-bound bytes in one term."""

    def __init__(self) -> None:
        self.heavy: collections.Counter[tuple[Any, Any, Any]] = collections.Counter()
        self.light_bytes: sympy.Expr = sympy.Integer(0)

    def add(self, cost: OpCost, share: Any = 1) -> None:
        if cost.is_heavy:
            self.heavy[cost.flops, cost.num_bytes, cost.dtype] += 1
        else:
            self.light_bytes += cost.num_bytes * share

    def merge(self, other: _Work) -> None:
        self.heavy.update(other.heavy)
        self.light_bytes += other.light_bytes

    @property
    def key(self) -> Any:
        return frozenset(self.heavy.items()), sympy.expand(self.light_bytes)

    def to_us(self, cluster: Cluster, *, is_compute_bound: bool = False) -> sympy.Expr:
        """Its time. With `is_compute_bound`, products count by their arithmetic alone: a polynomial in the sizes."""
        accelerator = cluster.accelerator
        bytes_per_us = accelerator.memory_bandwidth * accelerator.memory_efficiency / 1e6
        total = sympy.expand(self.light_bytes) / bytes_per_us
        for (flops, num_bytes, dtype), count in self.heavy.items():
            compute, memory = flops / (accelerator.flops_of(dtype) / 1e6), num_bytes / bytes_per_us
            total += count * (compute if is_compute_bound else sympy.Max(compute, memory, evaluate=False))
        return total


def graph_cost(model: GraphModel, cluster: Cluster, symbols: Mapping[Any, Any]) -> GraphCost:
    """The closed forms of a graph that was traced with symbols; `symbols` maps those to named ones or numbers."""

    def named(size: Any) -> Any:
        return size.xreplace(symbols) if isinstance(size, sympy.Expr) else sympy.Integer(size)

    work = _Work()  # of the whole graph
    segments = [_Work()]  # between two starts or waits
    started: dict[Bucket, int] = {}  # bucket -> first segment behind its start
    waits: list[tuple[Bucket, int]] = []  # and segments before the wait
    communication: sympy.Expr = sympy.Integer(0)
    for step in model.steps:
        if step.bucket is not None:
            segments.append(_Work())
            if step.kind == "start":
                started[step.bucket] = len(segments) - 1
                communication += received_bytes(model, step.bucket)
            else:
                waits.append((step.bucket, len(segments) - 1))
        elif step.cost is not None:
            cost = dataclasses.replace(step.cost, flops=named(step.cost.flops), num_bytes=named(step.cost.num_bytes))
            share = model.world_size / WORLD_SIZE if step.is_per_rank else 1
            work.add(cost, share)
            segments[-1].add(cost, share)
    flops = sum((count * flops for (flops, _, _), count in work.heavy.items()), sympy.Integer(0))
    return GraphCost(
        model.phase,
        communication,
        sympy.expand(flops),
        work.to_us(cluster),
        tuple(_exposures(model, cluster, segments, started, waits)),
        _peak_bytes(model),
    )


def _exposures(
    model: GraphModel,
    cluster: Cluster,
    segments: list[_Work],
    started: Mapping[Bucket, int],
    waits: list[tuple[Bucket, int]],
) -> Iterator[Exposure]:
    """One for each wait that can hold the compute, equal ones counted.

    A row runs its collectives in the order of their starts. So a wait holds for all that were started up to its own
    collective and not awaited yet, and a wait for one that was started before an awaited one holds for nothing.
    """
    rows: dict[str, list[Bucket]] = {}
    for bucket in started:
        rows.setdefault(model.row_of(bucket), []).append(bucket)
    found: dict[Any, list[Any]] = {}
    for row in rows.values():
        place = {bucket: index for index, bucket in enumerate(row)}
        done, before = 0, None  # collectives that have ended; (their first, how many, segment of the wait)
        for bucket, position in waits:
            if bucket not in place or place[bucket] < done:
                continue
            own = (row[done : place[bucket] + 1], position)
            races = [own]
            if before is not None:
                races += [(before[0] + own[0], position), before]
            keys, parts = [], []
            for buckets, end in races:
                work = _Work()
                for part in segments[started[buckets[0]] : end]:
                    work.merge(part)
                communication = sum((_communication_us(model, one, cluster) for one in buckets), sympy.Integer(0))
                parts.append((communication, work))
                keys.append((communication, work.key))
            label = f"{model.phase}: {bucket.kind} of {model.unit_name(bucket.unit)}"
            found.setdefault(tuple(keys), [0, parts, label])[0] += 1
            done, before = place[bucket] + 1, own
    for count, parts, label in found.values():
        races_us = [
            Race(communication, work.to_us(cluster), work.to_us(cluster, is_compute_bound=True))
            for communication, work in parts
        ]
        queued, previous = races_us[1:] if len(races_us) > 1 else (None, None)
        yield Exposure(count, races_us[0], queued, previous, bool(parts[0][1].heavy), label)


def _communication_us(model: GraphModel, bucket: Bucket, cluster: Cluster) -> sympy.Expr:
    """BANDWIDTH and LATENCY_US are those of the ranks that share one copy. Between replicas, and among the fewer ranks
    that kept a parameter, they are the cluster's, for as many ranks as were traced."""
    received = received_bytes(model, bucket)
    if model.is_kept(bucket):
        latency = latency_us(bucket.num_ranks, cluster)
        return latency + received / bandwidth(bucket.num_ranks, cluster) * 1_000_000
    if bucket.kind != ALL_REDUCE:
        return LATENCY_US + received / BANDWIDTH * 1_000_000
    cluster = between_replicas(cluster, model.world_size)
    latency = 2 * latency_us(bucket.num_ranks, cluster) - cluster.base_latency_us
    return latency + received / bandwidth(bucket.num_ranks, cluster) * 1_000_000


def received_bytes(model: GraphModel, bucket: Bucket) -> sympy.Expr:
    """Bytes that a rank receives in a collective."""
    if bucket.kind == ALL_REDUCE:
        # A reduce-scatter and an all-gather of this rank's rows.
        share = 2 * sympy.Rational(bucket.num_ranks - 1, bucket.num_ranks)
        return share * bucket_bytes(model, bucket) / WORLD_SIZE
    if model.is_kept(bucket):
        return sympy.Rational(bucket.num_ranks - 1, bucket.num_ranks) * bucket.num_bytes
    return SHARE * bucket_bytes(model, bucket)


def bucket_bytes(model: GraphModel, bucket: Bucket) -> sympy.Expr:
    """Bytes of a bucket's whole tensors, each padded to a multiple of the ranks in rows."""
    if model.is_kept(bucket):
        return sympy.Integer(bucket.num_bytes)
    total: sympy.Expr = sympy.Integer(0)
    for shape in bucket.shapes:
        total += sympy.ceiling(sympy.Integer(shape.rows) / WORLD_SIZE) * WORLD_SIZE * shape.bytes_per_row
    return total


def _peak_bytes(model: GraphModel) -> sympy.Expr:
    until = alive_until(model.steps)
    begins = {step.bucket: index for index, step in enumerate(model.steps) if step.kind == "start"}
    kept = sum((bucket_bytes(model, bucket) for bucket in model.kept), sympy.Integer(0))
    sums = set()
    for bucket, begin in begins.items():
        if bucket is not None and bucket.kind == ALL_GATHER:
            alive = [other for other in until if begins[other] <= begin <= until[other]]
            sums.add(kept + sum((bucket_bytes(model, other) for other in alive), sympy.Integer(0)))
    # Of sums that differ in a factor only, sympy's own simplification takes long to find the largest.
    return sympy.Max(*sorted(sums, key=str), evaluate=False) if len(sums) > 1 else next(iter(sums), kept)
