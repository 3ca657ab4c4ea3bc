"""Keep a parameter sharded over fewer ranks between forward and backward."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes.arguments import Unshard
from fsdp_passes.ops import KEEP_PART, UNSHARD

# Metadata that describes a node's own inputs and layout; the rest says where in the user's code it belongs.
_OF_ARGUMENTS = ("eager_input_vals", "tensor_meta")


def reshard_to_group(graph: fx.Graph) -> int:
    """Let the backward gather what each rank of a smaller group keeps (`reshard_after_forward` as a number).

    Before:  w = unshard(shard) ; forward(w) ; backward(w)
    After:   w = unshard(shard) ; p = keep_part(w) ; v = unshard(p) over the group ; forward(v) ; backward(v)

    `tag_reshard_after_forward` has the partitioner save p and recompute v, so that the forward has both: there
    `read_first_gather` takes the second gather out again.

    Runs on the joint graph, before the tags. Does nothing without such parameters, or when it has run already.
    Returns: number of parameters.
    """
    num_params = 0
    for gathered in graph.find_nodes(op="call_function", target=UNSHARD, sort=True):
        call = Unshard.of(gathered)
        if not call.kept_world_size or not call.reshard or any(user.target is KEEP_PART for user in gathered.users):
            continue
        world_size, group_name = call.kept_world_size, call.kept_group_name
        value = gathered.meta["val"]
        with graph.inserting_after(gathered):
            part = graph.call_function(KEEP_PART, (gathered, world_size, group_name))
        groups = (world_size, group_name, group_name)
        arguments = (part, call.label, call.unit, call.rows, *groups, call.param_dtype, call.reduce_dtype, True)
        with graph.inserting_after(part):
            again = graph.call_function(UNSHARD, arguments)
        gathered.replace_all_uses_with(again, delete_user_cb=lambda user, part=part: user is not part)
        for node in (part, again):
            node.meta = {key: kept for key, kept in gathered.meta.items() if key not in _OF_ARGUMENTS}
        part.meta["val"] = value.new_empty((-(-value.shape[0] // world_size), *value.shape[1:]))
        num_params += 1
    return num_params


def read_first_gather(graph: fx.Graph) -> int:
    """In a graph that gathers a parameter, keeps a part of it and gathers that again, read the first gather.

    Before:  w = unshard(shard) ; p = keep_part(w) ; v = unshard(p) ; forward(v) ; return p
    After:   w = unshard(shard) ; forward(w) ; p = keep_part(w) ; return p

    The parts are taken behind the last step that reads any parameter of the unit. Taken before, they would be the
    unit's first reads, and a kernel that reads the unit before too would come behind them.

    Does nothing in other graphs.   Returns: number of gathers that are left out.
    """
    parts = []
    for again in graph.find_nodes(op="call_function", target=UNSHARD, sort=True):
        part = again.args[0]
        if not isinstance(part, fx.Node) or part.target is not KEEP_PART:
            continue
        again.replace_all_uses_with(part.args[0])  # type: ignore[arg-type]
        graph.erase_node(again)
        parts.append(part)
    last = _last_readers(graph) if parts else {}
    for part in reversed(parts):
        if not part.users:  # without a backward
            graph.erase_node(part)
            continue
        reader = last[Unshard.of(part.args[0]).unit]  # type: ignore[arg-type]
        if reader is not part:
            reader.append(part)
    return len(parts)


def _last_readers(graph: fx.Graph) -> dict[int, fx.Node]:
    """Unit index -> the last step that reads one of its gathered parameters, directly or through views."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[int, fx.Node] = {}
    for gathered in graph.find_nodes(op="call_function", target=UNSHARD):
        unit, pending = Unshard.of(gathered).unit, list(gathered.users)
        while pending:
            reader = pending.pop()
            if isinstance(reader.target, torch._ops.OpOverload) and reader.target.is_view:
                pending += reader.users
            elif reader.op != "output" and (unit not in last or order[reader] > order[last[unit]]):
                last[unit] = reader
    return last
