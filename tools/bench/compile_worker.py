"""One process of `tools/bench_compile`: compile a model once and print what it took, as one line of JSON.

`python -m bench.compile_worker SYSTEM KIND LAYERS DEVICE MEASURE`: SYSTEM is "plain" (torch.compile, unsharded) or
"ours"; MEASURE is "time", or "parts": with timers around our passes and the runtime wrapper.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from bench.emulated import LinkModel, init_emulated_group
from bench.instrument import PassTimers, WrapperTimer, autograd_nodes
from bench.models import SHAPES
from fsdp_passes import fully_shard, overlap_fsdp

_STEPS = 20
_WORLD_SIZE = 8


def main() -> None:
    system, kind, layers, device_type, measure = sys.argv[1:]
    device = torch.device(device_type)
    shape = dataclasses.replace(SHAPES["tiny" if kind == "mlp" else "tiny_llama"], layers=int(layers))
    timers, wrapper = PassTimers(), WrapperTimer()
    if measure == "parts":
        timers.install()
        wrapper.install()
    # Communication that takes no time; the graphs are those of real ranks.
    init_emulated_group(LinkModel(_WORLD_SIZE, bandwidth_bytes_per_us=1e12, latency_us=0.0), device_type)
    model, batch = shape.make(device), shape.batch_of(0, device)
    if system == "ours":
        fully_shard(model, mesh=init_device_mesh(device_type, (_WORLD_SIZE,)), units=["layers.*"])
        call = torch.compile(model, backend=overlap_fsdp)
    else:
        call = torch.compile(model)
    begin_s = time.perf_counter()
    warm_up_compiler(device)
    start_up_s = time.perf_counter() - begin_s
    counters.clear()

    begin_s = time.perf_counter()
    loss = call(*batch)
    loss.backward()
    synchronize(device)
    compile_s = time.perf_counter() - begin_s
    result: dict[str, Any] = {
        "compile_s": compile_s,
        "start_up_s": start_up_s,
        "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "cache_misses": counters["inductor"]["fxgraph_cache_miss"],
        "cache_bypasses": counters["inductor"]["fxgraph_cache_bypass"],
        "aot_cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
    }
    if measure == "parts":
        result |= {"passes_s": timers.total_s, "pass_s": dict(timers.seconds)}
        forward_ms, backward_ms = [], []
        for _ in range(_STEPS):
            model.zero_grad(set_to_none=True)
            wrapper.clear()
            loss = call(*batch)
            nodes = autograd_nodes(loss)
            loss.backward()
            forward_ms.append(wrapper.forward_s * 1e3)
            backward_ms.append(wrapper.backward_s * 1e3)
        synchronize(device)
        result |= {
            "wrapper_forward_ms": statistics.median(forward_ms),
            "wrapper_backward_ms": statistics.median(backward_ms),
            "autograd_nodes": dict(nodes),
        }
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def warm_up_compiler(device: torch.device) -> None:
    """Import the compiler and let it look at the machine, which happens once whatever is compiled."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    torch.compile(lambda t: (t @ t).sin().sum())(x).backward()
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
