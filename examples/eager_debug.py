"""Find a use before its wait: `python examples/eager_debug.py`.

A training step gathers the next layer's weights by hand and looks at them too early, as hand-written overlap easily
does. Without the debugging mode the line reads this rank's shard and the number that it prints is silently wrong. With
`FSDP_PASSES_DEBUG=1` the line is named. Runs on one rank of the CPU.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from fsdp_passes import fully_shard
from fsdp_passes.errors import UseBeforeWaitError


def norm_of_the_next_layer(layer: nn.Module) -> float:
    """The planted mistake: the weight is read between the gather's start and its wait."""
    handle = layer.unshard(async_op=True)
    norm = layer.weight.norm().item()  # the mistake
    handle.wait()
    return norm


def main() -> int:
    """Run the step in debugging mode; 0 when the mistake was found."""
    os.environ.setdefault("FSDP_PASSES_DEBUG", "1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        fully_shard(model, units=["*"])
        model(torch.randn(4, 16)).sum().backward()
        norm_of_the_next_layer(model[1])
    except UseBeforeWaitError as error:
        print(f"found: {error}")
        return 0
    finally:
        dist.destroy_process_group()
    print("the mistake was not found; is FSDP_PASSES_DEBUG set to 0?")
    return 1


if __name__ == "__main__":
    sys.exit(main())
