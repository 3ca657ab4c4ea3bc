"""Say at each collective whose it is and what hides it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fsdp_passes.schedule import START, WAIT, Bucket, bucket_of, gathered_reads, is_heavy, is_wait, role_of


def annotate_collectives(graph: fx.Graph, *, unit_names: Sequence[str]) -> int:
    """Write unit and reason into `meta["custom"]` of each start and wait, where `print_readable` shows them.

    Of a start, the reason names the units whose parameters are read before the wait ("behind layers.1"), or says that
    nothing worth the name runs meanwhile; of a wait, what needs the result. PyTorch cuts each text behind 40
    characters.

    Requires: the final order. Changes metadata only, and nothing when called again.
    Returns: number of annotated nodes.
    """
    nodes = list(graph.nodes)
    reasons = {**_reasons_of_starts(graph, nodes, unit_names), **_reasons_of_waits(nodes)}
    for node, reason in reasons.items():
        bucket = bucket_of(node)
        assert bucket is not None
        unit = unit_names[bucket.unit] if bucket.unit < len(unit_names) else f"unit {bucket.unit}"
        node.meta["custom"] = {**node.meta.get("custom", {}), "unit": unit, "reason": reason}
    return len(reasons)


def _reasons_of_starts(graph: fx.Graph, nodes: list[fx.Node], unit_names: Sequence[str]) -> dict[fx.Node, str]:
    reads = gathered_reads(graph)
    first_wait: dict[Bucket, int] = {}
    for index, node in enumerate(nodes):
        bucket = bucket_of(node)
        if bucket is not None and role_of(node) == WAIT:
            first_wait.setdefault(bucket, index)
    reasons = {}
    for index, node in enumerate(nodes):
        bucket = bucket_of(node)
        if bucket is None or role_of(node) != START:
            continue
        between = nodes[index : first_wait.get(bucket, len(nodes))]
        units = dict.fromkeys(other.unit for step in between for other in reads.get(step, ()))
        names = [unit_names[unit] if unit < len(unit_names) else f"unit {unit}" for unit in units]
        if names:
            reasons[node] = f"behind {', '.join(names)}"
        elif any(is_heavy(step) for step in between):
            reasons[node] = "behind compute without parameters"
        else:
            reasons[node] = "exposed: nothing computes meanwhile"
    return reasons


def _reasons_of_waits(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    reasons = {}
    for node in nodes:
        bucket = bucket_of(node)
        if bucket is None or not is_wait(node):
            continue
        # What follows in the bucket (a narrow, a scale) is looked through.
        readers = list(node.users)
        while readers and all(bucket_of(user) == bucket for user in readers):
            readers = [user for reader in readers for user in reader.users]
        reader = readers[0].name if readers else "nothing"
        reasons[node] = f"needed by {reader}"
    return reasons
