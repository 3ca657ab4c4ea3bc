"""`send_home`: where a compiled backward sends reduced gradients of offloaded parameters to the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_passes.offload import CPU
from fsdp_passes.ops import library
from fsdp_passes.regions import label_owner
from fsdp_passes.unit import FsdpUnit


def _send_home(grads: list[Tensor], label: Tensor | None, pinned: bool) -> list[Tensor]:
    # Copies: a compiler gives the memory of its own tensors to later kernels, and knows nothing of another stream that
    # still reads them. (And no operator may return its inputs.)
    own = [grad.clone() for grad in grads]
    unit = None if label is None else label_owner(label)
    if not isinstance(unit, FsdpUnit):
        return [grad.to(CPU) for grad in own]
    return unit.context.offloading.send(own, pinned=pinned)


# The results must not be read in the graph: their copies are on their way, and the host waits for them behind it.
library.define("send_home(Tensor[] grads, Tensor? label, bool pinned) -> Tensor[]")
library.impl("send_home", _send_home, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fsdp_passes::send_home",
    lambda grads, label, pinned: [torch.empty(grad.shape, dtype=grad.dtype, device=CPU) for grad in grads],
    lib=library,
)

SEND_HOME = torch.ops.fsdp_passes.send_home.default
