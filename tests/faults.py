"""Ranks that die: every call starts processes of its own, and an outcome may be a signal.

Started from a server that has imported torch already, so that a rank costs tenths of a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.ranks import free_port


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


def _serve(rank: int, world_size: int, port: int, target: str, kwargs: dict[str, Any], pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
    )
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, function = target.split(":")
    # A hang costs this long, and not half an hour.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        pipe.send(("ok", getattr(importlib.import_module(module), function)(**kwargs)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    _wait_for_the_living(dist.distributed_c10d._get_default_store(), rank)
    pipe.close()


def _wait_for_the_living(store: Any, rank: int) -> None:
    """Rank 0 hosts the store: it ends last, as a launcher would."""
    with contextlib.suppress(Exception):
        if rank != 0:
            store.add("ended", 1)
            return
        end_s, seen = time.monotonic() + 10, -1
        while time.monotonic() < end_s:
            now = store.add("ended", 0)
            if now != seen:
                seen, end_s = now, time.monotonic() + 10
            if now >= int(store.get("living") if store.check(["living"]) else 10**6):
                return
            time.sleep(0.05)


def expect_living(num_others: int) -> None:
    """Called on any rank: how many ranks besides rank 0 will end by themselves."""
    import torch.distributed as dist

    dist.distributed_c10d._get_default_store().set("living", str(num_others))


def run(target: str, world_size: int, *, timeout_s: float = 150.0, **kwargs: Any) -> list[Outcome]:
    """Call `module:function` with `kwargs` on new ranks of one gloo group; how each of them ended.

    A rank that is still alive behind `timeout_s` is killed, and the call raises `AssertionError`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch._dynamo", "fsdp_passes"])
    port = free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, world_size, port, target, kwargs, theirs), daemon=True)
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
