"""Keep Inductor from fusing one unit's gradients with the next unit's compute."""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx

from fsdp_passes._torch_compat import add_order_dependency, refresh_ancestors, scheduled_fx_nodes, scheduler_node_kind
from fsdp_passes.schedule import REDUCE_SCATTER, bucket_of, origins_in_order


def fence_reductions(snodes: list[Any]) -> list[Any]:
    """Let every kernel that lies behind a reduce-scatter's start depend on that start.

    Before:  norm_grad(2)+norm_grad(1) in one kernel ; start(reduce 2) ; start(reduce 1)
    After:   norm_grad(2) ; start(reduce 2) ; … ; norm_grad(1) ; start(reduce 1)

    Inductor likes to fuse the norm-weight gradients of neighbouring layers, since they read the same residual stream.
    The fused kernel runs with the later unit, and the earlier unit's reduce-scatter is a whole layer late. Only
    kernels that a reduction needs can no longer be fused with kernels behind its start; everything else still fuses.

    Runs before Inductor's fusion. Does nothing in a graph without reduce-scatters.
    """
    position: dict[fx.Node, int] = {node: index for index, node in enumerate(scheduled_fx_nodes())}
    starts: list[tuple[int, Any]] = []
    places: list[int] = []
    for snode in snodes:
        origins = origins_in_order(snode, position)
        places.append(position[origins[-1]] if origins else -1)
        bucket = bucket_of(origins[-1]) if origins else None
        if bucket is not None and bucket.kind == REDUCE_SCATTER and scheduler_node_kind(snode) == "collective":
            starts.append((places[-1], snode))
    if not starts:
        return snodes
    starts.sort(key=lambda item: item[0])
    for (_, earlier), (_, later) in itertools.pairwise(starts):
        add_order_dependency(later, earlier)
    refresh_ancestors(snodes)  # a kernel that an earlier start needs must not be put behind a later one
    for snode, place in zip(snodes, places, strict=True):
        before = [start for where, start in starts if where < place]
        # The last start is enough: the starts depend on each other in order.
        if before and snode.get_name() not in before[-1].ancestors and scheduler_node_kind(snode) == "compute":
            add_order_dependency(snode, before[-1])
    refresh_ancestors(snodes)
    return snodes
