"""The baseline "SimpleFSDP": sharding written as a parametrization, compiled as part of the whole model.

The idea (SimpleFSDP, arXiv 2411.00284): each parameter is a DTensor sharded along its first dimension; reading it
redistributes it to a replicated one, which traces to an all-gather, and whose backward is a reduce-scatter. The read is
recomputed in the backward, so that no gathered parameter is saved. Overlap is left to the compiler.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def _recompute_all(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


class GatherOnRead(nn.Module):
    """Sharded DTensor in, plain tensor of the whole parameter in the compute dtype out."""

    def __init__(self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype

    def _gather(self, sharded: DTensor) -> Tensor:
        whole = sharded.redistribute(
            placements=[Replicate()], forward_dtype=self.param_dtype, backward_dtype=self.reduce_dtype
        )
        # Each rank has the gradient of its own batch: the mean over the ranks is wanted.
        return whole.to_local(grad_placements=[Partial("avg")])

    def forward(self, sharded: DTensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _recompute_all)
        return checkpoint(self._gather, sharded, use_reentrant=False, context_fn=contexts)


def shard_by_parametrization(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard every parameter of `model` in place.

    First dimensions must be multiples of the number of ranks. Tied parameters are not supported.
    """
    rank, world_size = mesh.get_local_rank(), mesh.size()
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            if param.shape[0] % world_size:
                raise ValueError(
                    f"Expected first dimensions that are multiples of {world_size} ranks, found {tuple(param.shape)} "
                    f"of {name}. Choose another shape."
                )
            local = param.detach().chunk(world_size)[rank].clone()
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(sharded, requires_grad=param.requires_grad))
            gather = GatherOnRead(param_dtype, reduce_dtype)
            parametrize.register_parametrization(module, name, gather, unsafe=True)
    return model
