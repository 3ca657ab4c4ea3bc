"""Average the reduced gradients of one unit over the replicas with one collective."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes.arguments import ReduceGrad, ReduceReplicas
from fsdp_passes.division import GradientDivision, division_over
from fsdp_passes.ops import REDUCE_REPLICAS, c10d
from fsdp_passes.passes._graph import BucketBuilder, aten
from fsdp_passes.passes._parts import Part, bytes_sent_home, gradient_shape, reduced_bytes, reduction_parts
from fsdp_passes.schedule import ALL_REDUCE, FINISH, PREPARE, START, Bucket


def bucket_all_reduces(graph: fx.Graph, *, bucket_mode: str) -> list[Bucket]:
    """Replace the `reduce_replicas` nodes behind the gradients that are reduced together by one all-reduce per dtype.

    Before:  s1 = reduce_grad(g1) ; r1 = reduce_replicas(s1) ; mm ; s0 = reduce_grad(g0) ; r0 = reduce_replicas(s0)
    After:   s1 = reduce_grad(g1) ; mm ; s0 = reduce_grad(g0) ; ar = all_reduce([s1, s0]) ; r1 = scale(wait(ar[0])) ; …

    The results are scaled by 1 / replicas where the backend cannot average, and cast to the parameter's dtype.
    bucket_mode as in `bucket_all_gathers`.

    Runs before `bucket_reduce_scatters`, which makes one collective of the same gradients. Does nothing without
    `reduce_replicas` nodes (a mesh of one dimension).
    """
    parts = reduction_parts(graph)
    groups: dict[tuple[int, Part, torch.dtype, str], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=REDUCE_REPLICAS, sort=True):
        call = ReduceReplicas.of(node)
        groups.setdefault((call.unit, parts[call.grad], call.reduce_dtype, call.group_name), []).append(node)
    order = {node: index for index, node in enumerate(graph.nodes)}
    buckets: list[Bucket] = []
    # Numbered in the order in which they can start.
    for (unit, part, dtype, group_name), nodes in sorted(groups.items(), key=lambda item: order[item[1][-1]]):
        sources = [ReduceReplicas.of(node).grad for node in nodes]
        num_bytes = sum(reduced_bytes(source) // ReduceGrad.of(source).world_size for source in sources)
        shapes = tuple(map(gradient_shape, sources))
        bucket = Bucket(
            *(ALL_REDUCE, len(buckets), unit, len(nodes), num_bytes, dtype, True),
            *(part.run, part.half, shapes, ReduceReplicas.of(nodes[0]).num_replicas),
            sum(bytes_sent_home(node, ReduceReplicas.of(node)) for node in nodes),
        )
        last = nodes[-1]
        builder = BucketBuilder(graph, bucket, last)
        with graph.inserting_before(last):
            lower = _reduce_packed if bucket_mode == "packed" else _reduce_coalesced
            results = lower(builder, nodes, group_name)
            calls = [ReduceReplicas.of(node) for node in nodes]
            results = builder.send_home(results, calls[0].label, [call.home for call in calls])
        for node, result in zip(nodes, results, strict=True):
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        buckets.append(bucket)
    return buckets


def _reduce_coalesced(builder: BucketBuilder, nodes: list[fx.Node], group_name: str) -> list[fx.Node]:
    division = _division(nodes[0])
    grads = [_prepare(builder, node, division) for node in nodes]
    target, name = c10d.all_reduce_coalesced.default, f"all_reduce_{builder.bucket.index}"
    start = builder.call(START, target, grads, division.reduce_op, group_name, name=name)
    waits = builder.results(start, len(nodes))
    return [_finish(builder, wait, node, division) for wait, node in zip(waits, nodes, strict=True)]


def _reduce_packed(builder: BucketBuilder, nodes: list[fx.Node], group_name: str) -> list[fx.Node]:
    division = _division(nodes[0])
    grads = [_prepare(builder, node, division) for node in nodes]
    flat = builder.call(
        PREPARE, aten.cat.default, [builder.call(PREPARE, aten.view.default, grad, [-1]) for grad in grads]
    )
    target, name = c10d.all_reduce.default, f"all_reduce_{builder.bucket.index}"
    start = builder.call(START, target, flat, division.reduce_op, group_name, name=name)
    wait = builder.wait(start)
    results, offset = [], 0
    for node, grad in zip(nodes, grads, strict=True):
        shape = grad.meta["val"].shape
        part = builder.call(FINISH, aten.slice.Tensor, wait, 0, offset, offset + shape.numel())
        part = builder.call(FINISH, aten.view.default, part, list(shape))
        results.append(_finish(builder, part, node, division))
        offset += shape.numel()
    return results


def _division(node: fx.Node) -> GradientDivision:
    call = ReduceReplicas.of(node)
    device = call.grad.meta["val"].device
    return division_over(call.group_name, device, call.num_replicas, call.reduce_dtype, call.divide_factor)


def _prepare(builder: BucketBuilder, node: fx.Node, division: GradientDivision) -> fx.Node:
    source: fx.Node = ReduceReplicas.of(node).grad
    return source if division.before == 1.0 else builder.call(PREPARE, aten.mul.Tensor, source, division.before)


def _finish(builder: BucketBuilder, reduced: fx.Node, node: fx.Node, division: GradientDivision) -> fx.Node:
    if division.after != 1.0:
        reduced = builder.call(FINISH, aten.mul.Tensor, reduced, division.after)
    return builder.cast(FINISH, reduced, ReduceReplicas.of(node).grad_dtype)
