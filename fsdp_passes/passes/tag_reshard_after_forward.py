"""Keep gathered weights from being saved for the backward."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_passes._torch_compat import CheckpointPolicy
from fsdp_passes.arguments import Unshard
from fsdp_passes.ops import KEEP_PART, UNSHARD

aten = torch.ops.aten
# Besides views: what turns a weight into the same weight in another dtype or layout.
_COPIES = {
    aten._to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    torch.ops.prims.convert_element_type.default,
}


def _is_alias_or_cast(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _COPIES or target.is_view


def weight_chain(gathered: fx.Node) -> list[fx.Node]:
    """`gathered` and every view, copy and cast of it, in graph order."""
    chain, pending = [gathered], [gathered]
    while pending:
        for user in pending.pop().users:
            if _is_alias_or_cast(user) and user not in chain:
                chain.append(user)
                pending.append(user)
    return chain


def tag_reshard_after_forward(graph: fx.Graph) -> int:
    """Tag `unshard` and its views and casts: recompute in the backward, or save when the unit does not reshard. What
    `keep_part` makes is saved.

    The tag's `ac_graph_id` lies above every activation-checkpoint region's: where a checkpointed block reads the
    weight, the partitioner would otherwise take the weight for the boundary between two regions and save it. Only our
    own nodes are tagged; the tags that a user's checkpointing set on other nodes stay.

    Requires: the joint graph. Does nothing without `unshard` nodes (an inference graph has no backward either).
    Returns: number of tagged nodes.
    """
    weights = graph.find_nodes(op="call_function", target=UNSHARD)
    ours = {node for gathered in weights for node in weight_chain(gathered)}
    graph_id = 1 + max((node.meta.get("ac_graph_id", 0) for node in graph.nodes if node not in ours), default=0)
    num_tagged = 0
    for part in graph.find_nodes(op="call_function", target=KEEP_PART):
        part.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        part.meta["ac_graph_id"] = graph_id
    for gathered in weights:
        reshard = Unshard.of(gathered).reshard
        policy = CheckpointPolicy.MUST_RECOMPUTE if reshard else CheckpointPolicy.MUST_SAVE
        for node in weight_chain(gathered) if reshard else [gathered]:
            node.meta["recompute"] = policy
            node.meta["ac_graph_id"] = graph_id
            num_tagged += 1
    return num_tagged
