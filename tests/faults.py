"""Ranks that die: every call starts processes of its own, and an outcome may be a signal.

Started from a server that has imported torch already, so that a rank costs tenths of a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import host_store, join


@dataclasses.dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        exit_code: of the process; negative for a signal.
        result: what the function returned.
        error: the traceback of what it raised, "" when it returned or died.
    """

    exit_code: int | None
    result: Any = None
    error: str = ""


def _serve(
    rank: int, world_size: int, port: int, is_rank_0_host: bool, target: str, kwargs: dict[str, Any], pipe: Any
) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if is_rank_0_host:
        store = _store_of_rank_0(store, rank)
    join("gloo", rank, world_size, store, timeout_s=60)  # a hang costs this long, and not half an hour
    torch.manual_seed(0)
    module, function = target.split(":")
    try:
        pipe.send(("ok", getattr(importlib.import_module(module), function)(**kwargs)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()


def _store_of_rank_0(meeting_place: dist.TCPStore, rank: int) -> dist.TCPStore:
    if rank == 0:
        store = host_store()
        meeting_place.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(meeting_place.get("port")), is_master=False)


def run(
    target: str, world_size: int, *, timeout_s: float = 240.0, is_rank_0_host: bool = False, **kwargs: Any
) -> list[Outcome]:
    """Call `module:function` with `kwargs` on new ranks of one gloo group; how each of them ended.

    The store is in this process, as it is in a launcher's, or dies with rank 0 (`is_rank_0_host`).
    A rank that is still alive behind `timeout_s` is killed, and the call raises `AssertionError`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch._dynamo", "fsdp_passes"])
    store = host_store()
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(rank, world_size, store.port, is_rank_0_host, target, kwargs, theirs), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    end_s = time.monotonic() + timeout_s
    outcomes = []
    try:
        for process, ours in ranks:
            status, value = "died", None
            if ours.poll(max(0.0, end_s - time.monotonic())):
                with contextlib.suppress(EOFError):
                    status, value = ours.recv()
            process.join(max(0.0, end_s - time.monotonic()))
            error = value if status == "error" else ""
            outcomes.append(Outcome(process.exitcode, value if status == "ok" else None, error))
        hanging = [rank for rank, outcome in enumerate(outcomes) if outcome.exit_code is None]
        assert not hanging, f"{target}: ranks {hanging} are still running behind {timeout_s:.0f} s: {outcomes}"
    finally:
        for process, _ in ranks:
            process.kill()
    return outcomes


def catch(kind: type[BaseException], function: Callable[[], Any]) -> tuple[BaseException | None, float]:
    """What `function` raised, None when it returned, and the seconds that it took."""
    begin_s = time.monotonic()
    try:
        function()
    except kind as error:
        return error, time.monotonic() - begin_s
    return None, time.monotonic() - begin_s
