"""Overlap across graph boundaries: which gather comes next, learnt from the order of the step before.

A model with graph breaks, or whose layers are compiled one by one, runs as several graphs with eager units in between.
Inside a graph the schedule hides every gather but the first. That one is started by the graph (or the eager unit) that
ran before it in the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A point at which gathered parameters are needed and no schedule of a graph has hidden their gather.

    Attributes:
        what: the first collective of a graph (a `GatherRequest`; two graphs may begin with one unit and different
            parameters of it), or the unit that runs eagerly.
        is_graph: which of the two.
        is_backward_graph: whether the graph is a backward (activation checkpointing runs forward graphs in backwards).
        is_in_backward: whether autograd was running a backward.
        is_grad_enabled: as it was when the graph was called: an evaluation is followed by no backward.
    """

    what: Hashable
    is_graph: bool
    is_backward_graph: bool
    is_in_backward: bool
    is_grad_enabled: bool


class LookAhead:
    """The entries of the running pass over the model, and which entry followed which the last time.

    A pass begins with the first forward entry behind a backward, when an entry comes again, and when gradients are
    switched on or off. Nothing is started across its begin: an optimizer may write the parameters there.

    Where a pass began instead of the entry that was expected (two forwards before their backwards), a gather was
    started for nothing, as it would be in each step. From then on an entry must follow twice in a row before it is
    expected.

    Every rank learns from its own run. Ranks that run the same graphs in the same order start the same gathers.

    Attributes:
        open_requests: the collectives of the first unit of the graph that has begun, until it has reached its
            `start_next_graph`; None outside.
        started: gathers that were started ahead and not taken yet: request -> `gather_ops.StartedGather`.
    """

    def __init__(self) -> None:
        self.open_requests: list[Any] | None = None
        self.started: dict[Any, Any] = {}
        self._start: dict[Entry, Callable[[], None]] = {}
        self._successor: dict[Entry, Entry] = {}
        self._times_in_a_row: dict[Entry, int] = {}  # of an entry whose successor was once expected in vain
        self._passed: dict[Entry, None] = {}
        self._last: Entry | None = None

    def enter(self, entry: Entry, start: Callable[[], None]) -> bool:
        """`entry` is reached. `start` starts its gather the next time, ahead of it; it is called where the entry before
        it computes. Returns whether a pass begins: what was started before it must not be used."""
        last = self._last
        begins_pass = last is None or self._begins_pass(entry, last)
        if last is not None and begins_pass:
            self._passed.clear()
            if self._successor.pop(last, None) is not None or last in self._times_in_a_row:
                self._times_in_a_row[last] = 0  # it was the last of its pass
        elif last is not None:
            if last in self._times_in_a_row:
                is_same = self._successor.get(last) == entry
                self._times_in_a_row[last] = self._times_in_a_row[last] + 1 if is_same else 1
            self._successor[last] = entry
        self._start[entry] = start
        self._passed[entry] = None
        self._last = entry
        return begins_pass

    def _begins_pass(self, entry: Entry, last: Entry) -> bool:
        is_next_forward = last.is_in_backward and not entry.is_in_backward
        return is_next_forward or entry in self._passed or entry.is_grad_enabled != last.is_grad_enabled

    def next_entry(self) -> Entry | None:
        """What followed the running entry the last time."""
        if self._last is None or self._times_in_a_row.get(self._last, 2) < 2:
            return None
        return self._successor.get(self._last)

    def start_next(self) -> None:
        """Start the gather of the entry that will follow, if it is known."""
        following = self.next_entry()
        if following is not None and following not in self._passed:
            self._start[following]()

    def interrupt(self) -> None:
        """An exception ended the pass: what comes next follows nothing."""
        self.open_requests = None
        self._passed.clear()
        self._last = None
