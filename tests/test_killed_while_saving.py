"""SIGKILL at every moment of the example's saving: the newest checkpoint is the old state or the new one, complete.

A child process saves and kills itself in front of the n-th call that changes something in the file system, for each n
until it comes to the end. What such a call does is the kernel's, and whole or not at all but for `write`; a write that
was cut short leaves a file that has no name yet among the checkpoints.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkpoint

ROOT = Path(__file__).parent.parent
HERE = "tests.test_killed_while_saving"
CHANGES = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink", "remove", "truncate")
FILES = (io.BufferedWriter, io.FileIO, io.TextIOWrapper)
SHAPE = {"dim": 3}


class State:
    """A model and its optimizer after `step` steps; the values follow from the step."""

    def __init__(self, step: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(step):
            self.model(torch.ones(2, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path, step: int) -> None:
        checkpoint.save(folder, {"step": step, "shape": SHAPE}, self.model, self.optimizer)

    def load(self, folder: Path) -> int:
        progress = checkpoint.load_newest(folder, self.model, self.optimizer, SHAPE)
        assert progress is not None
        return int(progress["step"])

    def tensors(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *moments]


def is_change(function: Any) -> bool:
    """Whether a built-in function changes something in the file system."""
    name = getattr(function, "__name__", "")
    return name in CHANGES or (name == "write" and isinstance(getattr(function, "__self__", None), FILES))


def kill_before(number: int) -> None:
    """SIGKILL to this process in front of its `number`-th change of the file system, from now on."""
    num_seen = num_writes = 0

    def count(frame: Any, event: str, function: Any) -> None:
        nonlocal num_seen, num_writes
        if event == "c_call" and is_change(function):
            num_writes = num_writes + 1 if function.__name__ == "write" else 0
            num_seen += num_writes <= 2  # hundreds of writes to one file in a row leave as many lengths of one state
            if num_seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def killed_child(folder: Path, number: int, new: State) -> bool:
    """Save step 2 in a child that is killed; whether it came to that."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kill_before(number)
            new.save(folder, 2)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def explore(folder: Path) -> list[int]:
    """The step that each kill has left, in order; the last entry is that of the child that came to the end."""
    torch.set_num_threads(1)  # a child has no other threads than the one that forked
    states = {step: State(step) for step in (1, 2, 3)}
    left = []
    states[1].save(folder / "old", 1)
    is_killed = True
    while is_killed:
        place = folder / str(len(left))
        shutil.copytree(folder / "old", place)
        is_killed = killed_child(place, len(left) + 1, states[2])
        found = State(0)
        left.append(found.load(place))
        for tensor, expected in zip(found.tensors(), states[left[-1]].tensors(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
        if len(left) % 4 and is_killed:
            continue
        states[3].save(place, 3)
        assert [path.name for path in place.iterdir()] == ["step-3"], "what the kill has left is cleared away"
    return left


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    code = f"import json, pathlib, {HERE} as here; print(json.dumps(here.explore(pathlib.Path({str(tmp_path)!r}))))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout.splitlines()[-1])
    assert left == sorted(left), "the new state does not go again"
    assert left.count(1) >= 8, "killed before the new checkpoint had its name"
    assert left.count(2) >= 4, "killed while the old one was removed"
