"""Copies between the CPU and the device that are slow: whoever does not wait for them computes with other numbers.

Each copying stream is given work of a fifth of a second ahead of the copies. The host, which needs a few milliseconds
to queue a step of these small models, comes to its first read or write of shards and gradients long before the copies
do, unless it waits."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.unit import unit_of
from tests.gpu.test_cpu_offload import mesh_with_gloo
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.steps import assert_same_steps, own_rows, record_steps
from tests.training import my_share

pytestmark = pytest.mark.gpu

HERE = "tests.gpu.test_slow_copies"
WAYS = ["fallback", "inductor", "layers"]

_WARM_UP = 3  # steps without delay: code is compiled, and page-locked buffers are in the cache, whose making waits
_DELAY_S = 0.2


class Delay:
    """Work on one of a model's copying streams, which the copies that are queued next lie behind."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._end: torch.cuda.Event | None = None
        self._begin_s = 0.0

    def begin(self) -> None:
        # The clock of a GPU is between 1 and 2 GHz: the number of cycles is for the faster one.
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(_DELAY_S * 2e9))
            self._end = torch.cuda.Event()
            self._end.record(self._stream)
        self._begin_s = time.monotonic()

    def assert_awaited(self, what: str) -> None:
        """The host has come here behind the copies, of which none was made before the delay had ended."""
        assert self._end is not None
        waited_s = time.monotonic() - self._begin_s
        assert self._end.query(), f"{what} came back after {waited_s * 1e3:.0f} ms, ahead of the copies"


def _setup(way: str, clip: bool) -> tuple[Any, Any, Any, Delay, Delay]:
    """Two models, the compiled call of the first, and the delays of its copies to the device and to the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = Transformer(dim=64, hidden=255, layers=3)
    reference = copy.deepcopy(model).cuda()
    fully_shard(model, mesh=mesh_with_gloo() if clip else None, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    if way == "layers":
        for layer in model.layers:
            layer.compile(backend=overlap_fsdp)
    call = torch.compile(model, backend=overlap_fsdp) if way == "inductor" else model
    context, device = unit_of(model).context, torch.device("cuda", torch.cuda.current_device())
    to_device = context.communication_stream(device)
    assert to_device is not None
    return model, reference, call, Delay(to_device), Delay(context.offloading.stream_to_cpu(device))


def _batches(steps: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(t.cuda() for t in pair) for pair in token_batches(steps, 8, 32)]


def _behind_warm_up(function: Callable[[], None]) -> Callable[[], None]:
    """For what is called once in a step: calls `function` in the steps behind the first ones."""
    calls = itertools.count()
    return lambda: function() if next(calls) >= _WARM_UP else None


def slow_gradients(way: str, clip: bool) -> None:
    """The copies of a whole backward's gradients are made when its compute is long over. The first to read them is
    clipping, on the host, or a copy of them; then the optimizer."""
    model, reference, call, to_device, to_cpu = _setup(way, clip)
    batches, norm = _batches(_WARM_UP + 3), 1.0 if clip else None
    found = record_steps(
        model,
        batches,
        sharded=True,
        call=call,
        clip=norm,
        before_forward=_behind_warm_up(to_device.begin),
        before_backward=_behind_warm_up(to_cpu.begin),
        after_backward=_behind_warm_up(lambda: to_cpu.assert_awaited("the backward")),
    )
    assert_same_steps(found, record_steps(reference, batches, sharded=False, clip=norm), f"{way}, slow gradients")


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_whoever_reads_gradients_waits_for_their_copies(two_nccl_ranks: RankPool, way: str, clip: bool) -> None:
    two_nccl_ranks.run(f"{HERE}:slow_gradients", way=way, clip=clip)


def slow_gradients_in_hooks(way: str) -> None:
    """A hook reads the gradient on the host in the middle of a compiled backward, or at the end of an eager one."""
    model, reference, call, _, to_cpu = _setup(way, False)
    seen: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, n=name: seen.update({n: own_rows(p.grad)}))
    for index, batch in enumerate(_batches(_WARM_UP + 2)):
        model.zero_grad()
        reference.zero_grad()
        seen.clear()
        loss = call(*my_share(batch))
        if index >= _WARM_UP:
            to_cpu.begin()
        loss.backward()
        reference(*batch).backward()
        assert seen.keys() == dict(model.named_parameters()).keys(), seen.keys()
        for name, param in reference.named_parameters():
            torch.testing.assert_close(
                seen[name],
                own_rows(param.grad),
                rtol=0,
                atol=1e-5,
                msg=lambda m, n=name, i=index: f"step {i}, hook of {n}: {m}",
            )


@pytest.mark.parametrize("way", ["fallback", "inductor"])
def test_hooks_see_gradients_behind_their_copies(two_nccl_ranks: RankPool, way: str) -> None:
    two_nccl_ranks.run(f"{HERE}:slow_gradients_in_hooks", way=way)


def slow_shards(way: str) -> None:
    """The caller writes NaN over the shards as soon as a forward, or `unshard()`, has returned: what was gathered has
    the values from before."""
    model, reference, call, to_device, _ = _setup(way, False)
    shards = [param.to_local() for param in model.parameters()]
    kept = [shard.detach().clone() for shard in shards]

    def overwrite() -> None:
        with torch.no_grad():
            for shard in shards:
                shard.fill_(torch.nan)

    def restore() -> None:
        torch.cuda.synchronize()
        with torch.no_grad():
            for shard, values in zip(shards, kept, strict=True):
                shard.copy_(values)

    for index, batch in enumerate(_batches(_WARM_UP + 2)):
        with torch.no_grad():
            expected = reference(*batch)
            if index >= _WARM_UP:
                to_device.begin()
            found = call(*batch)
            if index >= _WARM_UP:
                to_device.assert_awaited("the forward")
        overwrite()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, i=index: f"forward {i}: {m}")
        restore()
    if way == "fallback":
        to_device.begin()
        model.layers[0].unshard()
        to_device.assert_awaited("unshard()")
        overwrite()
        expected = reference.layers[0].up.weight
        torch.testing.assert_close(model.layers[0].up.weight, expected, rtol=0, atol=0)
        model.layers[0].reshard()
        restore()


@pytest.mark.parametrize("way", WAYS)
def test_whoever_writes_shards_waits_for_their_copies(two_nccl_ranks: RankPool, way: str) -> None:
    two_nccl_ranks.run(f"{HERE}:slow_shards", way=way)
