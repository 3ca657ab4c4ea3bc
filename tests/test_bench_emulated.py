"""The emulated process group: values, grouping, works and times, on the CPU."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.emulated import EmulatedGroup, LinkModel, init_emulated_group
from fsdp_passes._torch_compat import all_gather_coalesced, reduce_scatter_coalesced
from tests.models import Transformer, sharded_call, token_batches

ROOT = Path(__file__).parent.parent
WORLD = 4


@pytest.fixture
def group() -> Iterator[EmulatedGroup]:
    yield init_emulated_group(LinkModel(WORLD, bandwidth_bytes_per_us=1e9, latency_us=0.0), "cpu")
    dist.destroy_process_group()


@pytest.fixture
def slow_group() -> Iterator[EmulatedGroup]:
    """50 ms for each collective, whatever its size."""
    yield init_emulated_group(LinkModel(WORLD, bandwidth_bytes_per_us=1e9, latency_us=50_000.0), "cpu")
    dist.destroy_process_group()


def test_the_link_takes_latency_and_bytes_over_bus_bandwidth() -> None:
    link = LinkModel.from_gb_per_s(8, 100.0, latency_us=10.0)
    # 800 MB in all, of which 7/8 pass each link of a ring at 100 kB per microsecond.
    assert link.gather_us(800_000_000) == pytest.approx(10 + 7000)
    assert link.all_reduce_us(800_000_000) == pytest.approx(10 + 14000)
    assert LinkModel.from_gb_per_s(1, 100.0, 10.0).gather_us(10**9) == 10.0
    with pytest.raises(ValueError, match=r"Expected world_size >= 1, bandwidth > 0"):
        LinkModel.from_gb_per_s(8, 0.0, 10.0)


def test_eager_collectives_have_the_values_of_equal_ranks(group: EmulatedGroup) -> None:
    part, whole = torch.randn(3, 2), torch.empty(12, 2)
    all_gather_coalesced([whole], [part], group).wait()
    assert torch.equal(whole, part.repeat(WORLD, 1))
    grad, mean, total = torch.randn(12, 2), torch.empty(3, 2), torch.empty(3, 2)
    reduce_scatter_coalesced([mean], [grad], group, average=True).wait()
    reduce_scatter_coalesced([total], [grad], group, average=False).wait()
    assert torch.equal(mean, grad[:3])
    assert torch.equal(total, grad[:3] * WORLD)
    value = torch.tensor([1.5])
    dist.all_reduce(value)
    assert value.item() == 6.0
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    dist.broadcast(value, 0)
    dist.barrier()
    assert value.item() == 6.0


def test_functional_collectives_have_the_same_values(group: EmulatedGroup) -> None:
    ops, name = torch.ops._c10d_functional, group.group_name
    part, grad = torch.randn(2, 3), torch.randn(8, 3)
    whole = ops.wait_tensor(ops.all_gather_into_tensor(part, WORLD, name))
    assert torch.equal(whole, part.repeat(WORLD, 1))
    mean = ops.wait_tensor(ops.reduce_scatter_tensor(grad, "avg", WORLD, name))
    assert torch.equal(mean, grad[:2])


def test_a_grouped_collective_is_one_launch_and_pays_latency_once(slow_group: EmulatedGroup) -> None:
    parts = [torch.randn(2), torch.randn(5), torch.randn(3, 3)]
    begin = time.monotonic()
    results = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(parts, WORLD, slow_group.group_name)
    started_s = time.monotonic() - begin
    wholes = [torch.ops._c10d_functional.wait_tensor(result) for result in results]
    waited_s = time.monotonic() - begin
    assert slow_group.num_launches == 1
    assert started_s < 0.045 < waited_s
    for part, whole in zip(parts, wholes, strict=True):
        assert torch.equal(whole, torch.cat([part] * WORLD))


def test_collectives_share_one_link_and_wait_one_after_another(slow_group: EmulatedGroup) -> None:
    begin = time.monotonic()
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    assert time.monotonic() - begin >= 3 * 0.045


def test_wrong_buffers_are_refused(group: EmulatedGroup) -> None:
    with pytest.raises(ValueError, match=r"to hold 4 times the part's elements"):
        group.all_gather_single(torch.empty(7), torch.empty(2))
    with pytest.raises(ValueError, match=r"Expected contiguous buffers"):
        group.all_gather_single(torch.empty(4, 2).t(), torch.empty(2))


def test_a_premultiplied_sum_is_refused(group: EmulatedGroup) -> None:
    with pytest.raises(NotImplementedError, match="Expected a reduction by SUM, AVG, MAX or MIN"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)


def _repeat_own_rows(model: nn.Module) -> None:
    """What every sharded copy of the model computes with: rank 0's rows for all ranks."""
    with torch.no_grad():
        for param in model.parameters():
            rows = param.shape[0] // WORLD
            param.copy_(param[:rows].repeat(WORLD, *[1] * (param.dim() - 1)))


@pytest.mark.parametrize("system", ["fsdp2", "eager", "compiled"])
def test_each_system_equals_the_whole_model(group: EmulatedGroup, system: str) -> None:
    torch.manual_seed(0)
    model = Transformer(layers=2)
    reference = copy.deepcopy(model)
    _repeat_own_rows(reference)
    ((tokens, targets),) = token_batches(1, 4, 8)
    expected = reference(tokens, targets)
    expected.backward()
    call = sharded_call(model, system, inner="aot_eager")
    loss = call(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    grads = {name: param.grad for name, param in reference.named_parameters()}
    for name, param in model.named_parameters():
        assert grads[name] is not None
        mine = grads[name][: param.shape[0] // WORLD]
        torch.testing.assert_close(param.grad.to_local(), mine, atol=1e-6, rtol=1e-4)


def test_the_kernel_has_the_same_values_in_triton_s_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    command = [sys.executable, "-m", "tests.emulated_kernel_values"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout == "equal\n", done.stderr
