"""What eager code gets of a parameter that it reads outside of the parameter's unit: ahead of the unit's forward,
around it, or in between graphs."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_passes._torch_compat import is_in_backward, outside_transforms
from fsdp_passes.context import FsdpContext
from fsdp_passes.eager_backward import watch_gradient
from fsdp_passes.errors import MutatedParameterError
from fsdp_passes.gathering import finish_gather, release, start_ahead, start_gather
from fsdp_passes.parameter import FsdpParameter


def copy_for_reader(param: FsdpParameter) -> torch.Tensor:
    """What eager code gets of a parameter that is not its unit's own code: between two graphs, or outside of the module
    (`head.weight` in a chunked loss, a weight that is read ahead of its layer).

    The unit's memory comes and goes with its own forward and backward, and who reads it around these, for how long, is
    not known. A copy belongs to the reader, and to autograd as long as a backward needs it. All parameters of the unit
    are copied behind one gather, and the copies serve all reads of a forward.
    """
    unit = param.unit
    context = unit.context
    if _copied_as(param) not in context.copies:
        was_whole = unit.is_unsharded
        if not is_in_backward():
            for each in unit.params:
                each.sync_requires_grad()
        start_gather(unit)
        if not is_in_backward():
            start_ahead(unit, None, [], is_backward=False)
        finish_gather(unit)
        with outside_transforms():
            for each in unit.params:
                watch_gradient(each)
                context.copies[_copied_as(each)] = each.face().clone()
        if not was_whole:
            release(unit)
        context.offloading.await_reads()  # nobody sees when this forward ends
    return context.copies[_copied_as(param)]


def _copied_as(param: FsdpParameter) -> tuple[FsdpParameter, Any]:
    """What a copy serves: reads in the same modes of autograd, until the shard is written. A forward that an exception
    has ended may have left copies."""
    return param, (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), param.values_version)


def drop_copies(context: FsdpContext) -> None:
    """The outermost forward has ended. Raises `MutatedParameterError` if its code wrote into a copy."""
    copies = list(context.copies.items())
    context.copies.clear()
    for (param, _), copy in copies:
        if not copy.is_inference() and copy._version:
            raise MutatedParameterError(param.qualified_name)


@torch.compiler.disable
def forget_copies(context: FsdpContext) -> None:
    """At the begin of compiled code, forget the copies of a forward that has ended, as `release_kept` does, and without
    gradients all of them: autograd keeps none, so that those of layer after layer would add up."""
    if not torch.is_grad_enabled() or not (context.is_in_any_forward() or is_in_backward()):
        context.copies.clear()
