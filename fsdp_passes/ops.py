"""The library's operators: schema, fake kernels, autograd formulas.

`unshard`, `reduce_grad` and `reduce_replicas` stand for a parameter's communication while the graph goes through
AOTAutograd and the partitioner; the bucketing passes replace them with collectives. All have real kernels, so that a
graph in which they were not replaced still computes the right values. `region_begin` and `region_end` open and close
ranges.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._torch_compat import group_of
from fsdp_passes.arguments import ReduceGrad, ReduceReplicas, Unshard
from fsdp_passes.division import division_over
from fsdp_passes.errors import ProcessGroupGoneError
from fsdp_passes.layout import part_of, scattered_from_whole, whole_from_gathered
from fsdp_passes.regions import REDUCE_SCATTER_REGION, label_text, pop_region, push_region, region_name

c10d = torch.ops._c10d_functional


@torch.library.custom_op("fsdp_passes::unshard", mutates_args=())
def unshard(
    shard: Tensor,
    label: Tensor | None,
    unit: int,
    rows: int,
    world_size: int,
    group_name: str,
    reduce_group_name: str,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard: bool,
    divide_factor: float | None = None,
    whole: Tensor | None = None,
    partial: Tensor | None = None,
    num_replicas: int = 1,
    replica_group_name: str = "",
    kept_world_size: int = 0,
    kept_group_name: str = "",
    shard_dim: int = 0,
    device: torch.device | None = None,
    pinned: bool = False,
) -> Tensor:
    """Gather a parameter.

    Args:
        shard: this rank's padded rows, shape (ceil(rows / world_size), *rest), in the parameter's own dtype; with
            another `shard_dim` its equal part along that.
        label: the unit's identity as data (see `regions.new_label`).
        unit: index of the unit among the units of this graph, in order of first use.
        rows: dim 0 of the whole parameter.
        world_size: number of ranks in both groups.
        group_name: the group to gather over.
        reduce_group_name: the group over which the gradient is reduced.
        param_dtype: dtype of the result; the cast happens before the gather.
        reduce_dtype: dtype in which the gradient is reduced.
        reshard: whether the backward gathers again.
        divide_factor: what the sum of the gradients is divided by; None: the number of ranks.
        whole: the full-shaped parameter without storage, which is never read. With it the gradient is not reduced: it
            goes to `whole` as it is, and `shard` has none.
        partial: a tensor of the shard's shape in `reduce_dtype` without storage, which is never read. With it the
            gradient is reduced over `reduce_group_name` only and goes to `partial`, and `shard` has none.
        num_replicas: ranks that hold the same shard.
        replica_group_name: their group, over which the reduced gradient is averaged.
        kept_world_size: ranks over which the parameter stays sharded until the backward, which gathers it over them; 0:
            over all.
        kept_group_name: the group of these ranks.
        shard_dim: the dimension along which `shard` is a part of the parameter.
        device: where to gather, of a shard that lives on the CPU, as its gradient does; None: where the shard is.
        pinned: whether that gradient is in page-locked memory.

    Returns:
        The parameter, shape (rows, *rest), in `param_dtype`.
    """
    shard = shard.to(device or shard.device).to(param_dtype).contiguous()
    gathered = c10d.all_gather_into_tensor(shard, world_size, group_name)
    return whole_from_gathered(c10d.wait_tensor(gathered), world_size, shard_dim)[:rows].clone()


@unshard.register_fake
def _(*args: Any) -> Tensor:
    call = Unshard(*args)
    shape = list(call.shard.shape)
    shape[call.shard_dim] *= call.world_size
    device = call.device or call.shard.device
    return call.shard.new_empty((call.rows, *shape[1:]), dtype=call.param_dtype, device=device)  # type: ignore[no-any-return]


# Where the gradients of offloaded parameters go: the CPU's memory, page-locked or not.
HOME = "cpu"
PINNED_HOME = "cpu:pinned"


def _device_of_result(call: ReduceGrad | ReduceReplicas) -> torch.device:
    device: torch.device = call.grad.device
    return torch.device("cpu") if call.home else device


@torch.library.custom_op("fsdp_passes::reduce_grad", mutates_args=())
def reduce_grad(
    grad: Tensor,
    label: Tensor | None,
    unit: int,
    world_size: int,
    group_name: str,
    reduce_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    divide_factor: float | None = None,
    shard_dim: int = 0,
    home: str = "",
) -> Tensor:
    """Average a gradient over the ranks and keep this rank's rows.

    Args:
        grad: the gradient of the whole parameter, shape (rows, *rest).
        label, unit: as for `unshard`.
        world_size: number of ranks in the group.
        group_name: the group to reduce over.
        reduce_dtype: dtype on the wire and of the sum.
        grad_dtype: dtype of the result.
        divide_factor: what the sum is divided by; None: the number of ranks, which gives the mean.
        shard_dim: the dimension along which this rank keeps a part, which the ranks divide unless it is 0.
        home: where the result goes: "" for the device that reduces, `HOME` or `PINNED_HOME` for the CPU.

    Returns:
        The divided sum over the ranks of the padded rows of this rank, shape (ceil(rows / world_size), *rest); or of
        its part along `shard_dim`.
    """
    grad = scattered_from_whole(grad, world_size, shard_dim)
    rows = -(-grad.shape[0] // world_size)
    padded = grad.new_zeros((rows * world_size, *grad.shape[1:]), dtype=reduce_dtype)
    padded[: grad.shape[0]] = grad
    division = division_over(group_name, grad.device, world_size, reduce_dtype, divide_factor)
    reduced = c10d.reduce_scatter_tensor(padded * division.before, division.reduce_op, world_size, group_name)
    result = (c10d.wait_tensor(reduced) * division.after).to(grad_dtype)
    return result.to("cpu") if home else result


@reduce_grad.register_fake
def _(*args: Any) -> Tensor:
    call = ReduceGrad(*args)
    shape = list(call.grad.shape)
    shape[call.shard_dim] = -(-shape[call.shard_dim] // call.world_size)
    return call.grad.new_empty(shape, dtype=call.grad_dtype, device=_device_of_result(call))  # type: ignore[no-any-return]


@torch.library.custom_op("fsdp_passes::reduce_replicas", mutates_args=())
def reduce_replicas(
    grad: Tensor,
    label: Tensor | None,
    unit: int,
    num_replicas: int,
    group_name: str,
    reduce_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    divide_factor: float | None = None,
    home: str = "",
) -> Tensor:
    """Average a reduced gradient over the ranks that hold the same rows.

    Args:
        grad: this rank's rows, what `reduce_grad` returns.
        label, unit: as for `unshard`.
        num_replicas: number of ranks in the group.
        group_name: the group to reduce over.
        reduce_dtype: dtype on the wire and of the sum.
        grad_dtype: dtype of the result.
        divide_factor: what the sum is divided by; None: the number of replicas, which gives the mean.
        home: as for `reduce_grad`.

    Returns:
        The divided sum over the replicas, in `grad`'s shape.
    """
    division = division_over(group_name, grad.device, num_replicas, reduce_dtype, divide_factor)
    reduced = c10d.all_reduce(grad.to(reduce_dtype) * division.before, division.reduce_op, group_name)
    result = (c10d.wait_tensor(reduced) * division.after).to(grad_dtype)
    return result.to("cpu") if home else result


@reduce_replicas.register_fake
def _(*args: Any) -> Tensor:
    call = ReduceReplicas(*args)
    return call.grad.new_empty(call.grad.shape, dtype=call.grad_dtype, device=_device_of_result(call))  # type: ignore[no-any-return]


@torch.library.custom_op("fsdp_passes::keep_part", mutates_args=())
def keep_part(whole: Tensor, world_size: int, group_name: str) -> Tensor:
    """This rank's rows of a gathered parameter (rows, *rest), as one of `world_size` ranks: a copy, padded to
    (ceil(rows / world_size), *rest)."""
    return part_of(whole, world_size, dist.get_rank(group_of(group_name)))


@keep_part.register_fake
def _(whole: Tensor, world_size: int, group_name: str) -> Tensor:
    return whole.new_empty((-(-whole.shape[0] // world_size), *whole.shape[1:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = Unshard(*inputs)
    ctx.set_materialize_grads(False)
    # What takes the gradient, and so how far it is reduced.
    sinks = {"whole": call.whole, "partial": call.partial}
    ctx.sink = next((name for name, sink in sinks.items() if sink is not None), "shard")
    ctx.num_inputs, ctx.orig_dtype = len(inputs), call.shard.dtype
    ctx.call = call._replace(shard=None, whole=None, partial=None)  # a context keeps no tensors but the label


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    call: Unshard = ctx.call
    grads: list[Tensor | None] = [None] * ctx.num_inputs
    if grad is not None:  # an `autograd.Function` may read the parameter and make no gradient: nothing to reduce then
        grads[Unshard._fields.index(ctx.sink)] = _reduced(call, ctx.sink, grad, ctx.orig_dtype)
    return tuple(grads)


def _reduced(call: Unshard, sink: str, grad: Tensor, orig_dtype: torch.dtype) -> Tensor:
    if sink == "whole":
        return grad
    is_averaged_again = sink == "shard" and call.num_replicas > 1
    # What is reduced once more has the reduction's dtype until then.
    dtype = orig_dtype if sink == "shard" and not is_averaged_again else call.reduce_dtype
    home = "" if sink != "shard" or call.device is None else PINNED_HOME if call.pinned else HOME
    at_home: dict[str, Any] = {"home": home} if home else {}
    factor = () if call.divide_factor is None else (call.divide_factor,)
    more = (call.divide_factor, call.shard_dim) if call.shard_dim else factor
    where = (call.label, call.unit)
    first: dict[str, Any] = {} if is_averaged_again else at_home
    grad = REDUCE_GRAD(grad, *where, call.world_size, call.reduce_group_name, call.reduce_dtype, dtype, *more, **first)
    if is_averaged_again:
        # All of the division that the user has set is in the first reduction.
        replicas, dtypes = (call.num_replicas, call.replica_group_name), (call.reduce_dtype, orig_dtype)
        grad = REDUCE_REPLICAS(grad, *where, *replicas, *dtypes, *((1.0,) if factor else ()), **at_home)
    return grad


unshard.register_autograd(_backward, setup_context=_setup_context)


# The regions are written with the low-level API on purpose: they declare that they mutate the label only so that no
# compiler removes them or swaps a begin with its end. `custom_op` would bump the label's version counter on every call,
# which autograd takes for a real write to a saved tensor.
library = torch.library.Library("fsdp_passes", "FRAGMENT")
library.define("region_begin(Tensor(a!) label, str phase, bool is_shown=True) -> ()")
library.define("region_end(Tensor(a!) label) -> ()")


def _region_begin(label: Tensor, phase: str, is_shown: bool = True) -> None:
    if phase == REDUCE_SCATTER_REGION and not dist.is_initialized():
        raise ProcessGroupGoneError(label_text(label))  # the graph itself would say only that a name is unknown
    push_region(region_name(label_text(label), phase), is_shown=is_shown)


def _region_end(label: Tensor) -> None:
    pop_region()


library.impl("region_begin", _region_begin, "CompositeExplicitAutograd")
library.impl("region_end", _region_end, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_passes::region_begin", lambda label, phase, is_shown=True: None, lib=library)
torch.library.register_fake("fsdp_passes::region_end", lambda label: None, lib=library)

UNSHARD = torch.ops.fsdp_passes.unshard.default
REDUCE_GRAD = torch.ops.fsdp_passes.reduce_grad.default
KEEP_PART = torch.ops.fsdp_passes.keep_part.default
REDUCE_REPLICAS = torch.ops.fsdp_passes.reduce_replicas.default
REGION_BEGIN = torch.ops.fsdp_passes.region_begin.default
REGION_END = torch.ops.fsdp_passes.region_end.default
torch.fx.node.has_side_effect(REGION_BEGIN)
torch.fx.node.has_side_effect(REGION_END)
