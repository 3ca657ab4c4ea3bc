"""Units of collectives that no annotation names, as in compiled code, where only the compute is marked."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import defaultdict

from fsdp_passes.inspect.trace_contexts import Contexts
from fsdp_passes.inspect.trace_names import COMPUTE, ROOT
from fsdp_passes.inspect.trace_work import Collective


@dataclasses.dataclass
class _Run:
    """Neighbouring regions of one phase on one thread: one graph's."""

    phase: str
    last_begin: float
    units: list[str]  # in the order in which each computes first


def infer_units(collectives: list[Collective], contexts: Contexts) -> None:
    """Fill in `unit` and `phase` where they are "" and follow from the order of things; leave the others as they are.

    A collective that a unit's compute starts belongs to that unit (the gradients are made there). Gathers start in
    the order in which the units compute, one for each; where their numbers differ (several dtypes in one unit, say)
    nothing is guessed. A unit that keeps its parameters from the forward needs none in the backward; this is the root.
    """
    gathers: dict[int, list[Collective]] = defaultdict(list)
    for one in collectives:
        if one.launch is None:
            continue
        if not one.phase:
            one.phase = contexts.phase_served(one.unit, *one.launch)
        if one.unit:
            continue
        if one.kind == "all_gather" and contexts.compute_segments(one.launch[0]):
            gathers[one.launch[0]].append(one)
        else:
            _take_unit_before(one, contexts)
    for lane, unnamed in gathers.items():
        _assign_gathers(sorted(unnamed, key=lambda one: one.launch or (0, 0.0)), _runs(contexts, lane))


def _take_unit_before(one: Collective, contexts: Contexts) -> None:
    """The unit that computes where the collective starts, or computed last."""
    assert one.launch is not None
    lane, time = one.launch
    meaning = contexts.at(lane, time)
    if meaning.role == COMPUTE:
        one.unit, one.phase = meaning.unit, meaning.phase or one.phase
    elif one.kind == "reduce_scatter":
        before = [meaning for begin, meaning in contexts.compute_segments(lane) if begin <= time]
        one.unit = before[-1].unit if before else ""


def _runs(contexts: Contexts, lane: int) -> list[_Run]:
    runs: list[_Run] = []
    for begin, meaning in contexts.compute_segments(lane):
        if not runs or runs[-1].phase != meaning.phase:
            runs.append(_Run(meaning.phase, begin, []))
        runs[-1].last_begin = begin
        if meaning.unit not in runs[-1].units:
            runs[-1].units.append(meaning.unit)
    return runs


def _assign_gathers(gathers: list[Collective], runs: list[_Run]) -> None:
    by_run: dict[int, list[Collective]] = defaultdict(list)
    ends = [run.last_begin for run in runs]
    for one in gathers:
        assert one.launch is not None
        by_run[bisect_left(ends, one.launch[1])].append(one)
    for index, group in by_run.items():
        if index == len(runs):
            continue
        units = runs[index].units
        if len(group) != len(units):
            units = [unit for unit in units if unit != ROOT]
        for one, unit in zip(group, units if len(units) == len(group) else [""] * len(group), strict=True):
            one.unit, one.phase = unit, runs[index].phase
