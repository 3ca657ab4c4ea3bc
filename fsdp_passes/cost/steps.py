"""A graph as steps of known cost: what computes, for which unit, and where collectives start and are awaited."""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_passes.cost.op_cost import OpCost, costs_of_graph
from fsdp_passes.ownership import unit_of_compute
from fsdp_passes.schedule import (
    ALL_GATHER,
    ALL_REDUCE,
    FINISH,
    PREPARE,
    REDUCE_SCATTER,
    START,
    WAIT,
    Bucket,
    bucket_of,
    gathered_outputs,
    gathered_reads,
    role_of,
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a graph, in order.

    Attributes:
        kind: "compute", "start" or "wait".
        name: of the node.
        unit: index of the unit that the step belongs to; None when the graph knows none.
        cost: of a compute step.
        bucket: the collective that is started or awaited.
        reads: gathers whose results a compute step reads.
        is_cast: whether it only prepares or finishes a collective: a cast, a padding, a scaling.
        is_kept: whether a gather that is started lives on behind the graph, saved for the backward.
        is_per_rank: whether the cost is in proportion to a rank's share of the parameters (casts of shards).
    """

    kind: str
    name: str
    unit: int | None
    cost: OpCost | None = None
    bucket: Bucket | None = None
    reads: tuple[Bucket, ...] = ()
    is_cast: bool = False
    is_per_rank: bool = False
    is_kept: bool = False


_ON_SHARDS = ((ALL_GATHER, PREPARE), (REDUCE_SCATTER, FINISH), (ALL_REDUCE, PREPARE), (ALL_REDUCE, FINISH))


def steps_of_graph(graph: fx.Graph) -> list[Step]:
    """The steps of a graph in node order; nodes for which no kernel runs are left out, a bucket is awaited once."""
    costs, reads, units = costs_of_graph(graph), gathered_reads(graph), unit_of_compute(graph)
    outputs = gathered_outputs(graph)
    steps = []
    awaited: set[Bucket] = set()
    for node in graph.nodes:
        bucket, role = bucket_of(node), role_of(node)
        if bucket is not None and role == START:
            steps.append(Step("start", node.name, bucket.unit, bucket=bucket, is_kept=bucket in outputs))
        elif bucket is not None and role == WAIT:
            if bucket not in awaited:
                awaited.add(bucket)
                steps.append(Step("wait", node.name, bucket.unit, bucket=bucket))
        elif node in costs or node in reads:
            # A view of a weight costs nothing but keeps the weight alive, so it stays.
            gathers = tuple(read for read in reads.get(node, ()) if read.kind == ALL_GATHER)
            if node in costs or gathers:
                unit = bucket.unit if bucket is not None else units.get(node)
                per_rank = bucket is not None and (bucket.kind, role) in _ON_SHARDS
                steps.append(
                    Step("compute", node.name, unit, costs.get(node), None, gathers, bucket is not None, per_rank)
                )
    return steps
