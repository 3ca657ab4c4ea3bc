"""Mark each unit's compute with an NVTX region that survives Inductor."""

from __future__ import annotations

from torch import fx

from fsdp_passes.ops import REGION_BEGIN, REGION_END
from fsdp_passes.regions import BACKWARD_COMPUTE, FORWARD_COMPUTE
from fsdp_passes.schedule import ALL_GATHER, PREPARE, REDUCE_SCATTER, bucket_of, gathered_reads, role_of


def annotate_regions(graph: fx.Graph, *, labels: dict[int, fx.Node], is_backward: bool) -> int:
    """Open a region before a unit's first compute and close it behind its last.

    A compute step belongs to the unit whose gathered parameters it reads, or else to the unit of the step before it.
    In the backward of a unit that was not resharded, and so is not gathered again, the steps that make its gradients
    tell where it begins. A unit that is read in several places (the root's embedding and head) gets several regions.

    `labels`: unit index -> the graph input that holds the unit's name.

    Requires: the final order of the graph. Does nothing without labels.
    Returns: number of regions.
    """
    owners = _owners(graph)
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
        with graph.inserting_before(first):
            begin = graph.call_function(REGION_BEGIN, (labels[unit], phase))
        with graph.inserting_after(last):
            end = graph.call_function(REGION_END, (labels[unit],))
        begin.meta["val"] = end.meta["val"] = None
    return len(segments)


def _owners(graph: fx.Graph) -> dict[fx.Node, int]:
    """Compute node -> unit index, for every compute node if the graph knows any unit."""
    reads = gathered_reads(graph)
    gathered_units = {
        bucket.unit for node in graph.nodes if (bucket := bucket_of(node)) is not None and bucket.kind == ALL_GATHER
    }
    feeds: dict[fx.Node, int] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        if bucket is None or bucket.kind != REDUCE_SCATTER or (role_of(node) == PREPARE and not node.all_input_nodes):
            continue
        if bucket.unit not in gathered_units:
            for arg in node.all_input_nodes:
                if bucket_of(arg) is None:
                    feeds[arg] = bucket.unit
    owners: dict[fx.Node, int] = {}
    unowned: list[fx.Node] = []
    current: int | None = None
    for node in graph.nodes:
        if node.op != "call_function" or bucket_of(node) is not None or node.target in (REGION_BEGIN, REGION_END):
            continue
        read_units = [bucket.unit for bucket in reads.get(node, ()) if bucket.kind == ALL_GATHER]
        if read_units:
            current = read_units[-1]
        elif node in feeds:
            current = feeds[node]
        if current is None:
            unowned.append(node)
            continue
        # What comes before the first known unit (the loss's backward) belongs to that unit.
        for earlier in unowned:
            owners[earlier] = current
        unowned = []
        owners[node] = current
    return owners
