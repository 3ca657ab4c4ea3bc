"""Collectives alone on real ranks: one packed buffer against a group of a layer's parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.communication import Collectives
from bench.measure import synchronize
from bench.report import number, table
from fsdp_passes._torch_compat import all_gather_coalesced, reduce_scatter_coalesced

if TYPE_CHECKING:
    from bench.worker import Worker

# Shares of a Llama layer's parameters: gate, up, down, q, o, k, v, and two norms, of which nearly nothing is left.
LLAMA_SHARES = (0.269, 0.269, 0.269, 0.077, 0.077, 0.019, 0.019, 0.00002, 0.00002)
_REPEATS = 10


def split_elements(num_elements: int, shares: tuple[float, ...] = LLAMA_SHARES) -> list[int]:
    """`num_elements` in parts near `shares`, each a multiple of 8 and at least 8; they sum to `num_elements`.

    Raises ValueError for fewer elements than the parts need.
    """
    parts = [max(8, int(num_elements * share) // 8 * 8) for share in shares]
    parts[0] += num_elements - sum(parts)
    if parts[0] < 8:
        raise ValueError(f"Expected at least {8 * len(shares)} elements in {len(shares)} parts, found {num_elements}.")
    return parts


def measure_bandwidths(worker: Worker) -> list[dict[str, Any]]:
    """Bus bandwidth in GB/s of bf16 all-gathers and reduce-scatters, packed and grouped, for each size.

    A size counts the whole buffer. Each figure is the mean of 10 in a row, of the slowest rank, the best of 3 series.
    """
    collectives = Collectives(worker.mesh)
    world_size, group, averages = collectives.world_size, collectives.group, collectives.averages
    results, rows = [], []
    for size_mb in worker.config.sizes_mb:
        num_elements = int(size_mb * 1e6) // 2 // (8 * world_size) * 8  # of one rank, bf16
        result: dict[str, Any] = {"size_mb": size_mb}
        for layout, parts in (("packed", [num_elements]), ("grouped", split_elements(num_elements))):
            shards = [torch.randn(part, device=worker.device, dtype=torch.bfloat16) for part in parts]
            wholes = [torch.randn(part * world_size, device=worker.device, dtype=torch.bfloat16) for part in parts]
            moved_bytes = sum(whole.nbytes for whole in wholes) * (world_size - 1) / world_size

            def gather(shards: list[Tensor] = shards, wholes: list[Tensor] = wholes) -> Any:
                return all_gather_coalesced(wholes, shards, group)

            def reduce(shards: list[Tensor] = shards, wholes: list[Tensor] = wholes) -> Any:
                return reduce_scatter_coalesced(shards, wholes, group, average=averages)

            for what, start in (("all_gather", gather), ("reduce_scatter", reduce)):
                time_s = _time_s(worker, start)
                result[f"{what}_{layout}_us"] = time_s * 1e6
                result[f"{what}_{layout}_gb_per_s"] = moved_bytes / time_s / 1e9
        results.append(result)
        columns = [f"{what}_{layout}" for what in ("all_gather", "reduce_scatter") for layout in ("packed", "grouped")]
        rows.append([f"{size_mb:g}", *(number(result[f"{column}_gb_per_s"], 1) for column in columns)])
        worker.say("bandwidth at " + ", ".join(rows[-1]))
    if worker.is_first:
        heading = ["MB", "all-gather packed", "grouped", "reduce-scatter packed", "grouped"]
        print(f"\n### Bus bandwidth in GB/s, bf16, {world_size} ranks; grouped: the parameters of a Llama layer\n")
        print(table(heading, rows), flush=True)
    return results


def _time_s(worker: Worker, start: Callable[[], Any]) -> float:
    series = []
    for index in range(4):
        synchronize(worker.device)
        worker.control.barrier()
        begin_s = time.perf_counter()
        works = [start() for _ in range(_REPEATS)]
        for work in works:
            work.wait()
        synchronize(worker.device)
        if index > 0:  # the first one connects the ranks
            series.append((time.perf_counter() - begin_s) / _REPEATS)
    return min(max(times) for times in zip(*worker.control.all_of(series), strict=True))
