"""The reduce-scatter of compiled graphs as an operator.

PyTorch's own functional one lets each result be waited for, and with gloo each such wait copies the results of the
whole group again. A unit's gradients have one work, and one wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_passes._torch_compat import group_of, register_work
from fsdp_passes.collectives import reduce_scatter
from fsdp_passes.ops import library


def _reduce_scatter(grads: list[Tensor], reduce_op: str, world_size: int, group_name: str) -> list[Tensor]:
    """Start one grouped collective. The results are undefined until `await_collective` was called with them.

    `reduce_op`: "sum" or "avg".
    """
    inputs = [grad.contiguous() for grad in grads]
    results = _shards_of(grads, reduce_op, world_size, group_name)
    work = reduce_scatter(results, inputs, group_of(group_name), average=reduce_op == "avg")
    register_work(results[0], work)
    return results


def _shards_of(grads: list[Tensor], reduce_op: str, world_size: int, group_name: str) -> list[Tensor]:
    return [grad.new_empty((grad.shape[0] // world_size, *grad.shape[1:])) for grad in grads]


# Inductor leaves the layout of the gradients to us: a copy that it would make to have another one belongs to nobody
# while the collective reads it.
library.define(
    "reduce_scatter(Tensor[] grads, str reduce_op, int world_size, str group_name) -> Tensor[]",
    tags=(torch.Tag.flexible_layout,),
)
library.impl("reduce_scatter", _reduce_scatter, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_passes::reduce_scatter", _shards_of, lib=library)
REDUCE_SCATTER_OP = torch.ops.fsdp_passes.reduce_scatter.default
