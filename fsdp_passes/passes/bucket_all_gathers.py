"""Gather the parameters of one unit with one collective."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes.arguments import Unshard
from fsdp_passes.gather_ops import ALL_GATHER_OP
from fsdp_passes.ops import UNSHARD
from fsdp_passes.passes._graph import BucketBuilder, aten
from fsdp_passes.passes._parts import Part, sharded_shape, split_units
from fsdp_passes.schedule import ALL_GATHER, FINISH, START, Bucket, ShardedShape


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
        graph, unshards, _gathered_bytes, exposed_end="first", is_one_run=lambda node: Unshard.of(node).reshard
    )
    groups: dict[tuple[int, Part, torch.dtype, str], list[fx.Node]] = {}
    for node in unshards:
        call = Unshard.of(node)
        groups.setdefault((call.unit, parts[node], call.param_dtype, call.group_name), []).append(node)
    buckets: list[Bucket] = []
    for (unit, part, dtype, group_name), nodes in groups.items():
        gathered_bytes = sum(map(_gathered_bytes, nodes))
        first = Unshard.of(nodes[0])
        bucket = Bucket(
            *(ALL_GATHER, len(buckets), unit, len(nodes), gathered_bytes, dtype, first.reshard),
            *(part.run, part.half, tuple(map(_shape, nodes)), first.world_size, sum(map(_copied_bytes, nodes))),
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
    call = Unshard.of(node)
    return int(call.shard.meta["val"].numel() * call.world_size * call.param_dtype.itemsize)


def _copied_bytes(node: fx.Node) -> int:
    """Of a shard that lives on the CPU, in its own dtype."""
    call = Unshard.of(node)
    shard = call.shard.meta["val"]
    return 0 if call.device is None else int(shard.numel() * shard.dtype.itemsize)


def _shape(node: fx.Node) -> ShardedShape:
    call = Unshard.of(node)
    return sharded_shape(node.meta["val"], call.shard_dim, call.param_dtype)


def _start(builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str, packed: bool) -> fx.Node:
    shards, first = [Unshard.of(node).shard for node in nodes], Unshard.of(nodes[0])
    name = f"all_gather_{builder.bucket.index}"
    where = {} if first.device is None else {"device": first.device}
    return builder.call(
        START, ALL_GATHER_OP, shards, first.label, first.world_size, group_name, dtype, packed, name=name, **where
    )


def _gather_coalesced(
    builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str
) -> list[fx.Node]:
    start = _start(builder, nodes, dtype, group_name, packed=False)
    waits = builder.results(start, len(nodes))
    return [_whole(builder, wait, node) for wait, node in zip(waits, nodes, strict=True)]


def _gather_packed(builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str) -> list[fx.Node]:
    world_size = Unshard.of(nodes[0]).world_size
    start = _start(builder, nodes, dtype, group_name, packed=True)
    wait = builder.results(start, 1)[0]
    table = builder.call(FINISH, aten.view.default, wait, [world_size, -1])
    results, offset = [], 0
    for node in nodes:
        shape = Unshard.of(node).shard.meta["val"].shape
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
    call = Unshard.of(node)
    if call.shard_dim:
        parts = [call.world_size, *call.shard.meta["val"].shape]
        return builder.reorder(FINISH, gathered, parts, 0, call.shard_dim, node.meta["val"].shape)
    if gathered.meta["val"].shape[0] == call.rows:
        return gathered
    return builder.call(FINISH, aten.slice.Tensor, gathered, 0, 0, call.rows)
