"""Which unit a step of a graph belongs to: regions, costs and the schedule all ask."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes.schedule import (
    ALL_GATHER,
    PREPARE,
    REDUCE_SCATTER,
    START,
    bucket_of,
    gathered_reads,
    is_marker,
    role_of,
)


def gradient_makers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Compute node that makes a gradient -> the unit of its parameter. Views and packing in between are looked through:
    autograd makes the product for a weight's gradient before the one that reads the weight."""
    makers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        if bucket is None or bucket.kind != REDUCE_SCATTER or role_of(node) not in (PREPARE, START):
            continue
        for source in node.all_input_nodes:
            while isinstance(source.target, torch._ops.OpOverload) and source.target.is_view:
                makers[source] = bucket.unit
                source = source.all_input_nodes[0]
            if source.op == "call_function" and bucket_of(source) is None:
                makers[source] = bucket.unit
    return makers


def unit_of_compute(graph: fx.Graph) -> dict[fx.Node, int]:
    """Compute node -> unit index, for every compute node if the graph knows any unit: the unit whose gathered
    parameters it reads or whose gradient it makes, or else the unit of the step before it."""
    reads, makers = gathered_reads(graph), gradient_makers(graph)
    owners: dict[fx.Node, int] = {}
    unowned: list[fx.Node] = []
    current: int | None = None
    for node in graph.nodes:
        if node.op != "call_function" or bucket_of(node) is not None or is_marker(node):
            continue
        read_units = [bucket.unit for bucket in reads.get(node, ()) if bucket.kind == ALL_GATHER]
        if read_units:
            current = read_units[-1]
        elif node in makers:
            current = makers[node]
        if current is None:
            unowned.append(node)
            continue
        # What comes before the first known unit (the loss's backward) belongs to that unit.
        for earlier in unowned:
            owners[earlier] = current
        unowned = []
        owners[node] = current
    return owners
