"""Let every wait know what it waits for."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes.passes._graph import group_of_start
from fsdp_passes.schedule import BUCKET_META, ROLE_META, WAIT, Bucket, bucket_of, role_of
from fsdp_passes.watchdog import AWAIT_COLLECTIVE


def watch_collectives(graph: fx.Graph, *, labels: dict[int, fx.Node]) -> int:
    """Put an `await_collective` in front of the first wait of each bucket.

    Before:  w0 = wait(ag[0]) ; w1 = wait(ag[1])
    After:   await_collective(ag[0], label, "all_gather", group) ; w0 = wait(ag[0]) ; w1 = wait(ag[1])

    It waits for the whole collective, and an error names it and its unit. What it leaves to the waits behind it is to
    tell the compiler where the results are there.

    `labels`: unit index -> the graph input that holds the unit's name.

    Requires: the final order. Does nothing for buckets without label, or where it has run already.
    Returns: number of inserted nodes.
    """
    if any(node.target is AWAIT_COLLECTIVE for node in graph.nodes):
        return 0
    groups: dict[Bucket, str] = {}
    first_waits: dict[Bucket, fx.Node] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        if bucket is None or bucket.unit not in labels:
            continue
        group = group_of_start(node)
        if group is not None:
            groups[bucket] = group
        elif role_of(node) == WAIT and node.target is torch.ops._c10d_functional.wait_tensor.default:
            first_waits.setdefault(bucket, node)
    for bucket, wait in first_waits.items():
        with graph.inserting_before(wait):
            arguments = (wait.args[0], labels[bucket.unit], bucket.kind, groups[bucket])
            node = graph.call_function(AWAIT_COLLECTIVE, arguments)
        node.meta.update({"val": None, BUCKET_META: bucket, ROLE_META: WAIT})
    return len(first_waits)
