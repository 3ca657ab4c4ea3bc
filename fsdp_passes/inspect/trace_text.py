"""The trace report as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from fsdp_passes.inspect.trace_measure import MeasuredCollective, StepTimes, describe, format_us

if TYPE_CHECKING:
    from fsdp_passes.inspect.trace import TraceReport, UnitTimes


def report_text(report: TraceReport, max_collectives: int) -> str:
    """Where each rank's time went, what each unit's communication cost, and the most exposed collectives."""
    numbers = sorted({step.step for step in report.steps} - {0})
    counted = f", steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else ""
    lines = [f"FSDP trace report: {_plural(len(report.ranks), 'rank')}{counted}", ""]
    lines += _step_table(report)
    lines += ["", "Per unit, mean of a step of a rank:", *_unit_table(report)]
    exposed = report.exposed_collectives
    if not report.collectives:
        lines += ["", "No collective ran: is this the trace of a distributed run?"]
    elif not exposed:
        lines += ["", "Every collective is hidden behind compute."]
    else:
        lines += ["", f"Exposed collectives, {min(len(exposed), max_collectives)} of {len(exposed)}, most exposed first:"]
        lines += [_exposed_line(one) for one in exposed[:max_collectives]]
    return "\n".join(lines) + "\n"


def _step_table(report: TraceReport) -> list[str]:
    rows = [("rank", "step time", "= compute", "+ exposed", "+ copies", "+ idle", "communication", "hidden")]
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
    rows = [("unit", "phase", "compute", "idle", "communication", "hidden", "exposed", "waiting", "collectives", "MiB")]
    rows += [_unit_cells(unit, unit.unit or "(no unit)") for unit in report.units]
    rows.append(_unit_cells(report.total, "total"))
    if len(report.ranks) == 1:  # who waits for whom is seen only from several ranks
        rows = [(*row[:7], *row[8:]) for row in rows]
    return _aligned(rows, num_left=2)


def _unit_cells(unit: UnitTimes, name: str) -> tuple[str, ...]:
    times = (unit.compute_us, unit.idle_us, unit.communication_us, unit.hidden_us, unit.exposed_us, unit.waiting_us)
    mib = f"{unit.num_bytes / 2**20:.2f}" if unit.num_bytes else "-"
    return (name, unit.phase, *(format_us(time) if time else "-" for time in times), f"{unit.num_collectives:g}", mib)


def _exposed_line(one: MeasuredCollective) -> str:
    where = f"rank {one.rank}" + (f", step {one.step}" if one.step else "")
    behind = sorted(one.hidden_behind.items(), key=lambda item: -item[1])
    hidden = ", ".join(f"{format_us(time)} of {describe(owner)}" for owner, time in behind[:3])
    text = f"  {format_us(one.exposed_us)} of {format_us(one.duration_us)}: {one.kind} of "
    text += f"{describe((one.unit, one.phase))} [{where}] {one.reason}"
    if hidden:
        text += f"; the rest hides behind {hidden}"
    if one.waiting_us > one.exposed_us / 2:
        text += f"; {format_us(one.waiting_us)} of it waits for a slower rank"
    return text


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
