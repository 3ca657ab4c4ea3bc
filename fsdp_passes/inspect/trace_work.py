"""Work and collectives of one rank, as data."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator

from fsdp_passes.inspect.trace_names import COMMUNICATION, Meaning


class Work:
    """What one resource did, in order of begin: intervals in microseconds, each with a (unit, phase) and a name."""

    def __init__(self) -> None:
        self.begins = array("d")
        self.ends = array("d")
        self.owners = array("i")
        self.names = array("i")
        self.all_owners: list[tuple[str, str]] = []  # in the order of their first work
        self._index: dict[tuple[str, str], int] = {}

    def append(self, begin: float, end: float, owner: tuple[str, str], name: int) -> None:
        if owner not in self._index:
            self._index[owner] = len(self.all_owners)
            self.all_owners.append(owner)
        self.begins.append(begin)
        self.ends.append(end)
        self.owners.append(self._index[owner])
        self.names.append(name)

    def owner(self, index: int) -> tuple[str, str]:
        return self.all_owners[self.owners[index]]

    def __len__(self) -> int:
        return len(self.begins)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return iter(zip(self.begins, self.ends, strict=True))


@dataclasses.dataclass
class Collective:
    """One collective as it ran; times in microseconds of the trace's own clock.

    `lane` is the stream or thread that it ran on, `launch` the (thread, time) of the call that started it.
    """

    begin: float
    end: float
    kind: str
    name: str
    lane: int
    unit: str
    phase: str
    num_bytes: int = 0
    launch: tuple[int, float] | None = None

    @property
    def duration(self) -> float:
        return self.end - self.begin


def new_collective(
    begin: float,
    end: float,
    kind: str,
    name: str,
    lane: int,
    meaning: Meaning,
    num_bytes: int,
    launch: tuple[int, float] | None,
) -> Collective:
    """A collective of the unit whose communication it was started in; of no unit when it was started elsewhere."""
    unit = meaning.unit if meaning.role == COMMUNICATION else ""
    phase = "backward" if kind == "reduce_scatter" else meaning.phase
    return Collective(begin, end, kind, name, lane, unit, phase, num_bytes, launch)
