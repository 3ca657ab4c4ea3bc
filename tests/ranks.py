"""Real gloo ranks for tests: processes that stay alive and run one function after another.

`pool.run("tests.distributed.module:function", **kwargs)` calls the function on every rank and returns the list of its
results. A test that raises on any rank fails with that rank's traceback. Ranks that do not answer in time are killed
and the test fails, so that a hang costs one time limit and not the whole run.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import multiprocessing
import os
import time
import traceback
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.gloo import use_one_thread

# Each group of gloo has threads that look for work a hundred times a second; with those of a hundred tests, a rank that
# rests takes a good part of a core. Destroying groups does not help: DTensor's caches go on using them.
_MOST_GROUPS = 25


def host_store() -> dist.TCPStore:
    """A store for ranks, in this process as in a launcher's: no rank has to outlive the others for it, and the system
    chooses a port that stays taken."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launched(store: dist.TCPStore, rank: int, world_size: int) -> dict[str, str]:
    """The environment of a rank whose launcher hosts `store`, for scripts."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    host = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return {**os.environ, **place, **host, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def join(backend: str, rank: int, world_size: int, store: dist.TCPStore, timeout_s: float | None = None) -> None:
    """Make the default group of a rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    faulthandler.enable()  # a rank that dies says where
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    use_one_thread()
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve(rank: int, world_size: int, port: int, backend: str, pipe: Any) -> None:
    join(backend, rank, world_size, dist.TCPStore("127.0.0.1", port, is_master=False))
    pipe.send(("ready", (None, 1)))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            break
        if request is None:
            break
        target, kwargs = request
        module, function = target.split(":")
        try:
            torch.manual_seed(0)
            torch._dynamo.reset()
            result = getattr(importlib.import_module(module), function)(**kwargs)
            pipe.send(("ok", (result, len(dist.distributed_c10d._world.pg_map))))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """`world_size` processes in one gloo group (or NCCL, for GPU tests).

    `environment` (of every rank, or one per rank) is in place before the interpreters start, so that it may hold
    PYTHONHASHSEED.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout_s: float = 600.0,
        environment: dict[str, str] | Sequence[dict[str, str]] = (),
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self.environments = [environment] * world_size if isinstance(environment, dict) else [*environment]
        self._store: dist.TCPStore | None = None
        self._num_groups = 0  # in each rank
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = host_store()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self._store.port, self.backend, theirs), daemon=True
            )
            with unittest.mock.patch.dict(os.environ, self.environments[rank] if self.environments else {}):
                process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect("start")

    def _collect(self, what: str) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            for rank, pipe in enumerate(self._pipes):
                if rank in results or not pipe.poll(0.02):
                    continue
                try:
                    status, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    status, value = "error", f"the process ended without an answer, exit code {code}"
                if status == "error":
                    self.close()
                    raise AssertionError(f"rank {rank} failed in {what}:\n{value}")
                results[rank], self._num_groups = value
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.world_size)) - set(results))
                self.close()
                raise AssertionError(f"{what}: ranks {missing} gave no answer within {self.timeout_s:.0f} s")
        return [results[rank] for rank in range(self.world_size)]

    def run(self, target: str, **kwargs: Any) -> list[Any]:
        """Call `module:function` with `kwargs` on every rank; the results in order of rank."""
        if self._num_groups > _MOST_GROUPS:
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((target, kwargs))
        return self._collect(target)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._store, self._num_groups = [], [], None, 0
