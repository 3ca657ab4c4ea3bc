"""LookAhead: what comes next, learnt from the step before."""

from __future__ import annotations

import functools
from typing import Any

from fsdp_passes.lookahead import Entry, LookAhead


class Run:
    """Enters entries by name ("f0", "b1") and notes which gathers are started where: "f0>f1"."""

    def __init__(self) -> None:
        self.lookahead = LookAhead()
        self.notes: list[str] = []
        self.units: dict[str, Any] = {}
        self.current = ""

    def enter(self, *names: str, grad: bool = True) -> list[str]:
        self.notes = []
        for name in names:
            is_backward = name[0] == "b"
            unit = self.units.setdefault(name[1:], object())
            entry = Entry(unit, True, is_backward, is_backward, grad)
            self.lookahead.enter(entry, functools.partial(self._note, name))
            self.current = name
            self.lookahead.start_next()
        return self.notes

    def _note(self, name: str) -> None:
        self.notes.append(f"{self.current}>{name}")


STEP = ["f0", "f1", "f2", "b2", "b1", "b0"]
ALL = ["f0>f1", "f1>f2", "f2>b2", "b2>b1", "b1>b0"]


def test_nothing_is_started_in_the_first_step() -> None:
    assert Run().enter(*STEP) == []


def test_from_the_second_step_on_each_entry_but_the_first_is_started_ahead() -> None:
    run = Run()
    run.enter(*STEP)
    assert run.enter(*STEP) == ALL
    assert run.enter(*STEP) == ALL


def test_an_evaluation_has_an_order_of_its_own() -> None:
    run = Run()
    run.enter(*STEP)
    assert run.enter("f0", "f1", "f2", grad=False) == []
    assert run.enter("f0", "f1", "f2", grad=False) == ["f0>f1", "f1>f2"]
    assert run.enter(*STEP) == ALL


def test_two_forwards_before_one_backward_start_nothing_across() -> None:
    run = Run()
    twice = ["f0", "f1", "f0", "f1", "b1", "b0"]
    run.enter(*twice)
    run.enter(*twice)
    for _ in range(3):  # neither the other forward nor, behind the first one, the backward
        assert run.enter(*twice) == ["f0>f1", "f0>f1", "b1>b0"]
    run.enter(*STEP)
    run.enter(*STEP)
    assert run.enter(*STEP) == ALL


def test_a_forward_without_backward_is_forgotten_behind_two_whole_steps() -> None:
    run = Run()
    run.enter("f0", "b0")
    assert run.enter("f0", "b0") == ["f0>b0"]
    run.enter("f0")
    assert run.enter("f0", "b0") == []
    assert run.enter("f0", "b0") == []
    assert run.enter("f0", "b0") == ["f0>b0"]


def test_a_new_order_is_followed_from_the_next_step_on() -> None:
    run = Run()
    run.enter(*STEP)
    run.enter("f0", "f2", "b2", "b0")
    assert run.enter("f0", "f2", "b2", "b0") == ["f0>f2", "f2>b2", "b2>b0"]


def test_what_comes_behind_an_exception_follows_nothing() -> None:
    run = Run()
    run.enter(*STEP)
    run.enter("f0", "f1")
    run.lookahead.interrupt()
    assert run.lookahead.next_entry() is None
    assert run.enter(*STEP) == ALL
