"""Reduced gradients on their way into `.grad` of the sharded parameters, outside of graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from fsdp_passes._torch_compat import gradient_hooks, local_tensor, make_dtensor
from fsdp_passes.division import GradientDivision
from fsdp_passes.parameter import FsdpParameter


class WriteGradients(Protocol):
    """Takes reduced gradients of `rows_per_rank` rows and what is left of their division (see `write_gradients`)."""

    def __call__(
        self, params: Sequence[FsdpParameter], reduced: Sequence[torch.Tensor], division: GradientDivision, /
    ) -> None: ...


def keep_until_read(tensors: Sequence[torch.Tensor]) -> None:
    """The current stream is about to read tensors of another one, which could give their memory to its next collective
    as soon as they are dropped. Does nothing on the CPU."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def write_gradients(
    params: Sequence[FsdpParameter], reduced: Sequence[torch.Tensor], division: GradientDivision
) -> None:
    """Scale reduced gradients, of `rows_per_rank` rows, in place and add them to the sharded parameters' `.grad`.

    Those of offloaded parameters, all of one unit, are sent to the CPU and added when the backward has ended.
    """
    with torch.no_grad():
        grads = []
        for param, output in zip(params, reduced, strict=True):
            if division.after != 1.0:
                output.mul_(division.after)
            grads.append(output[: param.local_rows].to(param.orig_dtype))
        home = params[0].home
        if home is not None:
            write_at_home(params, params[0].unit.context.offloading.send(grads, pinned=home.pinned))
            return
        for param, grad in zip(params, grads, strict=True):
            accumulate_gradient(param.sharded_param, grad)


def write_at_home(params: Sequence[FsdpParameter], grads: Sequence[torch.Tensor]) -> None:
    """Add gradients of offloaded parameters of one root, this rank's rows, to `.grad` when the backward has ended and
    they have come to the CPU."""

    offloading = params[0].unit.context.offloading
    for param, grad in zip(params, grads, strict=True):
        offloading.land_later(functools.partial(_write, param, grad))


def _write(param: FsdpParameter, grad: torch.Tensor) -> None:
    with torch.no_grad():
        accumulate_gradient(param.sharded_param, grad)


def accumulate_gradient(param: torch.Tensor, local: torch.Tensor) -> None:
    """Add a reduced gradient to `.grad` of a DTensor, with the hooks that autograd would call."""
    before, after = gradient_hooks(param)
    grad: torch.Tensor = make_dtensor(local, param)
    for hook in before:
        changed = hook(grad)
        grad = grad if changed is None else changed
    if param.grad is None:
        param.grad = grad
    else:
        local_tensor(param.grad).add_(local_tensor(grad))
    for hook in after:
        with torch.enable_grad():  # as autograd calls it
            hook(param)
