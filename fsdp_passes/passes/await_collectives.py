"""One wait for all results of a collective, which knows what it waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fsdp_passes._torch_compat import inputs_of_caller
from fsdp_passes.passes._graph import group_of_start
from fsdp_passes.schedule import ALL_REDUCE, BUCKET_META, FINISH, ROLE_META, WAIT, Bucket, bucket_of, is_wait
from fsdp_passes.watchdog import AWAIT_COLLECTIVE

_DIMS_OF_IMAGES = 3  # of a convolution's weight, at least


def await_collectives(graph: fx.Graph, *, labels: dict[int, fx.Node], holds_sent: bool = True) -> int:
    """Replace the waits of each bucket by one `await_collective`.

    Before:  w0 = wait(ag[0]) ; w1 = wait(ag[1]) ; mm(x, w0)
    After:   r0 = ag[0] ; r1 = ag[1] ; await_collective([r0, r1], [], label, "all_gather", group) ; mm(x, r0)

    With a wait for each result a compiler has twice the nodes for every parameter, and gloo copies the results of the
    whole collective in each wait of a reduction. What was sent is an argument too where the graph made it: its memory
    is in use until here. That of the caller's tensors, which are the shards of most gathers, stays without that, and
    each argument less is less for Inductor to do. An all-reduce is in place, so that its results are what it sends.

    `labels`: unit index -> the graph input that holds the unit's name, for errors. Units without are not watched.
    `holds_sent`: False where nobody gives memory away that a collective reads: outside of Inductor.

    Requires: the final order, invariant 1 (see docs/design.md). Does nothing where it has run already.
    Returns: number of inserted nodes.
    """
    starts: dict[Bucket, fx.Node] = {}
    waits: dict[Bucket, list[fx.Node]] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        if bucket is not None and group_of_start(node) is not None:
            starts[bucket] = node
        elif bucket is not None and is_wait(node) and node.target is not AWAIT_COLLECTIVE:
            waits.setdefault(bucket, []).append(node)
    stays = inputs_of_caller(graph)
    for bucket, nodes in waits.items():
        start = starts[bucket]
        sent = start.args[0] if isinstance(start.args[0], list | tuple) else [start.args[0]]
        held = [node for node in sent if node not in stays] if holds_sent and bucket.kind != ALL_REDUCE else []
        _merge(graph, bucket, start, nodes, labels.get(bucket.unit), held)
    return len(waits)


def _merge(
    graph: fx.Graph, bucket: Bucket, start: fx.Node, waits: list[fx.Node], label: fx.Node | None, held: list[Any]
) -> None:
    results: list[Any] = [wait.args[0] for wait in waits]
    for result in results:
        if result is not start:
            waits[0].prepend(result)  # it may stand between the waits
    assert results[0] is start or results[0].args[1] == 0, f"{start.name}: its work is registered for its first result"
    with graph.inserting_before(waits[0]):
        arguments = (results, held, label, bucket.kind, group_of_start(start))
        node = graph.call_function(AWAIT_COLLECTIVE, arguments)
    node.meta.update({"val": None, BUCKET_META: bucket, ROLE_META: WAIT})
    if "custom" in waits[0].meta:
        node.meta["custom"] = waits[0].meta["custom"]
    for result, wait in zip(results, waits, strict=True):
        value = result
        if result.meta["val"].dim() >= _DIMS_OF_IMAGES:
            # What a convolution reads, Inductor copies into another layout where it is made. That is here, not at the
            # start: the copy would be read before the collective has written it, and awaited in its place.
            with graph.inserting_before(wait):
                value = graph.call_function(torch.ops.aten.alias.default, (result,))
            value.meta.update({"val": result.meta["val"], BUCKET_META: bucket, ROLE_META: FINISH})
        wait.replace_all_uses_with(value)
        graph.erase_node(wait)
