"""Gather the parameters of one unit with one collective."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fsdp_passes.gather_ops import ALL_GATHER_OP
from fsdp_passes.ops import UNSHARD, c10d
from fsdp_passes.passes._graph import BucketBuilder, aten
from fsdp_passes.passes._parts import Part, shard_dim_of, sharded_shape, split_units
from fsdp_passes.schedule import ALL_GATHER, FINISH, START, WAIT, Bucket, ShardedShape


def bucket_all_gathers(graph: fx.Graph, *, bucket_mode: str) -> list[Bucket]:
    """Replace the `unshard` nodes of a unit by one all-gather per dtype.

    A unit that keeps its parameters (the root) and is used in two places with another unit in between has one for each
    place. What is read first in the graph, so that nothing can hide it, is gathered in two halves.

    Before:  w0 = unshard(s0) ; mm(x, w0) ; w1 = unshard(s1) ; mm(y, w1)
    After:   ag = all_gather([s0, s1], dtype) ; w0 = wait(ag[0]) ; w1 = wait(ag[1]) ; mm(x, w0) ; mm(y, w1)

    bucket_mode "coalesced": one grouped collective on the shards, cast inside it. Each result is the whole parameter;
    only a padded one is narrowed. "packed": one collective on the concatenated shards, and a copy per parameter behind.
    All waits of a bucket stand together, before the first use of any of its results: gloo writes every result of a
    group again inside each result's wait, so a use between two waits could read memory that the next wait overwrites.

    Does nothing without `unshard` nodes.   Ensures: one start per bucket, each result behind its own wait.
    """
    unshards = graph.find_nodes(op="call_function", target=UNSHARD, sort=True)
    # A unit that reshards is gathered once. Its reads may lie apart in a backward, where recomputation puts another
    # unit's forward between them.
    parts = split_units(
        graph, unshards, _gathered_bytes, exposed_end="first", is_one_run=lambda node: bool(node.args[9])
    )
    groups: dict[tuple[int, Part, torch.dtype, str], list[fx.Node]] = {}
    for node in unshards:
        _, _, unit, _, _, group_name, _, param_dtype, *_ = node.args
        groups.setdefault((unit, parts[node], param_dtype, group_name), []).append(node)
    buckets: list[Bucket] = []
    for (unit, part, dtype, group_name), nodes in groups.items():
        gathered_bytes = sum(map(_gathered_bytes, nodes))
        reshard = bool(nodes[0].args[9])
        bucket = Bucket(
            *(ALL_GATHER, len(buckets), unit, len(nodes), gathered_bytes, dtype, reshard),
            *(part.run, part.half, tuple(map(_shape, nodes)), int(nodes[0].args[4])),  # type: ignore[arg-type]
        )
        builder = BucketBuilder(graph, bucket, nodes[0])
        with graph.inserting_before(nodes[0]):
            lower = _gather_packed if bucket_mode == "packed" else _gather_coalesced
            results = lower(builder, nodes, dtype, group_name)
        for node, result in zip(nodes, results, strict=True):
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        buckets.append(bucket)
    return buckets


def _gathered_bytes(node: fx.Node) -> int:
    shard, world_size, dtype = node.args[0], node.args[4], node.args[7]
    return int(shard.meta["val"].numel() * world_size * dtype.itemsize)  # type: ignore[union-attr,operator]


def _shape(node: fx.Node) -> ShardedShape:
    return sharded_shape(node.meta["val"], shard_dim_of(node), node.args[7])  # type: ignore[arg-type]


def _start(builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str, packed: bool) -> fx.Node:
    shards, label, world_size = [node.args[0] for node in nodes], nodes[0].args[1], nodes[0].args[4]
    name = f"all_gather_{builder.bucket.index}"
    return builder.call(START, ALL_GATHER_OP, shards, label, world_size, group_name, dtype, packed, name=name)


def _gather_coalesced(
    builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str
) -> list[fx.Node]:
    start = _start(builder, nodes, dtype, group_name, packed=False)
    items = [builder.call(WAIT, operator.getitem, start, i) for i in range(len(nodes))]
    waits = [builder.call(WAIT, c10d.wait_tensor.default, item) for item in items]
    return [_whole(builder, wait, node) for wait, node in zip(waits, nodes, strict=True)]


def _gather_packed(builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str) -> list[fx.Node]:
    world_size = nodes[0].args[4]
    start = _start(builder, nodes, dtype, group_name, packed=True)
    wait = builder.call(WAIT, c10d.wait_tensor.default, builder.call(WAIT, operator.getitem, start, 0))
    table = builder.call(FINISH, aten.view.default, wait, [world_size, -1])
    results, offset = [], 0
    for node in nodes:
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        size = shape.numel()
        rows = builder.call(FINISH, aten.slice.Tensor, table, 1, offset, offset + size)
        rows = builder.call(FINISH, aten.clone.default, rows, memory_format=torch.contiguous_format)
        whole = builder.call(FINISH, aten.view.default, rows, [shape[0] * world_size, *shape[1:]])
        results.append(_whole(builder, whole, node))
        offset += size
    return results


def _whole(builder: BucketBuilder, gathered: fx.Node, node: fx.Node) -> fx.Node:
    """The parameter from the shards of all ranks, one behind the other. Padding rows are last: leaving them out is a
    view. Parts along another dimension than 0 are put together by a copy."""
    rows, dim = node.args[3], shard_dim_of(node)
    if dim:
        parts = [node.args[4], *node.args[0].meta["val"].shape]  # type: ignore[union-attr]
        return builder.reorder(FINISH, gathered, parts, 0, dim, node.meta["val"].shape)
    if gathered.meta["val"].shape[0] == rows:
        return gathered
    return builder.call(FINISH, aten.slice.Tensor, gathered, 0, 0, rows)
