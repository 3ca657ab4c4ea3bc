"""Start the ranks of a measurement as processes, and let none of them outlive the tool."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from bench.report import say

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and SIGINT into SystemExit, so that `finally` blocks run."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    watched = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, leave) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """A second signal must not interrupt the cleaning up."""
    watched = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rank_environment(rank: int, world_size: int, address: str, port: int, local_rank: int) -> dict[str, str]:
    """The variables that `torch.distributed` reads, and the path to `bench` and the library."""
    paths = [str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }


def _end_with_parent() -> None:
    """In a new process: the kernel kills it when the tool itself is killed and cannot clean up (Linux)."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _forward(stream: IO[str], prefix: str) -> None:
    for line in stream:
        print(f"{prefix}{line.rstrip()}", file=sys.stderr, flush=True)


def run_ranks(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, time_limit_s: float
) -> int:
    """Run one process for each rank until all are done, one fails, or the limit is over.

    Rank 0 writes to this process's own streams; what the others write goes to stderr behind `rank N: `.

    Returns:
        0, the first status that is not, or 124 when the limit was over. All processes are gone by then.
    """
    processes: list[subprocess.Popen[str]] = []
    deadline_s = time.monotonic() + time_limit_s
    try:
        for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            output = None if rank == 0 else subprocess.PIPE
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                text=True,
                preexec_fn=_end_with_parent,
                start_new_session=True,  # a group of its own, which is ended with its children
            )
            processes.append(process)
            if process.stdout is not None:
                threading.Thread(target=_forward, args=(process.stdout, f"rank {rank}: "), daemon=True).start()
        while True:
            states = [process.poll() for process in processes]
            failed = [(rank, state) for rank, state in enumerate(states) if state]
            if failed:
                # The others often fail a moment later with the message that tells why.
                time.sleep(2.0)
                say(f"rank {failed[0][0]} ended with status {failed[0][1]}; the others are ended")
                return int(failed[0][1] or 1)
            if all(state == 0 for state in states):
                return 0
            if time.monotonic() > deadline_s:
                say(f"the ranks were not done after {time_limit_s:.0f} s and are ended")
                return 124
            time.sleep(0.2)
    finally:
        with signals_ignored():
            _end(processes)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            os.killpg(process.pid, number)
        for process in alive:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
