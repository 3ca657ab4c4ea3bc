"""Find the graph inputs that are sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_passes.errors import ComplexParameterError, MutatedParameterError
from fsdp_passes.parameter import FsdpParameter, fsdp_parameter_of
from fsdp_passes.passes._uses import ParameterUse
from fsdp_passes.unit import FsdpUnit


def find_parameter_uses(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[ParameterUse]:
    """Match graph inputs with parameters, by object identity and never by name.

    Returns the uses in order of the inputs. Unused inputs are left out. Raises `MutatedParameterError` when the traced
    code writes into a parameter: Dynamo's fake tensors count writes, those through views too. Raises
    `ComplexParameterError` for parameters of complex numbers.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    found: list[tuple[fx.Node, int, FsdpParameter]] = []
    for position, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
        param = fsdp_parameter_of(example)
        if param is None or not node.users:
            continue
        if param.param_dtype.is_complex:
            raise ComplexParameterError(param.qualified_name, param.param_dtype)
        traced = node.meta.get("example_value")
        if traced is not None and traced._version > 0:
            raise MutatedParameterError(param.qualified_name)
        found.append((node, position, param))

    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    first_use: dict[Any, int] = {}
    for node, _, param in found:
        use = min(order[user] for user in node.users)
        first_use[param.unit] = min(use, first_use.get(param.unit, use))
    # Ties (two units first used by one node) are broken by the position of the inputs, which all ranks agree on:
    # dicts keep insertion order and sorted() is stable.
    unit_index = {unit: index for index, unit in enumerate(sorted(first_use, key=lambda unit: first_use[unit]))}
    last = _unit_reduced_behind(list(unit_index))
    uses = []
    for node, position, param in found:
        is_last = param.unit is last
        sink = param.gradient_sink(is_last=is_last)
        uses.append(ParameterUse(node, position, param, unit_index[param.unit], is_last, sink))
    return uses


def _unit_reduced_behind(units: list[FsdpUnit]) -> FsdpUnit | None:
    """Of a graph that is one of several, the unit whose gradients come last: the one that is used first. Nothing in
    this graph's backward could hide their reduction, but the backward of the graph that comes next can. Behind a graph
    that begins with the root's parameters, or that has all units, none comes as a rule.
    """
    if not units or units[0].is_root:
        return None
    others = [unit for unit in units[0].context.units if unit.params and unit not in units]
    return units[0] if others else None
