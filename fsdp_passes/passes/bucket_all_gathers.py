"""Gather the parameters of one unit with one collective."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fsdp_passes.ops import UNSHARD, c10d
from fsdp_passes.passes._graph import BucketBuilder, aten
from fsdp_passes.schedule import ALL_GATHER, FINISH, PREPARE, START, WAIT, Bucket


def bucket_all_gathers(graph: fx.Graph, *, bucket_mode: str) -> list[Bucket]:
    """Replace the `unshard` nodes of a unit by one all-gather per dtype.

    Before:  w0 = unshard(s0) ; mm(x, w0) ; w1 = unshard(s1) ; mm(y, w1)
    After:   ag = all_gather([cast(s0), cast(s1)]) ; w0 = wait(ag[0]) ; w1 = wait(ag[1]) ; mm(x, w0) ; mm(y, w1)

    bucket_mode "coalesced": one grouped collective on the shards themselves. Each result is the whole parameter; only
    a padded one is narrowed. "packed": one collective on the concatenated shards, and a copy per parameter behind it.
    All waits of a bucket stand together, before the first use of any of its results: gloo writes every result of a
    group again inside each result's wait, so a use between two waits could read memory that the next wait overwrites.

    Does nothing without `unshard` nodes.   Ensures: one start per bucket, each result behind its own wait.
    """
    groups: dict[tuple[int, torch.dtype, str], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=UNSHARD, sort=True):
        _, _, unit, _, _, group_name, _, param_dtype, _, _ = node.args
        groups.setdefault((unit, param_dtype, group_name), []).append(node)
    buckets: list[Bucket] = []
    for (unit, dtype, group_name), nodes in groups.items():
        world_size = nodes[0].args[4]
        gathered_bytes = sum(
            node.args[0].meta["val"].numel() * world_size * dtype.itemsize  # type: ignore[union-attr,operator]
            for node in nodes
        )
        bucket = Bucket(ALL_GATHER, len(buckets), unit, len(nodes), gathered_bytes, dtype, bool(nodes[0].args[9]))
        builder = BucketBuilder(graph, bucket, nodes[0])
        with graph.inserting_before(nodes[0]):
            lower = _gather_packed if bucket_mode == "packed" else _gather_coalesced
            results = lower(builder, nodes, dtype, group_name)
        for node, result in zip(nodes, results, strict=True):
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        buckets.append(bucket)
    return buckets


def _gather_coalesced(
    builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str
) -> list[fx.Node]:
    index, world_size = builder.bucket.index, nodes[0].args[4]
    shards = [builder.cast(PREPARE, node.args[0], dtype) for node in nodes]  # type: ignore[arg-type]
    start = builder.call(
        START, c10d.all_gather_into_tensor_coalesced.default, shards, world_size, group_name, name=f"all_gather_{index}"
    )
    items = [builder.call(WAIT, operator.getitem, start, i) for i in range(len(nodes))]
    waits = [builder.call(WAIT, c10d.wait_tensor.default, item) for item in items]
    return [_narrow(builder, wait, node.args[3]) for wait, node in zip(waits, nodes, strict=True)]  # type: ignore[arg-type]


def _gather_packed(builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str) -> list[fx.Node]:
    index, world_size = builder.bucket.index, nodes[0].args[4]
    shards = [builder.cast(PREPARE, node.args[0], dtype) for node in nodes]  # type: ignore[arg-type]
    shapes = [tuple(shard.meta["val"].shape) for shard in shards]
    flat = [builder.call(PREPARE, aten.view.default, shard, [-1]) for shard in shards]
    packed = builder.call(PREPARE, aten.cat.default, flat)
    start = builder.call(
        START, c10d.all_gather_into_tensor.default, packed, world_size, group_name, name=f"all_gather_{index}"
    )
    wait = builder.call(WAIT, c10d.wait_tensor.default, start)
    table = builder.call(FINISH, aten.view.default, wait, [world_size, -1])
    results, offset = [], 0
    for node, shape in zip(nodes, shapes, strict=True):
        size = torch.Size(shape).numel()
        rows = builder.call(FINISH, aten.slice.Tensor, table, 1, offset, offset + size)
        rows = builder.call(FINISH, aten.clone.default, rows, memory_format=torch.contiguous_format)
        whole = builder.call(FINISH, aten.view.default, rows, [shape[0] * world_size, *shape[1:]])  # type: ignore[operator]
        results.append(_narrow(builder, whole, node.args[3]))  # type: ignore[arg-type]
        offset += size
    return results


def _narrow(builder: BucketBuilder, whole: fx.Node, rows: int) -> fx.Node:
    """Leave out the padding rows, which lie behind the parameter's own; a view."""
    if whole.meta["val"].shape[0] == rows:
        return whole
    return builder.call(FINISH, aten.slice.Tensor, whole, 0, 0, rows)
