"""What eager code gets of a parameter that it reads outside of the parameter's unit: ahead of the unit's forward,
around it, or in between graphs."""

from __future__ import annotations

import torch

from fsdp_passes._torch_compat import is_in_backward, outside_transforms
from fsdp_passes.context import FsdpContext
from fsdp_passes.eager_backward import watch_gradient
from fsdp_passes.gathering import finish_gather, release, start_ahead, start_gather
from fsdp_passes.parameter import FsdpParameter


def copy_for_reader(param: FsdpParameter) -> torch.Tensor:
    """What eager code gets of a parameter that is not its unit's own code: between two graphs, or outside of the module
    (`head.weight` in a chunked loss, a weight that is read ahead of its layer).

    The unit's memory comes and goes with its own forward and backward, and who reads it around these, for how long, is
    not known. A copy belongs to the reader, and to autograd as long as a backward needs it. All parameters of the unit
    are copied behind one gather, and the copies serve the reads that follow (`KeptCopies` says how long).
    """
    unit = param.unit
    context = unit.context
    copy = context.copies.of(param)
    if copy is None:
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
            copies = {each: copy_of(each.face()) for each in unit.params}
        context.copies.keep(unit, copies)
        copy = copies[param]
        if not was_whole:
            release(unit)
        context.offloading.await_reads()  # nobody sees when this forward ends
    return copy


def copy_of(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a whole parameter through which the gradient flows, wherever it is made: who reads a parameter under
    `no_grad`, or in `inference_mode`, and computes with it outside of that, expects its gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        return weight.clone()


@torch.compiler.disable
def check_copies(context: FsdpContext) -> None:
    """At the begin of compiled code, forget the copies of a forward that has ended, as `release_kept` does.

    Raises `MutatedParameterError` if somebody has written into a copy: the graph computes with the shards.
    """
    if context.is_in_any_forward() or is_in_backward():
        context.copies.check_unwritten()
    else:
        context.copies.drop()
