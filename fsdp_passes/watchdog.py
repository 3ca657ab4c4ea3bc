"""Collectives that stand still say so: which one, of which unit, for how long, and which rank is missing.

The process group ends a wait that lasts longer than its timeout, or whose peer has closed the connection; gloo raises
on the waiting thread, NCCL ends the process. What they say names neither a unit nor a rank. So every wait of ours goes
through `Watch`, which knows what is waited for, and a thread looks from time to time whether collectives are still
completed. While they are it does nothing. When they stand still it leaves a mark in the store (`marks.py`), and shortly
before the timeout it reads the marks of the others and logs what it sees. A wait that fails does the same and raises
`CollectiveError`.

Nothing here starts a collective.
"""

from __future__ import annotations

import atexit
import collections
import datetime
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._torch_compat import group_of, group_timeout_s
from fsdp_passes.agreement import has_peers
from fsdp_passes.errors import CollectiveError
from fsdp_passes.marks import FAILED, IDLE, WAITS, Board, Mark, Sighting, within
from fsdp_passes.ops import c10d, library
from fsdp_passes.regions import ALL_REDUCE_REGION, HasDisplayName, label_text

log = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT = 8  # so that two looks and the reading of marks fit behind the warning
_WARN_AT = 0.75  # of the timeout
_RANKS_PER_SECOND = 100  # marks that one store is asked to take
_NUM_EVENTS = 256  # of the waits that were queued last on a GPU: more than a step has
_END_S = 10.0  # how long the end of the process waits for a look: an answer of the store on a busy machine
_PATIENCE_LOOKS = 4  # after how many looks a rank without a mark has ended: each leaves one at its second look

Named = Tensor | HasDisplayName  # a unit, or its label


def _name(of: Named) -> str:
    return label_text(of) if isinstance(of, Tensor) else str(of.display_name)


class Watch:
    """The waits of this process in one process group.

    Attributes:
        timeout_s: the group's own.
        look_s: seconds between two looks.
        count: waits that are over.
        last: unit and kind of the newest of them.
        waiting: unit, kind and begin of the wait that the host is in.
        failure: what the first wait that failed raised; the group is of no use from then on.
    """

    def __init__(self, group: dist.ProcessGroup, board: Board) -> None:
        self.group = weakref.ref(group)
        self.board = board
        self.count = 0
        self.last: tuple[Named, str] | None = None
        self.waiting: tuple[Named, str, float] | None = None
        self.failure: CollectiveError | None = None
        self.is_failing = False
        self.events: collections.deque[tuple[Named, str, torch.cuda.Event]] = collections.deque(maxlen=_NUM_EVENTS)
        self.is_capturing = False
        self.set_timeout(group_timeout_s(group))
        # What the watching thread saw at its last look: how far we were, since when, and how often it told others.
        self._seen_count = -1
        self._seen_waiting: tuple[Named, str, float] | None = None
        self._since_s = 0.0
        self._beat = 0
        self._has_mark = True  # of the run before this one, which a launcher has restarted with the same store
        self._has_warned = False
        self.warning: threading.Thread | None = None
        self._lock = threading.Lock()  # a failure is the last mark

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        num_ranks = len(self.board.ranks)
        self.look_s = min(max(1.0, num_ranks / _RANKS_PER_SECOND), timeout_s / _LOOKS_PER_TIMEOUT)

    # ---- the waiting thread ------------------------------------------------------------------------------------------

    def run(self, unit: Named, kind: str, wait: Callable[[], Any]) -> None:
        """Wait. Raises `CollectiveError` when that fails."""
        if self.failure is not None:
            raise self.failure
        self.waiting = (unit, kind, time.monotonic())
        try:
            wait()
        except Exception as error:
            raise self._failed(unit, kind, error) from error
        finally:
            self.waiting = None
        self.count += 1
        self.last = (unit, kind)

    def note_event(self, unit: Named, kind: str, device: torch.device) -> None:
        """On a GPU the stream waits and the host goes on: an event tells when the wait is over."""
        self.is_capturing = torch.cuda.is_current_stream_capturing()
        if not self.is_capturing:
            is_full = len(self.events) == _NUM_EVENTS
            event = self.events.popleft()[2] if is_full else torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.events.append((unit, kind, event))

    def _failed(self, unit: Named, kind: str, error: Exception) -> CollectiveError:
        assert self.waiting is not None
        waited_s = time.monotonic() - self.waiting[2]
        mine = Mark(FAILED, kind, _name(unit), self.count, waited_s)
        self.is_failing = True
        # At once: a launcher that sees a rank die ends the others within a second.
        log.warning(f"unit {mine.unit!r}: its {kind} failed after {waited_s:.1f} s; looking which rank is missing")

        def look() -> Sighting:
            with self._lock:
                self.board.publish(mine)
            return self.board.look(self.look_s / 2, _PATIENCE_LOOKS * self.look_s)

        sighting = within((_PATIENCE_LOOKS + 3) * self.look_s, look)
        others = [rank for rank in self.board.ranks if rank != self.board.rank]
        if sighting.is_store_lost and len(others) == 1:
            sighting.silent.extend(others)
        self.failure = CollectiveError(mine.unit, kind, waited_s, _seen_in(sighting, mine), _missing(sighting), error)
        return self.failure

    # ---- the watching thread -----------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Called every `look_s`. Raises what the store raises."""
        with self._lock:
            if not self.is_failing:
                self._look(now_s)

    def _look(self, now_s: float) -> None:
        count, waiting = self.count, self.waiting
        if count != self._seen_count or waiting is not self._seen_waiting:
            self._seen_count, self._seen_waiting = count, waiting
            self._since_s, self._has_warned = now_s, False
            if self._has_mark:
                self._has_mark = False
                self.board.withdraw()
            return
        if self.is_capturing:  # asking an event could end the capture of a CUDA graph
            return
        still_s = now_s - self._since_s
        if still_s > 2 * self.timeout_s + 60:
            return  # whoever wanted to know has ended by now
        mark = self._mark(still_s)
        self.board.publish(mark)
        self._has_mark = True
        if mark.state == WAITS and still_s >= _WARN_AT * self.timeout_s and not self._has_warned:
            self._has_warned = True
            # On a thread of its own: others wait for our mark to be renewed meanwhile.
            self.warning = threading.Thread(target=self._warn, args=(mark,), daemon=True)
            self.warning.start()

    def _warn(self, mark: Mark) -> None:
        sighting = within(3 * self.look_s, lambda: self.board.look(self.look_s / 2, self.look_s))
        log.warning(
            f"unit {mark.unit!r}: its {mark.collective} has been waiting for {mark.still_s:.1f} s, and the process "
            f"group's timeout is {self.timeout_s:g} s: {_seen_in(sighting, mark)}."
        )

    def _mark(self, still_s: float) -> Mark:
        self._beat += 1
        waiting, last = self.waiting, self.last
        if waiting is not None:
            return Mark(WAITS, waiting[1], _name(waiting[0]), self.count, still_s, self._beat)
        for unit, kind, event in list(self.events):
            if not event.query():
                return Mark(WAITS, kind, _name(unit), self.count, still_s, self._beat)
        if last is None:
            return Mark(IDLE, "", "", self.count, still_s, self._beat)
        return Mark(IDLE, last[1], _name(last[0]), self.count, still_s, self._beat)


def _missing(sighting: Sighting) -> list[int]:
    return sorted([*sighting.silent, *(rank for rank, mark in sighting.marks.items() if mark.state == IDLE)])


def _seen_in(sighting: Sighting, mine: Mark) -> str:
    """What the others do, ranks with the same text together."""
    texts: dict[str, list[int]] = {}
    if sighting.is_store_lost:
        missing = "no answer from " + (f"rank {sighting.silent[0]}" if sighting.silent else "some rank")
        return f"{missing}, nor from the store, whose host (rank 0, or the launcher) has probably ended"
    for rank in sighting.silent:
        texts.setdefault("gives no sign of life; it has probably ended", []).append(rank)
    for rank, mark in sighting.marks.items():
        what = f"the {mark.collective} of unit {mark.unit!r}"
        if mark.state == IDLE and not mark.collective:
            text = "is alive and has not come to its first collective"
        elif mark.state == IDLE:
            text = f"is alive and waits for none: its last was {what}, {mark.still_s:.1f} s ago"
        elif mark.state == FAILED:
            text = f"failed in {what}"
        elif (mark.collective, mark.unit) == (mine.collective, mine.unit):
            text = "waits for it too"
        else:
            text = f"waits for {what} instead"
        texts.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, sorted(ranks)))} {text}" for text, ranks in texts.items())


class _Watchman(threading.Thread):
    """Looks at every `Watch`. Started with the first one."""

    def __init__(self) -> None:
        super().__init__(name="fsdp_passes watchdog", daemon=True)
        self.is_over = threading.Event()
        self.watches: list[Watch] = []

    def run(self) -> None:
        while not self.is_over.wait(min((watch.look_s for watch in self.watches), default=1.0)):
            for watch in list(self.watches):
                if watch.group() is None:  # the group was destroyed
                    self.watches.remove(watch)
                    continue
                try:
                    watch.look(time.monotonic())
                except Exception as error:  # the store's host has ended; waits still fail by themselves
                    log.debug("no marks any more: %s", error)
                    self.watches.remove(watch)

    def stop(self) -> None:
        """A thread in the store's C++ code while the interpreter ends would abort it ("terminate called without an
        active exception")."""
        self.is_over.set()
        end_s = time.monotonic() + _END_S
        for thread in (self, *(watch.warning for watch in self.watches)):
            if thread is not None:
                thread.join(max(0.0, end_s - time.monotonic()))


# By the group itself and weakly: a second group may have the name of one that was destroyed. None: no peers.
_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch | None] = weakref.WeakKeyDictionary()
_num_groups: dict[str, int] = {}
_watchman: _Watchman | None = None


def watch_of(group_name: str) -> Watch | None:
    """The watch of a group; None when it has no other processes."""
    group = group_of(group_name)
    try:
        return _watches[group]
    except KeyError:
        return _new_watch(group, group_name)


def _new_watch(group: dist.ProcessGroup, group_name: str) -> Watch | None:
    global _watchman
    watch = None
    if has_peers(group_name):
        number = _num_groups[group_name] = _num_groups.get(group_name, 0) + 1
        ranks = dist.get_process_group_ranks(group)
        watch = Watch(group, Board(f"fsdp_passes/marks/{group_name}/{number}", dist.get_rank(), ranks))
        if _watchman is None or not _watchman.is_alive():
            _watchman = _Watchman()
            atexit.register(_watchman.stop)
            _watchman.start()
        _watchman.watches.append(watch)
    _watches[group] = watch
    return watch


def await_named(unit: Named, kind: str, group_name: str, wait: Callable[[], Any]) -> None:
    """Wait for a collective of `unit` by calling `wait`. Raises `CollectiveError` when that fails."""
    watch = watch_of(group_name)
    if watch is None:
        wait()
    else:
        watch.run(unit, kind, wait)


def note_awaited_on_stream(unit: Named, kind: str, group_name: str, device: torch.device) -> None:
    """The current stream of a GPU was told to wait for a collective of `unit`; the host goes on."""
    watch = watch_of(group_name)
    if watch is not None:
        watch.count += 1
        watch.last = (unit, kind)
        watch.note_event(unit, kind, device)


def set_collective_timeout(group_name: str, timeout_s: float) -> None:
    """Let the process group's later collectives wait at most `timeout_s` seconds. Nothing for a group without other
    processes."""
    if has_peers(group_name):
        group_of(group_name).set_timeout(datetime.timedelta(seconds=timeout_s))
        watch = watch_of(group_name)
        assert watch is not None
        watch.set_timeout(timeout_s)


def _await_collective(
    results: list[Tensor], sent: list[Tensor], label: Tensor | None, kind: str, group_name: str
) -> None:
    """Wait for the collective that `results` are all results of; from here on they may be read.

    `sent`: what it reads of what the graph made. A compiler keeps that memory until here because it is an argument.
    `label`: the unit's, to name it when the wait fails or lasts; None: nobody watches.
    """
    # One result stands for all that have one work: those of our own starts. PyTorch's all-reduce has one for each.
    own = results if kind == ALL_REDUCE_REGION else results[:1]

    def wait() -> None:
        for result in own:
            c10d.wait_tensor(result)

    if label is None:
        wait()
        return
    await_named(label, kind, group_name, wait)
    if results[0].is_cuda:
        watch = watch_of(group_name)
        if watch is not None:
            watch.note_event(label, kind, results[0].device)


# It writes the results, so that no compiler reads them ahead of it. Their layout, and that of what is sent, is as they
# are: a copy in another one would be no result.
library.define(
    "await_collective(Tensor(a!)[] results, Tensor[] sent, Tensor? label, str kind, str group_name) -> ()",
    tags=(torch.Tag.flexible_layout,),
)
library.impl("await_collective", _await_collective, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_passes::await_collective", lambda *_: None, lib=library)
AWAIT_COLLECTIVE = torch.ops.fsdp_passes.await_collective.default
torch.fx.node.has_side_effect(AWAIT_COLLECTIVE)
