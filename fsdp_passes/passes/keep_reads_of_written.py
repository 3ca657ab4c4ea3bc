"""Keep the backward from reading inputs that the forward has written."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fsdp_passes._torch_compat import CheckpointPolicy
from fsdp_passes.ops import UNSHARD

COPY_BACK = torch.ops.aten.copy_.default


def keep_reads_of_written(graph: fx.Graph) -> int:
    """Tag what the forward computes from an input that it also writes (a buffer with a running average): save it, or
    what follows from it, but never compute it again.

    The write is a copy at the forward's end. A backward that computed such a value again would begin with what was
    written: applied twice, an average would be one step ahead, and gradients wrong without an error. Views are passed
    over, since a saved view of the input shows what was written as well. A value that the user's checkpointing
    computes again stays so, as without a compiler.

    Requires: the joint graph. Does nothing where no input is written.
    Returns: number of tagged nodes.
    """
    written = {node.args[0] for node in graph.find_nodes(op="call_function", target=COPY_BACK)}
    num_tagged = 0
    for source in [node for node in graph.find_nodes(op="placeholder") if node in written]:
        pending, seen = [source], {source}
        while pending:
            for user in pending.pop().users:
                target = user.target
                if user in seen or target in (COPY_BACK, UNSHARD):
                    continue
                seen.add(user)
                if target is operator.getitem:  # of a view with several results, `unbind`: nothing else is pending
                    pending.append(user)
                elif not isinstance(target, torch._ops.OpOverload):
                    continue
                elif target.is_view:
                    pending.append(user)
                elif "recompute" not in user.meta:
                    user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                    num_tagged += 1
    return num_tagged
