"""Let the graph that runs before this one start its first gather, and start the first gather of the graph after it."""

from __future__ import annotations

from torch import fx

from fsdp_passes.gather_ops import ALL_GATHER_AHEAD_OP, ALL_GATHER_OP, START_NEXT_GRAPH
from fsdp_passes.schedule import ALL_GATHER, WAIT, bucket_of, role_of


def prefetch_across_graphs(graph: fx.Graph, *, is_backward: bool) -> bool:
    """Open the graph's ends to its neighbours.

    Before:  all_gather(0) ; all_gather(1) ; wait(0) ; compute(0) ; wait(1) ; compute(1)
    After:   all_gather_ahead(0) ; all_gather(1) ; wait(0) ; compute(0) ; start_next_graph ; wait(1) ; compute(1)

    Which graph comes next is not known here: one artifact may serve every layer. The context learns it at run time.

    Requires: scheduled collectives with labels. Does nothing without them, or where the ends are open already.
    Returns: whether anything changed.
    """
    starts = [node for node in graph.nodes if node.target is ALL_GATHER_OP and node.args[1] is not None]
    if not starts or any(node.target is ALL_GATHER_AHEAD_OP for node in graph.nodes):
        return False
    first_group = _group_of(starts[0])
    for node in starts:
        if _group_of(node) == first_group:
            node.target = ALL_GATHER_AHEAD_OP
            node.args = (*node.args, is_backward)
    waits = [node for node in graph.nodes if _is_gather_wait(node)]
    last_group = _group_of(waits[-1])
    if last_group == first_group:  # as early as possible: there is no compute of another unit to hide it behind
        place = [node for node in starts if _group_of(node) == first_group][-1].next
    else:
        place = next(node for node in waits if _group_of(node) == last_group)
    with graph.inserting_before(place):
        marker = graph.call_function(START_NEXT_GRAPH, (starts[0].args[1],))
    marker.meta["val"] = None
    return True


def _group_of(node: fx.Node) -> tuple[int, int]:
    bucket = bucket_of(node)
    assert bucket is not None, f"{node.name} belongs to no collective"
    return bucket.group


def _is_gather_wait(node: fx.Node) -> bool:
    bucket = bucket_of(node)
    return bucket is not None and bucket.kind == ALL_GATHER and role_of(node) == WAIT
