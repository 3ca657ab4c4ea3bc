"""Real NCCL ranks, Inductor with Triton: the same numbers as FSDP2 and as the unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.pipeline import record_compilations
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, train

pytestmark = pytest.mark.gpu


def _batches(steps: int, batch: int, length: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(t.cuda() for t in pair) for pair in token_batches(steps, batch, length)]


def _models(**sizes: int) -> tuple[Transformer, Transformer, Transformer]:
    torch.manual_seed(0)
    model = Transformer(**sizes).cuda()
    return model, copy.deepcopy(model), copy.deepcopy(model)


def fp32_equals_reference_and_fsdp2(bucket_mode: str, unify: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, twin, reference = _models(dim=64, hidden=255, layers=4)
    fully_shard(model, units=["layers.*"])
    options = {"bucket_mode": bucket_mode, "unify_communication_stream": unify}
    compiled = torch.compile(model, backend=overlap_fsdp, options=options)
    batches = _batches(10, 8, 32)
    found = train(model, batches, sharded=True, call=compiled)
    assert_same(found, train(reference, batches, sharded=False))
    for layer in twin.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(twin)
    assert_same(found, train(twin, batches, sharded=True))


def eager_equals_reference_and_fsdp2() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, twin, reference = _models(dim=256, hidden=1023, layers=4)
    fully_shard(model, units=["layers.*"])
    batches = _batches(10, 8, 128)
    found = train(model, batches, sharded=True)
    assert_same(found, train(reference, batches, sharded=False), check_params=False)
    for layer in twin.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(twin)
    assert_same(found, train(twin, batches, sharded=True))


def layers_compiled_alone_equal_the_eager_ones() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, twin, _ = _models(dim=256, layers=4)
    for each in (model, twin):
        fully_shard(each, units=["layers.*"])
    for layer in model.layers:
        layer.compile(backend=overlap_fsdp)
    batches = _batches(5, 8, 128)
    found = train(model, batches, sharded=True)
    assert_same(found, train(twin, batches, sharded=True), check_params=False)


def bf16_equals_fsdp2() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, twin, reference = _models(dim=256, layers=4, vocab=64)
    fully_shard(model, units=["layers.*"], mp_policy=policy)
    batches = _batches(10, 8, 128)
    found = train(model, batches, sharded=True, call=torch.compile(model, backend=overlap_fsdp))
    for layer in twin.layers:
        fsdp2.fully_shard(layer, mp_policy=policy)
        layer.compile()
    fsdp2.fully_shard(twin, mp_policy=policy)
    expected = train(twin, batches, sharded=True)
    exact = train(reference, batches, sharded=False)
    # bf16 has 8 significant bits; the loss is a mean over 1024 tokens in fp32.
    torch.testing.assert_close(found.losses, expected.losses, rtol=2e-3, atol=0)
    torch.testing.assert_close(found.losses, exact.losses, rtol=5e-3, atol=0)
    assert {grad.dtype for grad in found.grads.values()} == {torch.float32}


def regions_are_in_the_profile_and_cost_no_kernel() -> None:
    counts = {}
    for nvtx in (True, False):
        torch._dynamo.reset()
        model, _, _ = _models(dim=64, layers=3)
        fully_shard(model, units=["layers.*"])
        options = {"nvtx": nvtx, "inductor": {"force_disable_caches": True}}
        compiled = torch.compile(model, backend=overlap_fsdp, options=options)
        (batch,) = _batches(1, 8, 32)
        with record_compilations() as records:
            compiled(*batch).backward()
        assert [graph.phase for graph in records[0].graphs] == ["forward", "backward"]
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            compiled(*batch).backward()
            torch.cuda.synchronize()
        names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
        kernels = [
            event.name
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("FSDP:", "nccl:"))
        ]
        counts[nvtx] = len(kernels)
        for unit in ("root", "layers.0", "layers.1", "layers.2"):
            for phase in ("forward_compute", "backward_compute"):
                assert (f"FSDP:{unit}:{phase}" in names) is nvtx, (unit, phase, nvtx)
    assert counts[True] == counts[False], counts


def streams_of_kernels(eager: bool) -> tuple[set[int], set[int], float]:
    """Streams of the collectives, streams of everything else, and the share of the all-gathers' time during which
    another kernel of this rank runs. The share is printed and not asserted: ranks that share a GPU take turns."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _, _ = _models(dim=1024, layers=4)
    fully_shard(model, units=["layers.*"], mp_policy=policy)
    call = model if eager else torch.compile(model, backend=overlap_fsdp)
    (batch,) = _batches(1, 16, 512)
    for _ in range(3):
        call(*batch).backward()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call(*batch).backward()
        torch.cuda.synchronize()
    cuda = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("FSDP:", "nccl:", "Memset", "Memcpy"))
    ]
    collectives = [event for event in cuda if event.name.startswith("nccl")]
    others = [event for event in cuda if not event.name.startswith("nccl")]
    gathers = [e.time_range for e in collectives if "AllGather" in e.name]
    assert gathers, "no all-gather kernel in the profile"
    hidden = sum(
        max(0.0, min(span.end, e.time_range.end) - max(span.start, e.time_range.start))
        for span in gathers
        for e in others
    )
    share = hidden / sum(span.end - span.start for span in gathers)
    return {e.device_resource_id for e in collectives}, {e.device_resource_id for e in others}, share


@pytest.mark.parametrize(("bucket_mode", "unify"), [("coalesced", True), ("packed", True), ("coalesced", False)])
def test_fp32_equals_the_reference_and_fsdp2(two_nccl_ranks: RankPool, bucket_mode: str, unify: bool) -> None:
    two_nccl_ranks.run(
        "tests.gpu.test_two_nccl_ranks:fp32_equals_reference_and_fsdp2", bucket_mode=bucket_mode, unify=unify
    )


def test_eager_equals_the_reference_and_fsdp2(two_nccl_ranks: RankPool) -> None:
    two_nccl_ranks.run("tests.gpu.test_two_nccl_ranks:eager_equals_reference_and_fsdp2")


def test_layers_compiled_alone_equal_the_eager_ones(two_nccl_ranks: RankPool) -> None:
    two_nccl_ranks.run("tests.gpu.test_two_nccl_ranks:layers_compiled_alone_equal_the_eager_ones")


def test_bf16_equals_fsdp2(two_nccl_ranks: RankPool) -> None:
    two_nccl_ranks.run("tests.gpu.test_two_nccl_ranks:bf16_equals_fsdp2")


def test_regions_are_in_the_profile_and_cost_no_kernel(two_nccl_ranks: RankPool) -> None:
    two_nccl_ranks.run("tests.gpu.test_two_nccl_ranks:regions_are_in_the_profile_and_cost_no_kernel")


@pytest.mark.parametrize("eager", [False, True])
def test_collectives_run_on_one_stream_beside_the_compute(two_nccl_ranks: RankPool, eager: bool) -> None:
    for collectives, others, share in two_nccl_ranks.run(
        "tests.gpu.test_two_nccl_ranks:streams_of_kernels", eager=eager
    ):
        print(f"share of all-gather time hidden behind compute: {share:.2f}")
        assert len(collectives) == 1
        # Shards are cast on a stream of the context, ahead of NCCL's own.
        assert len(others) == 2
        assert not collectives & others
