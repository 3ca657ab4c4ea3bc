"""`CPUOffloadPolicy` on real NCCL ranks: FSDP2's numbers, CPU shards, copies beside the compute, less device memory."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.division import group_averages
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.steps import assert_same_steps, record_steps
from tests.training import my_share

pytestmark = pytest.mark.gpu

HERE = "tests.gpu.test_cpu_offload"
WAYS = ["fallback", "inductor", "layers"]


def mesh_with_gloo() -> DeviceMesh:
    """Over a group with gloo for CPU tensors beside NCCL: clipping and `full_tensor()` of shards on the CPU need it."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    # Meshes of the same ranks are equal whatever their groups are, and DTensor's cache of operators then answers with
    # an earlier test's, which has NCCL alone. The name sets them apart.
    return DeviceMesh.from_group(group, "cuda", mesh_dim_names=("with_gloo",))


def _call(model: Transformer, way: str) -> Any:
    if way == "layers":
        for layer in model.layers:
            layer.compile(backend=overlap_fsdp)
    return torch.compile(model, backend=overlap_fsdp) if way == "inductor" else model


def _batches(steps: int, batch: int, length: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(t.cuda() for t in pair) for pair in token_batches(steps, batch, length)]


def trains(way: str, pinned: bool, clip: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    # NCCL alone is enough without clipping: neither the copies nor the optimizer communicate on the CPU.
    mesh, policy = mesh_with_gloo() if clip else None, CPUOffloadPolicy(pin_memory=pinned)
    torch.manual_seed(0)
    model = Transformer(dim=64, hidden=255, layers=4)
    twin, reference = copy.deepcopy(model), copy.deepcopy(model).cuda()
    fully_shard(model, mesh=mesh, units=["layers.*"], offload_policy=policy)
    call, batches, norm = _call(model, way), _batches(6, 8, 32), 1.0 if clip else None

    def assert_grads_at_home() -> None:
        for name, param in model.named_parameters():
            local = param.grad.to_local()
            place = (local.device.type, local.is_pinned())
            assert place == ("cpu", pinned or local.numel() == 0), f"gradient of {name}: (device, is pinned) is {place}"

    found = record_steps(model, batches, sharded=True, call=call, clip=norm, after_backward=assert_grads_at_home)
    for name, param in model.named_parameters():
        place = (param.to_local().device.type, param.to_local().is_pinned())
        assert place == ("cpu", pinned), f"{name}: (device, is pinned) is {place}"
    # The unsharded model first: where both of the others differ from it, they are not what is wrong.
    exact = record_steps(reference, batches, sharded=False, clip=norm)
    assert_same_steps(found, exact, f"{way} against the unsharded model")
    if clip:
        assert mesh is not None
        name = mesh.get_group().group_name
        assert (group_averages(name, torch.device("cuda")), group_averages(name, torch.device("cpu"))) == (True, False)
        for module in (*twin.layers, twin):
            fsdp2.fully_shard(module, mesh=mesh, offload_policy=policy)
        theirs = record_steps(twin, batches, sharded=True, clip=norm)
        assert_same_steps(theirs, exact, "FSDP2 against the unsharded model")
        assert_same_steps(found, theirs, f"{way} against FSDP2")


@pytest.mark.parametrize("way", WAYS)
def test_steps_equal_the_unsharded_model_with_nccl_alone(two_nccl_ranks: RankPool, way: str) -> None:
    two_nccl_ranks.run(f"{HERE}:trains", way=way, pinned=True, clip=False)


def test_pageable_memory_gives_the_same(two_nccl_ranks: RankPool) -> None:
    two_nccl_ranks.run(f"{HERE}:trains", way="inductor", pinned=False, clip=False)


@pytest.mark.parametrize("way", WAYS)
def test_clipped_steps_equal_fsdp2(two_nccl_ranks: RankPool, way: str) -> None:
    two_nccl_ranks.run(f"{HERE}:trains", way=way, pinned=True, clip=True)


def copies(way: str) -> tuple[int, int, int, float]:
    """Copies of more than 5 us in a step: to the device, to the CPU, those of them on a stream that also runs matrix
    products, and the share of their time during which a product runs (printed, not asserted: ranks may share a GPU)."""
    torch.manual_seed(0)
    model = fully_shard(Transformer(dim=1024, layers=4), units=["layers.*"], offload_policy=CPUOffloadPolicy())
    call = _call(model, way)
    (batch,) = _batches(1, 16, 512)
    for _ in range(3):
        call(*my_share(batch)).backward()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call(*my_share(batch)).backward()
        torch.cuda.synchronize()
    device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    products = [
        e for e in device if any(part in e.name.lower() for part in ("gemm", "cutlass", "nvjet", "ampere", "sm90"))
    ]
    assert products, {e.name for e in device}
    compute = {e.device_resource_id for e in products}
    moved = {kind: [e for e in device if kind in e.name] for kind in ("HtoD", "DtoH")}
    large = {kind: [e for e in events if e.time_range.elapsed_us() > 5] for kind, events in moved.items()}
    both = [*large["HtoD"], *large["DtoH"]]
    hidden = sum(
        max(0.0, min(a.time_range.end, b.time_range.end) - max(a.time_range.start, b.time_range.start))
        for a, b in itertools.product(both, products)
    )
    wrong = [e for e in both if e.device_resource_id in compute]
    share = hidden / max(1.0, sum(e.time_range.elapsed_us() for e in both))
    return len(large["HtoD"]), len(large["DtoH"]), len(wrong), share


@pytest.mark.parametrize("way", WAYS)
def test_copies_run_beside_the_compute(two_nccl_ranks: RankPool, way: str) -> None:
    for to_device, to_cpu, on_compute, share in two_nccl_ranks.run(f"{HERE}:copies", way=way):
        print(
            f"{way}: {to_device} copies to the device, {to_cpu} to the CPU, {share:.2f} of their time beside products"
        )
        # Of a layer, four matrices: in both directions of the model, and home once.
        assert to_device >= 2 * 4 * 4
        assert to_cpu >= 4 * 4
        assert on_compute == 0


def peak_bytes(way: str, offloaded: bool) -> int:
    """Of two steps behind the first, less what earlier tests of this process left."""
    torch._dynamo.reset()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    policy = CPUOffloadPolicy() if offloaded else None
    model = Transformer(dim=1024, layers=8)
    fully_shard(model, units=["layers.*"], offload_policy=policy)
    call, optimizer = _call(model, way), torch.optim.AdamW(model.parameters())
    torch.cuda.empty_cache()
    for index, batch in enumerate(_batches(3, 4, 64)):
        if index == 1:
            torch.cuda.reset_peak_memory_stats()
        call(*my_share(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("way", ["fallback", "inductor"])
def test_offload_needs_less_device_memory(two_nccl_ranks: RankPool, way: str) -> None:
    on_device = two_nccl_ranks.run(f"{HERE}:peak_bytes", way=way, offloaded=False)
    offloaded = two_nccl_ranks.run(f"{HERE}:peak_bytes", way=way, offloaded=True)
    # A shard, its gradient and two moments: half of 8 x 12 x 1024² numbers of 4 bytes; at least three of them.
    saved = 3 * 8 * 12 * 1024**2 * 4 // 2
    for before, after in zip(on_device, offloaded, strict=True):
        print(f"{way}: peak {before / 2**20:.0f} MiB on the device, {after / 2**20:.0f} MiB offloaded")
        assert before - after > saved
