"""How a sum of gradients over ranks becomes their mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_passes._torch_compat import group_of
from fsdp_passes.mesh import REDUCE_GROUP_SUFFIX


class GradientDivision(NamedTuple):
    """The reduction's op, and what to multiply with before and behind it."""

    reduce_op: str
    before: float
    after: float


def division_over(
    group_name: str, device: torch.device, num_ranks: int, reduce_dtype: torch.dtype, divide_factor: float | None
) -> GradientDivision:
    """`gradient_division` for a reduction of tensors on `device` over the `num_ranks` ranks of a group."""
    averages = group_averages(group_name, device)
    return gradient_division(num_ranks, reduce_dtype, divide_factor, averages=averages)


def gradient_division(
    num_ranks: int, reduce_dtype: torch.dtype, divide_factor: float | None, *, averages: bool
) -> GradientDivision:
    """Division by `divide_factor`, by default by the number of ranks.

    fp16 overflows at 65504: the sum of gradients that fit need not fit. Half of the division (in powers of two, which
    are exact) comes before the reduction; all of it would lose small gradients to underflow.

    `averages`: whether the reduction itself can divide by the number of ranks.
    """
    divisor = num_ranks if divide_factor is None else divide_factor
    if reduce_dtype == torch.float16:
        before = 2.0 ** math.ceil(math.log2(num_ranks) / 2)
        return GradientDivision("sum", 1 / before, before / divisor)
    if averages and divide_factor is None:
        return GradientDivision("avg", 1.0, 1.0)
    return GradientDivision("sum", 1.0, 1.0 / divisor)


def group_averages(group_name: str, device: torch.device) -> bool:
    """Whether the group's backend for tensors on `device` can average while it reduces; a group may have one for each
    type of device ("cpu:gloo,cuda:nccl"). gloo cannot: the sum is scaled afterwards.

    A process group written in Python says so itself, with an attribute `averages`.
    """
    group = group_of(group_name.removesuffix(REDUCE_GROUP_SUFFIX))
    if getattr(group, "averages", False):
        return True
    return backend_averages(dist.get_backend_config(group), device)


def backend_averages(config: str, device: torch.device) -> bool:
    """`group_averages` for `torch.distributed.get_backend_config` of a group: "cpu:gloo,cuda:nccl", for instance."""
    return f"{device.type}:nccl" in config.split(",")
