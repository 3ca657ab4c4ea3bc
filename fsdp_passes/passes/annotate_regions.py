"""Mark each unit's compute and communication with NVTX regions that survive Inductor."""

from __future__ import annotations

from typing import Any

from torch import fx

from fsdp_passes.ops import REGION_BEGIN, REGION_END
from fsdp_passes.ownership import unit_of_compute
from fsdp_passes.regions import BACKWARD_COMPUTE, FORWARD_COMPUTE
from fsdp_passes.schedule import START, bucket_of, role_of


def annotate_regions(graph: fx.Graph, *, labels: dict[int, fx.Node], is_backward: bool, is_shown: bool = True) -> int:
    """Open a region before a unit's first compute and close it behind its last; and one around each collective's start.

    A compute step belongs to the unit whose gathered parameters it reads, or else to the unit of the step before it.
    In the backward the steps that make a unit's gradients belong to it too. A unit that is read in several places (the
    root's embedding and head) gets several regions.

    `labels`: unit index -> the graph input that holds the unit's name.
    `is_shown`: without, there are only those around starts, and no profiler sees them: a start that fails is named by
    its region.

    Requires: the final order of the graph. Does nothing without labels, or where regions are already.
    Returns: number of regions.
    """
    if any(node.target is REGION_BEGIN for node in graph.nodes):
        return 0
    owners = unit_of_compute(graph) if is_shown else {}
    phase = BACKWARD_COMPUTE if is_backward else FORWARD_COMPUTE
    compute = [node for node in graph.nodes if node in owners]
    segments: list[tuple[int, fx.Node, fx.Node]] = []
    for node in compute:
        unit = owners[node]
        if segments and segments[-1][0] == unit:
            segments[-1] = (unit, segments[-1][1], node)
        else:
            segments.append((unit, node, node))
    segments = [segment for segment in segments if segment[0] in labels]
    for unit, first, last in segments:
        _enclose(graph, (labels[unit], phase), first, last)
    num_regions = len(segments)
    for node in [node for node in graph.nodes if role_of(node) == START]:
        bucket = bucket_of(node)
        if bucket is not None and bucket.unit in labels:
            arguments = (labels[bucket.unit], bucket.kind)
            _enclose(graph, arguments if is_shown else (*arguments, False), node, node)
            num_regions += 1
    return num_regions


def _enclose(graph: fx.Graph, arguments: tuple[Any, ...], first: fx.Node, last: fx.Node) -> None:
    with graph.inserting_before(first):
        begin = graph.call_function(REGION_BEGIN, arguments)
    with graph.inserting_after(last):
        end = graph.call_function(REGION_END, arguments[:1])
    begin.meta["val"] = end.meta["val"] = None
