"""What one node of an ATen graph computes and moves, from the shapes in its metadata.

Sizes are ints, or sympy expressions where the graph was traced with symbolic shapes; only sums and products of them
are taken, so one set of formulas serves both.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import sympy
import torch
from torch import fx

from fsdp_passes.ops import REGION_BEGIN, REGION_END
from fsdp_passes.schedule import START, WAIT, is_heavy, role_of

Size = Any  # int or sympy.Expr


@dataclasses.dataclass(frozen=True)
class OpCost:
    """Work of one node.

    Attributes:
        flops: floating-point operations, a multiplication and an addition counted as two.
        num_bytes: bytes read from and written to the accelerator's memory.
        dtype: in which it computes.
        is_heavy: whether it is a matrix product, a convolution or an attention, which run on the tensor cores.
    """

    flops: Size
    num_bytes: Size
    dtype: torch.dtype
    is_heavy: bool


def to_size(value: Any) -> Size:
    """An int, or the sympy expression behind a SymInt."""
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def num_elements(shape: Any) -> Size:
    """Product of the sizes."""
    product: Size = 1
    for size in shape:
        product = product * to_size(size)
    return product


def tensor_bytes(value: torch.Tensor) -> Size:
    """Bytes of a dense tensor of this shape."""
    return num_elements(value.shape) * value.dtype.itemsize


def is_free(node: fx.Node) -> bool:
    """Whether no kernel runs for a node: views, tuples' items, sizes, regions, and the collectives themselves."""
    target = node.target
    if node.op != "call_function" or target in (operator.getitem, REGION_BEGIN, REGION_END):
        return True
    if role_of(node) in (START, WAIT) or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return True
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target in _NO_KERNEL)


_NO_KERNEL = (torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default)


def costs_of_graph(graph: fx.Graph) -> dict[fx.Node, OpCost]:
    """The cost of every node that runs a kernel.

    Light nodes (everything but matrix products, convolutions and attention) between two heavy ones are taken for fused,
    as Inductor fuses them: of their tensors only those count that come from outside or are read outside.
    """
    segment, number = {}, 0
    for node in graph.nodes:
        if is_free(node):
            continue
        number += 1 if is_heavy(node) else 0
        segment[node] = (number, is_heavy(node))
        number += 1 if is_heavy(node) else 0
    costs = {}
    read_in: set[tuple[fx.Node, Any]] = set()
    for node, part in segment.items():
        heavy = part[1]
        moved: Size = 0
        for source, size in _reads(node):
            inside = not heavy and segment.get(source) == part
            if inside or (not heavy and (source, part) in read_in):
                continue
            read_in.add((source, part))
            moved = moved + size
        readers = list(_readers(node))
        if heavy or not readers or any(segment.get(reader) != part for reader in readers):
            moved = moved + sum(tensor_bytes(value) for value in _tensors(node))
        value = next(iter(_tensors(node)), None)
        dtype = value.dtype if value is not None else torch.float32
        flops = flops_of_node(node) if heavy else sum(num_elements(value.shape) for value in _tensors(node))
        costs[node] = OpCost(flops, moved, dtype, heavy)
    return costs


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _reads(node: fx.Node) -> list[tuple[fx.Node, Size]]:
    """Each tensor that a node reads: the node whose memory it is, and how many bytes of it. Views are looked through;
    what an `expand` repeats is read once."""
    found = {}
    for source in node.all_input_nodes:
        if not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        size = tensor_bytes(source.meta["val"])
        while is_free(source) and source.op == "call_function" and role_of(source) is None and source.all_input_nodes:
            if source.target is torch.ops.aten.expand.default:
                size = tensor_bytes(source.all_input_nodes[0].meta["val"])
            source = source.all_input_nodes[0]
        if node.target is torch.ops.aten.embedding.default and source is node.all_input_nodes[0]:
            size = sum(tensor_bytes(value) for value in _tensors(node))  # the rows that are looked up
        found[source] = size
    return list(found.items())


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read what a node made, behind views of it."""
    found, pending = [], list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "call_function" and is_free(user) and role_of(user) not in (START, WAIT):
            pending += user.users
        else:
            found.append(user)
    return found


def flops_of_node(node: fx.Node) -> Size:
    """Floating-point operations of a heavy node; 0 for one without a formula (an operator of somebody else's)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    name = node.target._schema.name.split("::")[1]
    shapes = [arg.meta["val"].shape if isinstance(arg, fx.Node) and _tensors(arg) else None for arg in node.args]
    if "attention" in name:
        return _attention_flops(node, name)
    if name in ("mm", "bmm", "mv", "dot"):
        return _product_flops(shapes[0], shapes[1])
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return _product_flops(shapes[1], shapes[2])
    if name == "_scaled_mm":
        return _product_flops(shapes[0], shapes[1])
    if name == "convolution":
        return _convolution_flops(shapes[1], node.meta["val"].shape)
    if name == "convolution_backward":
        wanted = sum(bool(flag) for flag in node.args[-1][:2])  # type: ignore[index,union-attr,misc]
        return wanted * _convolution_flops(shapes[2], shapes[0])
    return 0


def _product_flops(left: Any, right: Any) -> Size:
    """(…, m, k) times (k, n) or (…, k, n), and the vector cases."""
    columns = to_size(right[-1]) if len(right) > 1 else 1
    return 2 * num_elements(left) * columns


def _convolution_flops(weight: Any, output: Any) -> Size:
    """Each output element sums over the weight's (in / groups, *kernel)."""
    return 2 * num_elements(output) * num_elements(weight[1:])


def _attention_flops(node: fx.Node, name: str) -> Size:
    """Fused attention on (batch, heads, length, dim): two products forward. The backward computes the scores again and
    makes four gradients: five products. A causal mask leaves half of each."""
    is_backward = name.endswith("backward")
    tensors = [arg for arg in node.args if isinstance(arg, fx.Node) and _tensors(arg)]
    query, key, value = (arg.meta["val"].shape for arg in tensors[is_backward : is_backward + 3])
    scores = num_elements(query[:-1]) * to_size(key[-2])
    per_score = to_size(query[-1]) * (3 if is_backward else 1) + to_size(value[-1]) * (2 if is_backward else 1)
    flops = 2 * scores * per_score
    return (
        flops * sympy.Rational(1, 2)
        if _is_causal(node) and not isinstance(flops, int)
        else (flops // 2 if _is_causal(node) else flops)
    )


def _is_causal(node: fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "is_causal":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("is_causal", argument.default_value)
            return bool(given)
    return False
