"""Turn full-shaped parameter inputs into shards that are gathered before their first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_passes._torch_compat import set_dynamo_source, switch_autograd, where_autograd_is_off
from fsdp_passes.ops import UNSHARD
from fsdp_passes.parameter import GradientSink
from fsdp_passes.passes._uses import ParameterUse


def insert_unshard(gm: fx.GraphModule, uses: Sequence[ParameterUse], *, reduce_group_suffix: str) -> list[int]:
    """Insert one `fsdp_passes::unshard` per parameter, before its first use, or before the `no_grad` that this is in.
    Where the whole graph is in a `no_grad` and a later use is not, autograd is switched on for the `unshard` alone.

    Before:  linear(x, weight)
    After:   unshard(weight_shard, label_0, ...) ; linear(x, unshard)

    One input per unit is appended, in order of unit index: the unit's identity as data (its label). Behind them comes
    one for each parameter whose gradient is not reduced, or not over the replicas, in order of `uses`: its sink (see
    `whole` and `partial` in `ops.unshard`).
    `reduce_group_suffix` is appended to the group's name for the gradient's reduction.

    Requires: a graph straight from Dynamo. Does nothing without uses, or where they are gathered already.
    Returns: for each appended input, the position in `uses` of a parameter whose unit's label it takes.
    """
    uses = [use for use in uses if not any(user.target is UNSHARD for user in use.node.users)]
    if not uses:
        return []
    label_nodes: dict[int, fx.Node] = {}
    label_from: list[int] = []
    last = gm.graph.find_nodes(op="placeholder")[-1]
    for index in sorted({use.unit_index for use in uses}):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"label_{index}", type_expr=torch.Tensor)
        set_dynamo_source(last)
        label_nodes[index] = last
        label_from.append(next(i for i, use in enumerate(uses) if use.unit_index == index))

    sinks: dict[ParameterUse, fx.Node] = {}
    for use in uses:
        if use.sink is not GradientSink.SHARD:
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"{use.sink.name.lower()}_{use.position}", type_expr=torch.Tensor)
            set_dynamo_source(last)
            sinks[use] = last

    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    off = where_autograd_is_off(gm.graph)
    for use in uses:
        param = use.param
        first = min(use.node.users, key=lambda user: order[user])
        # Where autograd is off the result would carry no gradient, and a later use may need one.
        is_off_around = off.get(first, first) is None and not off.keys() >= use.node.users.keys()
        with gm.graph.inserting_before(off.get(first) or first):
            if is_off_around:
                switch_autograd(gm.graph, True)
            gathered = gm.graph.call_function(
                UNSHARD,
                (
                    use.node,
                    label_nodes[use.unit_index],
                    use.unit_index,
                    param.rows,
                    param.world_size,
                    param.group_name,
                    param.group_name + reduce_group_suffix,
                    param.param_dtype,
                    param.reduce_dtype,
                    param.unit.reshards_after_forward,
                    *_gradient_arguments(use, sinks.get(use)),
                ),
            )
            if is_off_around:
                switch_autograd(gm.graph, False)
        for user in [user for user in use.node.users if user is not gathered]:
            user.replace_input_with(use.node, gathered)
        # What Dynamo recorded about the full-shaped input is not true of the shard.
        use.node.meta.pop("example_value", None)
        use.node.meta.pop("tensor_dict", None)
    gm.recompile()
    return label_from


def _gradient_arguments(use: ParameterUse, sink: fx.Node | None) -> list[Any]:
    """From `divide_factor` on; left out at the end where they are the defaults, so that graphs stay short to read."""
    param, unit = use.param, use.param.unit
    whole, partial = (sink, None) if use.sink is GradientSink.WHOLE else (None, sink)
    replicas = [1, ""] if sink is not None else [param.num_replicas, param.replica_group_name]
    kept = [0, ""] if unit.kept_group is None else [unit.kept_world_size, unit.kept_group.group_name]
    home = [None, False] if param.home is None else [param.placeholder.device, param.home.pinned]
    arguments: list[Any] = [unit.divide_factor, whole, partial, *replicas, *kept, param.shard_dim, *home]
    defaults: list[Any] = [None, None, None, 1, "", 0, "", 0, None, False]
    while arguments and (arguments[-1] is None or (arguments[-1] == defaults[len(arguments) - 1])):
        arguments.pop()
    return arguments
