"""Compile caches that a kill has left damaged are made anew; one that cannot be written to is named in the error."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp, pipeline
from fsdp_passes.errors import CompileCacheError, ScheduleDisagreementError, ScheduleError
from fsdp_passes.generated_code import check_generated_code
from tests.distributed.checks import float_batches
from tests.faults import catch, run

HERE = "tests.test_damaged_caches"
DIM = 8
ENTRIES = {"aotautograd", "fxgraph"}  # the folders of both caches; the code beside them is checked by its own name


def use_cache(folder: str) -> None:
    """Of this process, for Inductor's graphs and AOTAutograd's."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    functorch_config.enable_autograd_cache = True
    inductor_config.cpp.vec_isa_ok = False  # what this CPU can do is asked of the C++ compiler for seconds


def losses(cache: str, kill_behind: int = 0) -> tuple[list[float], dict[str, int]]:
    """Of three steps with Inductor and this cache folder, and how often the caches were of use.

    `kill_behind`: end this process by SIGKILL when there are so many files in the folder, in the middle of the first
    compilation.
    """
    use_cache(cache)
    if kill_behind:
        threading.Thread(target=_kill, args=(Path(cache), kill_behind), daemon=True).start()
    found = train()
    counters: Any = torch._dynamo.utils.counters
    hits = {
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
    }
    return found, hits


def train(timeout_s: float = 60.0) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2)))
    fully_shard(model, units=["*"])
    call = torch.compile(model, backend=overlap_fsdp, options={"agreement_timeout_s": timeout_s})
    found = []
    for (x,) in float_batches(3, 4, DIM):
        loss = call(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()
        found.append(loss.item())
    return found


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
    entries = [path for path in files_in(tmp_path) if ENTRIES & {*path.parts}]
    assert {part for path in entries for part in path.parts} >= ENTRIES
    for path in entries:
        halve(path)
    (damaged,) = run(f"{HERE}:losses", 1, cache=cache)
    assert damaged.error == ""
    assert damaged.result[0] == expected
    assert damaged.result[1] == {"aot": 0, "fx": 0}, "what is damaged is not used"


def checks_of_code(cache: str, refuse: bool) -> tuple[str, list[str], dict[str, int]]:
    """What stops training, whose code was checked, and how often the caches were of use. `refuse`: the backward's."""
    use_cache(cache)
    seen: list[str] = []

    def check(source: str, *, scheduled: Any, where: str) -> None:
        check_generated_code(source, scheduled=scheduled, where=where)
        seen.append(where.split()[1])
        if refuse and "backward" in where:
            raise ScheduleError(where, ["refused by the test"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "check_generated_code", check)
        error, _ = catch(Exception, train)
    counters: Any = torch._dynamo.utils.counters
    hits = {
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
    }
    return "" if error is None else str(error), seen, hits


def test_code_whose_check_failed_is_checked_again_and_never_comes_from_autograd_s_cache(tmp_path: Path) -> None:
    (refused,) = run(f"{HERE}:checks_of_code", 1, cache=str(tmp_path), refuse=True)
    assert "refused by the test" in refused.result[0], refused
    (again,) = run(f"{HERE}:checks_of_code", 1, cache=str(tmp_path), refuse=False)
    assert again.result == ("", ["forward", "backward"], {"aot": 0, "fx": 2}), again


def what_stops_training(caches: list[str], wait_s: float) -> tuple[str, str]:
    """The error of each rank, with a cache folder of its own."""
    use_cache(caches[dist.get_rank()])
    error, _ = catch(Exception, lambda: train(wait_s))
    return type(getattr(error, "inner_exception", error)).__name__, str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="/sys is a folder of Linux, in which even root cannot write")
def test_a_rank_whose_cache_is_read_only_names_the_folder_and_the_others_name_the_rank(tmp_path: Path) -> None:
    writes, refused = run(f"{HERE}:what_stops_training", 2, caches=[str(tmp_path), "/sys"], wait_s=2.0)
    assert (writes.error, refused.error) == ("", "")
    kind, text = refused.result
    assert kind == CompileCacheError.__name__, text
    assert "compile cache /sys: expected a folder in which this process can create and write files" in text
    assert "set the environment variable TORCHINDUCTOR_CACHE_DIR to another folder" in text
    kind, text = writes.result
    assert kind == ScheduleDisagreementError.__name__, text
    assert "no answer from rank 1 within 2 s" in text


def on_a_full_disk(cache: str) -> tuple[str, str]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # bytes: less than any generated code
    return what_stops_training([cache], 60.0)


def test_where_a_file_cannot_be_written_whole_the_error_names_the_folder(tmp_path: Path) -> None:
    (outcome,) = run(f"{HERE}:on_a_full_disk", 1, cache=str(tmp_path))
    assert outcome.error == ""
    kind, text = outcome.result
    assert kind == CompileCacheError.__name__, text
    assert f"compile cache {tmp_path}: expected a folder" in text
    assert "File too large" in text
