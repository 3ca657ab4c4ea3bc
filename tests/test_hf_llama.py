"""`examples/hf_llama.py` prints the same losses in every way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_llama

SCRIPT = Path(hf_llama.__file__)
TINY = ["--steps", "3", "--layers", "2", "--dim", "32", "--seq", "16", "--device", "cpu"]


def losses(text: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.M)]
    assert len(found) == 3, text
    return found


def run(*launcher_and_flags: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher_and_flags], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(done.stdout)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    pytest.importorskip("transformers", reason="needs: pip install transformers")
    return run(str(SCRIPT), *TINY, "--reference")


@pytest.mark.parametrize("flags", [["--eager", "--accumulate", "2"], ["--inner", "aot_eager", "--accumulate", "2"]])
def test_two_ranks_print_the_losses_of_one(expected: list[float], flags: list[str]) -> None:
    torch.testing.assert_close(run(str(SCRIPT), *TINY, "--ranks", "2", *flags), expected, rtol=0, atol=3e-5)


def test_two_replicas_of_two_shards_print_the_losses_of_one_rank(expected: list[float]) -> None:
    flags = ["--mesh", "2x2", "--inner", "aot_eager", "--accumulate", "2"]
    torch.testing.assert_close(run(str(SCRIPT), *TINY, *flags), expected, rtol=0, atol=3e-5)


def test_it_runs_under_torchrun_with_inductor(expected: list[float]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torch.testing.assert_close(run(*launcher, str(SCRIPT), *TINY), expected, rtol=0, atol=3e-5)


def test_a_batch_that_cannot_be_split_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hf_llama.parse(["--batch", "6", "--ranks", "2", "--accumulate", "2"])
    assert "cannot be split into 2 rank(s) x 2 part(s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "2x0"], "expected replicas x shards, for example 2x4, got '2x0'"),
        (["--mesh", "2"], "expected replicas x shards, for example 2x4, got '2'"),
        (["--mesh", "2x2", "--ranks", "2"], "--mesh 2x2 needs 4 ranks, got 2."),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        hf_llama.parse(flags)
    assert message in capsys.readouterr().err
