"""Ranks agree on their collectives before a graph runs for the first time.

Ranks compile on their own and never talk to each other meanwhile. If their schedules differ (other options, another
release, a branch that only one rank takes), collectives meet on the wire that do not belong together: the run hangs, or
computes with wrong values. So each graph begins with `agree_on_schedule`. Its arguments are constants of the graph,
which travel with it through every compile cache. The first time that a process meets a fingerprint, it compares it with
the other ranks of the group over the store of `torch.distributed`; from then on the operator looks it up in a set.

The n-th *new* fingerprints of all ranks belong together. A fingerprint says which collectives are started in which
order, and nothing of activations: a rank that meets another sequence length, or compiles a layer once more, brings no
new fingerprint and waits for nobody.

For each n, a group has these keys in the store:

    <n>/rank<r>   what rank r is about to run, as JSON
    <n>/first     the fingerprint that came first
    <n>/count     how many ranks have come
    <n>/done      "agree" or "differ", whichever was known first

Each rank makes a few requests whatever the number of ranks. When a group has agreed on n, nobody reads n - 1 any more
and its keys are deleted, so that a group never has more than two sets of keys.
"""

from __future__ import annotations

import dataclasses
import json
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._torch_compat import default_store, group_of
from fsdp_passes.errors import ScheduleDisagreementError
from fsdp_passes.ops import library
from fsdp_passes.regions import label_text

_LONGEST_PAUSE_S = 0.2  # between two looks into the store: many ranks share one server


class Collective(NamedTuple):
    """One collective of a schedule.

    Attributes:
        name: operator, dtype and, for ours, parameters and bytes of the whole buffer.
        unit: index of the unit in the graph; -1 for a collective of the user's.
    """

    name: str
    unit: int


def encode(schedule: Sequence[Collective]) -> str:
    """A schedule as a graph's constant. Names hold neither ';' nor '@'."""
    return ";".join(f"{name}@{unit}" for name, unit in schedule)


def decode(text: str) -> list[Collective]:
    """The inverse of `encode`."""
    parts = [item.rpartition("@") for item in text.split(";") if item]
    return [Collective(name, int(unit)) for name, _, unit in parts]


def has_peers(group_name: str) -> bool:
    """Whether there are other processes in the group. A process group written in Python that only plays other ranks
    says so itself, with an attribute `has_peers = False`."""
    group = group_of(group_name)
    return group.size() > 1 and dist.get_backend(group) != "fake" and bool(getattr(group, "has_peers", True))


@dataclasses.dataclass
class _Agreed:
    """What the ranks of one group have agreed on, and where in the store they meet."""

    prefix: str
    fingerprints: set[str] = dataclasses.field(default_factory=set)
    num_rounds: int = 0


# By the group itself and weakly: a second group may have the name of one that was destroyed.
_agreed_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreed] = weakref.WeakKeyDictionary()
_num_groups: dict[str, int] = {}


def _agree_on_schedule(
    label: Tensor,
    labels: list[Tensor],
    phase: str,
    group_name: str,
    fingerprint: str,
    schedule: str,
    timeout_s: float,
) -> None:
    group = group_of(group_name)
    agreed = _agreed_by_group.get(group)
    if agreed is None:
        number = _num_groups[group_name] = _num_groups.get(group_name, 0) + 1
        agreed = _agreed_by_group[group] = _Agreed(f"fsdp_passes/agreement/{group_name}/{number}")
    if fingerprint in agreed.fingerprints:
        return
    names = [label_text(one) for one in labels]
    mine = {
        "phase": phase,
        "fingerprint": fingerprint,
        "collectives": [[name, names[unit] if unit >= 0 else ""] for name, unit in decode(schedule)],
    }
    agreed.num_rounds += 1
    ranks = dist.get_process_group_ranks(group)
    now = Round(default_store(), f"{agreed.prefix}/{agreed.num_rounds}", dist.get_rank(), ranks, group_name)
    now.meet(json.dumps(mine), fingerprint, timeout_s)
    dataclasses.replace(now, prefix=f"{agreed.prefix}/{agreed.num_rounds - 1}").forget()
    agreed.fingerprints.add(fingerprint)


@dataclasses.dataclass
class Round:
    """One comparison: the ranks of a group meet under `prefix`, `rank` among them."""

    store: dist.Store
    prefix: str
    rank: int
    ranks: list[int]
    group_name: str

    def meet(self, mine: str, fingerprint: str, timeout_s: float) -> None:
        """Publish, and wait until all ranks have published the same. Raises `ScheduleDisagreementError`."""
        store, begin_s = self.store, time.monotonic()
        store.set(self._key(f"rank{self.rank}"), mine)
        if store.compare_set(self._key("first"), "", fingerprint).decode() != fingerprint:
            # Before it is counted: "agree" below comes from a rank that has seen all others counted, too late to win.
            store.compare_set(self._key("done"), "", "differ")
        if store.add(self._key("count"), 1) == len(self.ranks):
            store.compare_set(self._key("done"), "", "agree")
        pause_s = 0.001
        while not store.check([self._key("done")]):
            waited_s = time.monotonic() - begin_s
            if waited_s >= timeout_s:
                self._raise_error(timeout_s)
            time.sleep(min(pause_s, max(timeout_s - waited_s, 0.001)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if store.get(self._key("done")) != b"agree":
            self._raise_error(timeout_s)

    def forget(self) -> None:
        """Delete what this rank has published, and on the first rank what belongs to all."""
        shared = ("first", "count", "done") if self.rank == self.ranks[0] else ()
        for name in (f"rank{self.rank}", *shared):
            self.store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _raise_error(self, timeout_s: float) -> None:
        """Say who differs, or who is missing. Returns when the last rank came just now and agrees."""
        published = {
            rank: json.loads(self.store.get(self._key(f"rank{rank}")))
            for rank in self.ranks
            if self.store.check([self._key(f"rank{rank}")])
        }
        missing = [rank for rank in self.ranks if rank not in published]
        where = f"{published[self.rank]['phase']} graph on group {self.group_name!r}"
        schedules = {rank: [tuple(item) for item in found["collectives"]] for rank, found in published.items()}
        at, sides = first_difference(schedules)
        if at is not None:
            raise ScheduleDisagreementError.differs(where, at, [(_said(item), ranks) for item, ranks in sides], missing)
        if missing:
            first = schedules[self.rank][0]
            raise ScheduleDisagreementError.no_answer(where, missing, timeout_s, _said(first))


Said = tuple[str, str]


def first_difference(
    schedules: dict[int, list[Said]],
) -> tuple[int | None, list[tuple[Said | None, list[int]]]]:
    """Where schedules differ first, and what which ranks start there: (None, []) when they do not.

    `schedules`: rank -> (collective, unit) in order. None stands for the end of a schedule.
    """
    for at in range(max((len(schedule) for schedule in schedules.values()), default=0)):
        sides: dict[Said | None, list[int]] = {}
        for rank, schedule in schedules.items():
            item = schedule[at] if at < len(schedule) else None
            sides.setdefault(item, []).append(rank)
        if len(sides) > 1:
            return at, list(sides.items())
    return None, []


def _said(item: Said | None) -> str:
    if item is None:
        return "no further collective"
    name, unit = item
    return f"{name} of unit {unit!r}" if unit else f"{name} of the model's own"


library.define(
    "agree_on_schedule(Tensor(a!) label, Tensor[] labels, str phase, str group_name, str fingerprint, str schedule, "
    "float timeout_s) -> ()"
)
library.impl("agree_on_schedule", _agree_on_schedule, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_passes::agree_on_schedule", lambda *_: None, lib=library)
AGREE_ON_SCHEDULE = torch.ops.fsdp_passes.agree_on_schedule.default
torch.fx.node.has_side_effect(AGREE_ON_SCHEDULE)
