"""Let a graph begin with a look at what the other ranks are about to run."""

from __future__ import annotations

import hashlib

import torch
from torch import fx

from fsdp_passes.agreement import AGREE_ON_SCHEDULE, Collective, encode
from fsdp_passes.passes._graph import group_of_start
from fsdp_passes.schedule import bucket_of


def agree_on_schedule(graph: fx.Graph, *, labels: dict[int, fx.Node], is_backward: bool, timeout_s: float) -> int:
    """Insert one `agree_on_schedule` per process group in front of everything else.

    Before:  all_gather(0) ; ... ; reduce_scatter(1)
    After:   agree_on_schedule("all_gather ...@0;...;reduce_scatter ...@1") ; all_gather(0) ; ... ; reduce_scatter(1)

    Of the user's own collectives, which may carry activations of any size, only operator and dtype are compared, and
    those of groups without a sharded parameter not at all.

    `labels`: unit index -> the graph input that holds the unit's name. `timeout_s`: how long a rank waits for others.

    Requires: the final order. Does nothing without labels or collectives of ours, or when it has run already.
    Returns: number of inserted nodes.
    """
    if not labels or any(node.target is AGREE_ON_SCHEDULE for node in graph.nodes):
        return 0
    schedules: dict[str, list[Collective]] = {}
    has_ours: set[str] = set()
    for node in graph.nodes:
        group = group_of_start(node)
        if group is not None:
            collective = _collective(node)
            schedules.setdefault(group, []).append(collective)
            if collective.unit >= 0:
                has_ours.add(group)
    units = sorted(labels)
    place = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(place):
        for group in sorted(has_ours):
            # Counted among the labels that are handed over.
            items = [(name, units.index(unit) if unit >= 0 else -1) for name, unit in schedules[group]]
            text = encode([Collective(*item) for item in items])
            fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
            label_nodes = [labels[unit] for unit in units]
            phase = "backward" if is_backward else "forward"
            arguments = (label_nodes[0], label_nodes, phase, group, fingerprint, text, timeout_s)
            graph.call_function(AGREE_ON_SCHEDULE, arguments).meta["val"] = None
    return len(has_ours)


def _collective(node: fx.Node) -> Collective:
    bucket = bucket_of(node)
    if bucket is not None:
        dtype = str(bucket.dtype).removeprefix("torch.")
        size = f"{bucket.num_params} parameters, {bucket.num_bytes} bytes"
        return Collective(f"{bucket.kind} ({dtype}, {size})", bucket.unit)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    values = [arg.meta.get("val") for arg in node.all_input_nodes]
    dtypes = dict.fromkeys(str(v.dtype).removeprefix("torch.") for v in values if isinstance(v, torch.Tensor))
    return Collective(f"{target._schema.name.split('::')[1]} ({', '.join(dtypes)})", -1)
