"""FsdpScalar: a parameter without dimensions, which no rank can have a part of."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from fsdp_passes._torch_compat import is_in_backward, local_tensor
from fsdp_passes.division import gradient_division
from fsdp_passes.gradients import accumulate_gradient
from fsdp_passes.mesh import num_replicas, placements_on
from fsdp_passes.parameter import check_replacement

if TYPE_CHECKING:
    from fsdp_passes.unit import FsdpUnit


class FsdpScalar:
    """One scalar and its two faces.

    replicated   `DTensor(Replicate())` in `module._parameters[name]`: what optimizers and checkpoints see, next to the
                 sharded parameters.
    placeholder  an `nn.Parameter` in the same memory: what a forward reads, compiled or not. Its gradient is
                 all-reduced as soon as it is complete, outside of any graph.
    """

    def __init__(self, param: nn.Parameter, name: str, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy) -> None:
        self.name = name
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.unit: FsdpUnit
        self.references: list[tuple[nn.Module, str]] = []
        replicated = DTensor.from_local(param.detach().clone(), mesh, placements_on(mesh, Replicate()), run_check=False)
        self.adopted_param = nn.Parameter(replicated, requires_grad=param.requires_grad)
        self._bind()

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpScalar:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(self.__dict__)
        for name in ("unit", "references", "adopted_param"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new._bind()
        return new

    def _bind(self) -> None:
        """Make the placeholder for the DTensor that the module holds."""
        param = self.adopted_param
        self._adopted_local = local_tensor(param)
        is_float = param.is_floating_point()
        self.param_dtype = (self.mp_policy.param_dtype or param.dtype) if is_float else param.dtype
        self.placeholder = nn.Parameter(self._adopted_local.detach(), requires_grad=is_float or param.is_complex())
        if self.placeholder.requires_grad:
            self.placeholder.register_post_accumulate_grad_hook(self._reduce)
            self.placeholder.requires_grad_(param.requires_grad)

    def shard(self) -> torch.Tensor:
        """The value on this rank. Picks up a DTensor that replaced ours, as `FsdpParameter.shard` does."""
        module, name = self.references[0]
        param = module._parameters[name]
        assert param is not None
        if param is not self.adopted_param or local_tensor(param) is not self._adopted_local:
            check_replacement(param, self.adopted_param, self.name)
            self.adopted_param = param
            self._bind()
            for module, name in self.references:
                module._parameters[name] = param
        return self._adopted_local

    def face(self) -> torch.Tensor:
        """What a forward reads, in the compute dtype."""
        return self.placeholder if self.param_dtype == self.placeholder.dtype else self.placeholder.to(self.param_dtype)

    def eager_face(self) -> torch.Tensor:
        """What eager code reads: inside a forward or its recomputation the placeholder, elsewhere the DTensor."""
        self.shard()
        if not (self.unit.context.is_in_any_forward() or is_in_backward()):
            return self.adopted_param
        if self.placeholder.requires_grad != self.adopted_param.requires_grad:
            self.placeholder.requires_grad_(self.adopted_param.requires_grad)
        return self.face()

    def _reduce(self, placeholder: torch.Tensor) -> None:
        """The gradient of a backward is complete: average it over the ranks, unless sync is off and it adds up. It also
        adds up whole while nothing is reduced over the replicas."""
        unit, grad = self.unit, placeholder.grad
        waits = not unit.syncs_gradients or (num_replicas(self.mesh) > 1 and not unit.reduces_replicas)
        if waits or grad is None:
            return
        placeholder.grad = None
        self.shard()
        if not self.adopted_param.requires_grad:
            return  # frozen since the graph was compiled
        dtype = self.mp_policy.reduce_dtype or self.param_dtype
        division = gradient_division(self.mesh.size(), dtype, unit.divide_factor, averages=False)
        total = grad.to(dtype) * division.before
        for dim in range(self.mesh.ndim):
            dist.all_reduce(total, group=self.mesh.get_group(dim))
        accumulate_gradient(self.adopted_param, (total * division.after).to(self.adopted_param.dtype))
