"""Peak memory of a step beside FSDP2's, as CUDA's allocator counts it, over the emulated group."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from bench.emulated import EmulatedGroup
from tests.models import Transformer, sharded_call, token_batches

pytestmark = pytest.mark.gpu


def peak_bytes(model: Transformer, system: str) -> tuple[int, int]:
    """Allocated and reserved, of the third step."""
    model = model.cuda()
    call = sharded_call(model, system)
    batches = [tuple(tensor.cuda() for tensor in pair) for pair in token_batches(3, 8, 64)]
    for index, batch in enumerate(batches):
        if index == 2:  # compiled, and the streams exist
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what whole weights and compiling have left reserved
            torch.cuda.reset_peak_memory_stats()
        call(*batch).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def test_a_compiled_step_takes_no_more_memory_than_fsdp2_and_the_fallback_a_layer_more(group: EmulatedGroup) -> None:
    torch.manual_seed(0)
    model = Transformer(dim=1024, layers=6)
    layer_bytes = sum(param.numel() * 4 for param in model.layers[0].parameters())
    peaks = {}
    for system in ("fsdp2", "fallback", "compiled"):
        peaks[system] = peak_bytes(copy.deepcopy(model), system)
        torch._dynamo.reset()  # compiled code holds its model
        gc.collect()
        torch.cuda.empty_cache()
    for ours, fallback, theirs in zip(peaks["compiled"], peaks["fallback"], peaks["fsdp2"], strict=True):
        assert ours <= theirs, peaks
        assert fallback <= theirs + layer_bytes, peaks  # as on the CPU: see tests/test_peak_memory.py
