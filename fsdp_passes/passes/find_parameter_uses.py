"""Find the graph inputs that are sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_passes.errors import MutatedParameterError
from fsdp_passes.parameter import FsdpParameter, fsdp_parameter_of
from fsdp_passes.passes._uses import ParameterUse


def find_parameter_uses(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[ParameterUse]:
    """Match graph inputs with parameters, by object identity and never by name.

    Returns the uses in order of the inputs. Unused inputs are left out. Raises `MutatedParameterError` when the traced
    code writes into a parameter: Dynamo's fake tensors count writes, those through views too.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    found: list[tuple[fx.Node, int, FsdpParameter]] = []
    for position, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
        param = fsdp_parameter_of(example)
        if param is None or not node.users:
            continue
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
    return [ParameterUse(node, position, param, unit_index[param.unit]) for node, position, param in found]
