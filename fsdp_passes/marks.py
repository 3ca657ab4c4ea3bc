"""What ranks say of themselves in the store while their collectives stand still, and who says nothing.

A rank whose collectives stand still leaves a mark and renews it; one that goes on takes it back. So nothing is written
while training runs, and a mark that is not renewed belongs to a process that has ended.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from fsdp_passes._torch_compat import default_store

WAITS, IDLE, FAILED = "waits", "idle", "failed"


@dataclasses.dataclass(frozen=True)
class Mark:
    """One rank's state.

    Attributes:
        state: "waits" in a collective, "idle" (in none since the last one), or "failed" in one.
        collective, unit: the one that it waits for, failed in, or took part in last ("" before the first).
        count: how many it has completed.
        still_s: for how many seconds nothing has changed.
        beat: changes whenever the mark is renewed.
    """

    state: str
    collective: str
    unit: str
    count: int
    still_s: float
    beat: int = 0


@dataclasses.dataclass
class Sighting:
    """What one rank saw of the others.

    Attributes:
        marks: rank -> its mark, for every rank that is alive or said that it failed.
        silent: ranks without a sign of life.
        is_store_lost: the store gave no answer; then `marks` and `silent` are empty.
    """

    marks: dict[int, Mark] = dataclasses.field(default_factory=dict)
    silent: list[int] = dataclasses.field(default_factory=list)
    is_store_lost: bool = False


class Board:
    """The marks of one group in the store. Every request is small, and none waits for another rank.

    Args:
        store: by default a connection of its own to the store of the default group, made at the first use: a request
            that hangs must not hold up anybody else's.
    """

    def __init__(self, prefix: str, rank: int, ranks: list[int], store: dist.Store | None = None) -> None:
        self.prefix = prefix
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._lock = threading.Lock()

    def _connected(self) -> dist.Store:
        with self._lock:
            if self._store is None:
                self._store = default_store().clone()  # type: ignore[attr-defined]
            return self._store

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/rank{rank}"

    def publish(self, mark: Mark) -> None:
        """Leave or renew this rank's mark."""
        self._connected().set(self._key(self.rank), json.dumps(dataclasses.asdict(mark)))

    def withdraw(self) -> None:
        """Take this rank's mark back."""
        self._connected().delete_key(self._key(self.rank))

    def read(self) -> dict[int, Mark]:
        """The marks of all other ranks that have left one."""
        store = self._connected()
        others = [rank for rank in self.ranks if rank != self.rank and store.check([self._key(rank)])]
        return {rank: Mark(**json.loads(store.get(self._key(rank)))) for rank in others}

    def look(self, pause_s: float, patience_s: float) -> Sighting:
        """Read until every other rank has renewed its mark or said that it failed, or until `patience_s` is over."""
        end_s = time.monotonic() + patience_s
        first: dict[int, int] = {}
        seen: dict[int, Mark] = {}
        while True:
            for rank, mark in self.read().items():
                if first.setdefault(rank, mark.beat) != mark.beat or mark.state == FAILED:
                    seen[rank] = mark
            silent = [rank for rank in self.ranks if rank != self.rank and rank not in seen]
            if not silent or time.monotonic() >= end_s:
                return Sighting(seen, silent)
            time.sleep(pause_s)


def within(seconds: float, ask: Callable[[], Sighting]) -> Sighting:
    """The result of `ask`, on a thread of its own: a store whose host has vanished answers neither yes nor no."""
    found: list[Sighting] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception:  # connection refused, reset, timed out: the store's host has ended
            found.append(Sighting(is_store_lost=True))

    thread = threading.Thread(target=run, name="fsdp_passes marks", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else Sighting(is_store_lost=True)
