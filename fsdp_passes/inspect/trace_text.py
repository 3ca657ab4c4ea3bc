"""The trace report as text."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from fsdp_passes.inspect.trace_measure import MeasuredCollective, Owner, StepTimes, describe, format_us
from fsdp_passes.inspect.trace_rank import UNMARKED_STEP

if TYPE_CHECKING:
    from fsdp_passes.inspect.trace import TraceReport, UnitTimes

WIDTH = 112  # of wrapped lines, in characters


def report_text(report: TraceReport, max_collectives: int) -> str:
    """Where each rank's time went, what each unit's communication cost, and the most exposed collectives."""
    numbers = sorted({step.step for step in report.steps} - {UNMARKED_STEP})
    counted = ""
    if numbers:
        counted = f", steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f", step {numbers[0]}"
    lines = [f"FSDP trace report: {_plural(len(report.ranks), 'rank')}{counted}", ""]
    if not numbers:
        hint = "No step is marked in the trace, so all of it counts as one: call prof.step() behind each training step."
        lines += [hint, ""]
    lines += _step_table(report)
    lines += ["", "Per unit, mean of a step of a rank:", *_unit_table(report)]
    groups = exposed_groups(report.collectives)
    if not report.collectives:
        lines += ["", "No collective ran: is this the trace of a distributed run?"]
    elif not groups:
        lines += ["", "Every collective is hidden behind compute."]
    else:
        shown = groups[:max_collectives]
        of_all = f" ({len(shown)} of {len(groups)})" if len(groups) > len(shown) else ""
        lines += ["", f"Exposed collectives{of_all}, most exposed first, mean of a step of a rank:"]
        for group in shown:
            lines += _exposed_lines(group, len(report.steps))
    return "\n".join(lines) + "\n"


def _step_table(report: TraceReport) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("rank", "step time", "= compute", "+ exposed", "+ copies", "+ idle", "communication", "hidden")
    ]
    for rank in report.ranks:
        steps = [step for step in report.steps if step.rank == rank]
        rows.append((str(rank), *_step_cells(steps)))
    if len(report.ranks) > 1:
        rows.append(("mean", *_step_cells(report.steps)))
    return _aligned(rows, num_left=1)


def _step_cells(steps: Sequence[StepTimes]) -> tuple[str, ...]:
    def mean(name: str) -> float:
        return fmean(getattr(step, name) for step in steps)

    names = ("wall_us", "compute_us", "exposed_us", "copies_us", "idle_us", "communication_us")
    return (*(format_us(mean(name)) for name in names), _percent(mean("hidden_us"), mean("communication_us")))


def _unit_table(report: TraceReport) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("unit", "phase", "compute", "idle", "communication", "hidden", "exposed", "waiting", "collectives", "MiB")
    ]
    rows += [_unit_cells(unit, unit.unit or "(no unit)") for unit in report.units]
    rows.append(_unit_cells(report.total, "total"))
    if len(report.ranks) == 1:  # who waits for whom is seen only from several ranks
        rows = [(*row[:7], *row[8:]) for row in rows]
    return _aligned(rows, num_left=2)


def _unit_cells(unit: UnitTimes, name: str) -> tuple[str, ...]:
    times = (unit.compute_us, unit.idle_us, unit.communication_us, unit.hidden_us, unit.exposed_us, unit.waiting_us)
    mib = f"{unit.num_bytes / 2**20:.2f}" if unit.num_bytes else "-"
    return (name, unit.phase, *(format_us(time) if time else "-" for time in times), f"{unit.num_collectives:g}", mib)


def exposed_groups(collectives: Sequence[MeasuredCollective]) -> list[list[MeasuredCollective]]:
    """The same collective of all ranks and steps together, where any of them is exposed; the most exposed first."""
    groups: dict[tuple[str, str, str], list[MeasuredCollective]] = defaultdict(list)
    for one in collectives:
        groups[one.unit, one.phase, one.kind].append(one)
    exposed = [group for group in groups.values() if any(one.exposed_us > 0 for one in group)]
    return sorted(exposed, key=lambda group: -sum(one.exposed_us for one in group))


def _exposed_lines(group: list[MeasuredCollective], num_steps: int) -> list[str]:
    """How much is exposed, why (of the worst of the group), and what hides the rest."""

    def mean(name: str) -> float:
        return sum(getattr(one, name) for one in group) / num_steps

    worst = max(group, key=lambda one: one.exposed_us)
    head = f"  {worst.kind} of {describe((worst.unit, worst.phase))}: {format_us(mean('exposed_us'))} exposed"
    head += f" of {format_us(mean('duration_us'))}"
    if mean("waiting_us") > 0:
        head += f", {format_us(mean('waiting_us'))} of waiting for a slower rank"
    where = f"rank {worst.rank}" + (f", step {worst.step}" if worst.step != UNMARKED_STEP else "")
    lines = [head, *_wrapped(f"worst on {where}, {format_us(worst.exposed_us)}: {worst.reason}")]
    behind: dict[Owner, float] = defaultdict(float)
    for one in group:
        for owner, time in one.hidden_behind.items():
            behind[owner] += time / num_steps
    most = sorted(behind.items(), key=lambda item: -item[1])[:3]
    most = [(owner, time) for owner, time in most if time > 0.01 * mean("hidden_us")]
    if most:
        hidden = ", ".join(f"{describe(owner)} {format_us(time)}" for owner, time in most)
        lines += _wrapped(f"hidden behind the compute of {hidden}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8, break_on_hyphens=False)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _aligned(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Columns as wide as their longest cell, the first `num_left` to the left; a rule below the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(cells).rstrip())
    return [lines[0], "  " + "-" * (len("  ".join(" " * width for width in widths))), *lines[1:]]
