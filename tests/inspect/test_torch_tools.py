"""What the passes leave in PyTorch's own tools: TORCH_LOGS and the structured trace that tlparse reads."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STEP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdp_passes import fully_shard, overlap_fsdp

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=["*"])
torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})(torch.ones(2, 4)).sum().backward()
"""
PASSES = [
    "insert_unshard",
    "bucket_all_gathers",
    "bucket_reduce_scatters",
    "schedule_one_layer_ahead",
    "prefetch_across_graphs",
    "annotate_regions",
    "await_collectives",
]


def run_step(**environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", STEP], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("setting", "is_shown"), [("+fsdp_passes", True), ("fsdp_passes", False)])
def test_torch_logs_shows_each_graph_after_each_pass(setting: str, is_shown: bool) -> None:
    log = run_step(TORCH_LOGS=setting).stderr
    shown = re.findall(r"(forward|backward) graph after (\w+):", log)
    assert shown == ([(phase, name) for phase in ("forward", "backward") for name in PASSES] if is_shown else [])


def test_the_structured_trace_holds_each_graph_after_each_pass(tmp_path: pathlib.Path) -> None:
    run_step(TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    texts: dict[str, list[str]] = {}
    for index, line in enumerate(lines):
        if '"name": "fsdp_passes_' in line:
            entry = json.loads(line[line.index("{") :])
            end = index + 1
            while end < len(lines) and lines[end].startswith("\t"):
                end += 1
            texts[entry["artifact"]["name"]] = lines[index + 1 : end]
    assert list(texts) == [f"fsdp_passes_{phase}_after_{name}" for phase in ("forward", "backward") for name in PASSES]
    before = texts["fsdp_passes_forward_after_bucket_reduce_scatters"]
    after = texts["fsdp_passes_forward_after_schedule_one_layer_ahead"]
    assert sorted(before) == sorted(after)
    assert before != after
    assert any("all_gather_1 = " in line for line in after)
