"""Compile caches that a kill or a full disk has left damaged: training goes on with the same losses."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp
from tests.distributed.checks import float_batches
from tests.faults import run

HERE = "tests.test_damaged_caches"
DIM = 8


def losses(cache: str, kill_behind: int = 0) -> tuple[list[float], dict[str, int]]:
    """Of three steps with Inductor and this cache folder, and how often the caches were of use.

    `kill_behind`: end this process by SIGKILL when there are so many files in the folder, in the middle of the first
    compilation.
    """
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_AUTOGRAD_CACHE="1", TORCHINDUCTOR_FX_GRAPH_CACHE="1")
    if kill_behind:
        threading.Thread(target=_kill, args=(Path(cache), kill_behind), daemon=True).start()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2)))
    fully_shard(model, units=["*"])
    call = torch.compile(model, backend=overlap_fsdp)
    found = []
    for (x,) in float_batches(3, 4, DIM):
        loss = call(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()
        found.append(loss.item())
    counters: Any = torch._dynamo.utils.counters
    hits = {
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
    }
    return found, hits


def _kill(cache: Path, num_files: int) -> None:
    while len(files_in(cache)) < num_files:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def files_in(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_entries_that_are_half_written_are_made_anew(tmp_path: Path) -> None:
    cache = str(tmp_path)
    (killed,) = run(f"{HERE}:losses", 1, cache=cache, kill_behind=1)
    assert killed.exit_code == -signal.SIGKILL
    assert files_in(tmp_path), "it has left something"
    (cold,) = run(f"{HERE}:losses", 1, cache=cache)  # as it was left
    assert cold.error == ""
    expected, hits = cold.result
    assert hits["aot"] == 0
    (warm,) = run(f"{HERE}:losses", 1, cache=cache)
    assert warm.error == ""
    assert warm.result[0] == expected
    assert warm.result[1]["aot"] > 0
    # The entries of both caches; the code beside them is checked by its own name.
    entries = [path for path in files_in(tmp_path) if {"aotautograd", "fxgraph"} & {*path.parts}]
    assert {part for path in entries for part in path.parts} >= {"aotautograd", "fxgraph"}
    for path in entries:
        halve(path)
    (damaged,) = run(f"{HERE}:losses", 1, cache=cache)
    assert damaged.error == ""
    assert damaged.result[0] == expected
    assert damaged.result[1]["aot"] == 0, "what is damaged is not used"
