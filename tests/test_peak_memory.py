"""Peak memory of a backward beside FSDP2's, on the CPU: bytes of all storages that are alive behind any operator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.emulated import EmulatedGroup, LinkModel, init_emulated_group
from tests.models import Transformer, sharded_call, token_batches

WORLD = 4


@pytest.fixture
def group() -> Iterator[EmulatedGroup]:
    yield init_emulated_group(LinkModel(WORLD, bandwidth_bytes_per_us=1e9, latency_us=0.0), "cpu")
    dist.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """What the CPU's allocator has no statistics for: the bytes of every storage that an operator read or made."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.has_seen_graph = False  # the fallback uses c10d's own collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.has_seen_graph |= func.namespace == "fsdp_passes" and "all_gather" in str(func)
        for tensor in tree_leaves((args, kwargs, result)):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                ref = StorageWeakRef(tensor.untyped_storage())
                self.alive.setdefault(ref.cdata, ref)
        num_bytes = 0
        for address, ref in list(self.alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self.alive[address]
            else:
                num_bytes += storage.nbytes()  # resized to 0 where a gathered weight was released
        self.peak = max(self.peak, num_bytes)
        return result


def peak_bytes(model: Transformer, system: str) -> int:
    """Of the second step's backward, in which the peak of a step is; compiled code exists by then."""
    call = sharded_call(model, system, inner="aot_eager")
    first, second = token_batches(2, 2, 4)
    call(*first).backward()
    model.zero_grad()
    loss = call(*second)
    # Around the forward, the mode would keep Dynamo from running what is compiled.
    with LiveBytes() as live:
        loss.backward()
    assert live.has_seen_graph == (system == "compiled")
    return live.peak


def test_a_compiled_step_takes_no_more_memory_than_fsdp2_and_the_fallback_a_layer_more(group: EmulatedGroup) -> None:
    torch.manual_seed(0)
    model = Transformer(dim=128, layers=6)  # few tokens: weights are what takes memory
    layer_bytes = sum(param.numel() * 4 for param in model.layers[0].parameters())
    peaks = {system: peak_bytes(copy.deepcopy(model), system) for system in ("fsdp2", "fallback", "compiled")}
    assert peaks["fsdp2"] > 2 * layer_bytes, "its gathered layers are seen"
    assert peaks["compiled"] <= peaks["fsdp2"], peaks
    # Half a layer more was found, in front of a reduction.
    assert peaks["fallback"] <= peaks["fsdp2"] + layer_bytes, peaks
