"""Reduce the gradients of one unit with one collective."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes.arguments import ReduceGrad
from fsdp_passes.division import GradientDivision, division_over
from fsdp_passes.ops import c10d
from fsdp_passes.passes._graph import BucketBuilder, aten
from fsdp_passes.passes._parts import Part, bytes_sent_home, gradient_shape, reduced_bytes, reduction_parts
from fsdp_passes.reduce_ops import REDUCE_SCATTER_OP
from fsdp_passes.schedule import FINISH, PREPARE, REDUCE_SCATTER, START, Bucket


def bucket_reduce_scatters(graph: fx.Graph, *, bucket_mode: str) -> list[Bucket]:
    """Replace the `reduce_grad` nodes of a unit by one reduce-scatter per dtype, behind its last gradient.

    A unit whose gradients are made in two places with another unit's in between has one for each place. What is made
    last in the graph, so that nothing can hide it, is reduced in two halves.

    Before:  r1 = reduce_grad(g1) ; mm ; r0 = reduce_grad(g0)
    After:   mm ; rs = reduce_scatter([g1, g0]) ; r1 = scale(wait(rs[0])) ; r0 = scale(wait(rs[1]))

    Gradients are cast to the reduction's dtype and padded before it; afterwards they are scaled by 1 / world where the
    backend cannot average, and cast to the parameter's dtype. bucket_mode as in `bucket_all_gathers`.

    Does nothing without `reduce_grad` nodes.
    """
    parts = reduction_parts(graph)
    groups: dict[tuple[int, Part, torch.dtype, str], list[fx.Node]] = {}
    for node in parts:
        call = ReduceGrad.of(node)
        groups.setdefault((call.unit, parts[node], call.reduce_dtype, call.group_name), []).append(node)
    order = {node: index for index, node in enumerate(graph.nodes)}
    # Buckets are numbered in the order in which they can start.
    by_last_grad = sorted(groups.items(), key=lambda item: max(order[node] for node in item[1]))
    buckets: list[Bucket] = []
    for (unit, part, dtype, group_name), nodes in by_last_grad:
        wire_bytes = sum(map(reduced_bytes, nodes))
        bucket = Bucket(
            *(REDUCE_SCATTER, len(buckets), unit, len(nodes), wire_bytes, dtype, True),
            *(part.run, part.half, tuple(map(gradient_shape, nodes)), ReduceGrad.of(nodes[0]).world_size),
            sum(bytes_sent_home(node, ReduceGrad.of(node)) for node in nodes),
        )
        last = max(nodes, key=lambda node: order[node])
        builder = BucketBuilder(graph, bucket, last)
        with graph.inserting_before(last):
            lower = _reduce_packed if bucket_mode == "packed" else _reduce_coalesced
            results = lower(builder, nodes, dtype, group_name)
            calls = [ReduceGrad.of(node) for node in nodes]
            results = builder.send_home(results, calls[0].label, [call.home for call in calls])
        for node, result in zip(nodes, results, strict=True):
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        buckets.append(bucket)
    return buckets


def _reduce_coalesced(
    builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str
) -> list[fx.Node]:
    world_size, division = ReduceGrad.of(nodes[0]).world_size, _division(nodes[0])
    grads = [_contiguous(builder, _pad(builder, node, dtype, division)) for node in nodes]
    start = builder.call(
        START,
        REDUCE_SCATTER_OP,
        grads,
        division.reduce_op,
        world_size,
        group_name,
        name=f"reduce_scatter_{builder.bucket.index}",
    )
    waits = builder.results(start, len(nodes))
    return [_finish(builder, wait, node, division) for wait, node in zip(waits, nodes, strict=True)]


def _reduce_packed(builder: BucketBuilder, nodes: list[fx.Node], dtype: torch.dtype, group_name: str) -> list[fx.Node]:
    world_size, division = ReduceGrad.of(nodes[0]).world_size, _division(nodes[0])
    grads = [_contiguous(builder, _pad(builder, node, dtype, division)) for node in nodes]
    shapes = [tuple(grad.meta["val"].shape) for grad in grads]
    # Row r of the table is what rank r receives: the r-th share of every gradient.
    # Not a view: the gradient of a grouped convolution may have other strides than the fake one had.
    table = [builder.call(PREPARE, aten.reshape.default, grad, [world_size, -1]) for grad in grads]
    packed = builder.call(PREPARE, aten.cat.default, table, 1)
    flat = builder.call(PREPARE, aten.view.default, packed, [-1])
    start = builder.call(
        START,
        c10d.reduce_scatter_tensor.default,
        flat,
        division.reduce_op,
        world_size,
        group_name,
        name=f"reduce_scatter_{builder.bucket.index}",
    )
    wait = builder.wait(start)
    results, offset = [], 0
    for node, shape in zip(nodes, shapes, strict=True):
        rows = shape[0] // world_size
        size = torch.Size((rows, *shape[1:])).numel()
        part = builder.call(FINISH, aten.slice.Tensor, wait, 0, offset, offset + size)
        part = builder.call(FINISH, aten.view.default, part, [rows, *shape[1:]])
        results.append(_finish(builder, part, node, division))
        offset += size
    return results


def _division(node: fx.Node) -> GradientDivision:
    """A unit's gradients have one factor."""
    call = ReduceGrad.of(node)
    device = call.grad.meta["val"].device
    return division_over(call.group_name, device, call.world_size, call.reduce_dtype, call.divide_factor)


def _pad(builder: BucketBuilder, node: fx.Node, dtype: torch.dtype, division: GradientDivision) -> fx.Node:
    call = ReduceGrad.of(node)
    grad, world_size, dim = builder.cast(PREPARE, call.grad, dtype), call.world_size, call.shard_dim
    if division.before != 1.0:
        grad = builder.call(PREPARE, aten.mul.Tensor, grad, division.before)
    value = grad.meta["val"]
    if dim:
        parts = [*value.shape[:dim], world_size, -1, *value.shape[dim + 1 :]]
        result = torch.Size((world_size * value.shape[0], *node.meta["val"].shape[1:]))
        return builder.reorder(PREPARE, _contiguous(builder, grad), parts, dim, 0, result)
    missing = -value.shape[0] % world_size
    if missing == 0:
        return grad
    padding = [0, 0] * (value.dim() - 1) + [0, missing]
    return builder.call(PREPARE, aten.constant_pad_nd.default, grad, padding)


def _contiguous(builder: BucketBuilder, node: fx.Node) -> fx.Node:
    """Collectives read their inputs as flat memory."""
    if node.meta["val"].is_contiguous():
        return node
    return builder.call(PREPARE, aten.clone.default, node, memory_format=torch.contiguous_format)


def _finish(builder: BucketBuilder, reduced: fx.Node, node: fx.Node, division: GradientDivision) -> fx.Node:
    if division.after != 1.0:
        reduced = builder.call(FINISH, aten.mul.Tensor, reduced, division.after)
    return builder.cast(FINISH, reduced, ReduceGrad.of(node).grad_dtype)
