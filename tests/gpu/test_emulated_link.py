"""The emulated link on a real GPU: values, and the modelled time within 5 %."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench.calibrate import TOLERANCE, time_us
from bench.emulated import EmulatedGroup, LinkModel
from fsdp_passes._torch_compat import all_gather_coalesced, reduce_scatter_coalesced
from tests.gpu.conftest import EMULATED_RANKS as WORLD

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_collectives_have_the_values_of_equal_ranks(group: EmulatedGroup, dtype: torch.dtype) -> None:
    sizes = [(512, 1024), (8, 7), (1,)]  # wide, not aligned, a single element
    parts = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    wholes = [part.new_zeros((WORLD * part.shape[0], *part.shape[1:])) for part in parts]
    all_gather_coalesced(wholes, parts, group).wait()
    for part, whole in zip(parts, wholes, strict=True):
        assert torch.equal(whole, torch.cat([part] * WORLD))
    grads = [torch.randn_like(whole) for whole in wholes]
    for average in (True, False):
        reduce_scatter_coalesced(parts, grads, group, average=average).wait()
        for part, grad in zip(parts, grads, strict=True):
            assert torch.equal(part, grad.chunk(WORLD)[0] * (1 if average else WORLD))
    assert group.num_launches == 3


def test_a_collective_lasts_as_long_as_the_model_says(group: EmulatedGroup) -> None:
    link = group.link
    link.overhead_us = max(0.0, time_us(lambda: link.launch(0, [], 1.0, 200.0), link) - 200.0)
    part = torch.randn(8 << 20, device="cuda", dtype=torch.bfloat16)
    whole = part.new_empty(WORLD * part.numel())
    model_us = group.model.gather_us(whole.nbytes)
    measured_us = time_us(lambda: link.launch(0, [(part, whole, part.numel())], 1.0, model_us), link)
    assert measured_us == pytest.approx(model_us, rel=TOLERANCE)


def test_the_caller_s_stream_waits_and_the_host_does_not(group: EmulatedGroup) -> None:
    value = torch.ones(8, device="cuda")
    group.model = LinkModel.from_gb_per_s(WORLD, 100.0, latency_us=50_000.0)
    dist.all_reduce(value)  # compiles the kernel
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work = dist.all_reduce(value, async_op=True)
    assert not work.is_completed()
    work.wait()
    end.record()
    assert not end.query()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 45
    assert value[0].item() == WORLD**2
