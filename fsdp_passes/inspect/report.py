"""An explanation as text: one table per graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fsdp_passes.inspect.rows import UnitRow

if TYPE_CHECKING:
    from fsdp_passes.inspect.explain import ExplainedGraph, Explanation

FEWEST_TO_FOLD = 4  # equal rows in a run before they are written as one
COLUMNS = ("unit", "collective", "MiB", "starts before", "awaited before", "compute ms", "comm ms", "exposed ms", "why")
IS_NUMBER = (False, False, True, False, False, True, True, True, False)


def explanation_text(explanation: Explanation) -> str:
    """A heading, then for each graph a table of its collectives."""
    total_us = sum(graph.timeline.total_us for graph in explanation.graphs)
    exposed_us = sum(graph.timeline.exposed_us for graph in explanation.graphs)
    before_us = sum(graph.timeline_before.total_us for graph in explanation.graphs)
    lines = [
        f"{explanation.name} over {explanation.ranks}, times predicted for {explanation.cluster.name}",
        f"one step without the optimizer: {total_us / 1e3:.3f} ms, communication exposed for "
        f"{exposed_us / 1e3:.3f} ms; unscheduled it would take {before_us / 1e3:.3f} ms",
    ]
    if explanation.offloaded_bytes:
        lines.append(
            f"of {explanation.sharded_bytes / 2**20:.2f} MiB of shards, {explanation.offloaded_bytes / 2**20:.2f} MiB "
            f"are on the CPU, as are their gradients; the times are without the copies"
        )
    for graph in explanation.graphs:
        lines += ["", *_graph_lines(graph)]
    return "\n".join(lines)


def _graph_lines(graph: ExplainedGraph) -> Iterator[str]:
    timeline = graph.timeline
    compute_us = sum(span.duration_us for span in timeline.spans if span.kind == "compute")
    communication_us = sum(span.duration_us for span in timeline.spans if span.kind != "compute")
    yield (
        f"{timeline.title}: {timeline.total_us / 1e3:.3f} ms = compute {compute_us / 1e3:.3f} + idle "
        f"{(timeline.total_us - compute_us) / 1e3:.3f}; communication {communication_us / 1e3:.3f} ms, of it exposed "
        f"{timeline.exposed_us / 1e3:.3f}"
    )
    peak = max((point.num_bytes for point in timeline.memory), default=0)
    count = graph.report.max_unsharded_units
    yield (
        f"  unsharded at once: at most {peak / 2**20:.2f} MiB in all; of units that reshard, at most {count} "
        f"({graph.report.max_unsharded_bytes / 2**20:.2f} MiB)"
    )
    copied = {kind: [e.bytes for e in graph.schedule if e.kind == kind] for kind in ("copy_to_device", "copy_to_cpu")}
    if any(copied.values()):
        to_device, to_cpu = ((len(sizes), sum(sizes) / 2**20) for sizes in copied.values())
        yield (
            f"  copies: {to_device[0]} of shards to the device, {to_device[1]:.2f} MiB, each ahead of its gather; "
            f"{to_cpu[0]} of gradients to the CPU, {to_cpu[1]:.2f} MiB, each behind its reduction"
        )
    cells = [list(COLUMNS), *_folded(graph.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    for row in cells:
        padded = [
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(row, widths, IS_NUMBER, strict=True)
        ]
        yield "  " + "  ".join(padded).rstrip()
    for report in (graph.report, graph.kernel_report):
        for text in (*report.problems, *report.losses) if report is not None else ():
            yield f"  ! {text}"


def _folded(rows: Sequence[UnitRow]) -> Iterator[list[str]]:
    """Cells of the rows; in a long run of rows with equal numbers only the first and the last are written. A run is of
    one kind of collective, those of the other kind may lie between."""
    shown: list[UnitRow | int] = []
    by_kind = {
        kind: [row for row in rows if row.collective == kind] for kind in dict.fromkeys(r.collective for r in rows)
    }
    for kind_rows in by_kind.values():
        run: list[UnitRow] = []
        for row in [*kind_rows, None]:
            if row is not None and (not run or _numbers(row) == _numbers(run[-1])):
                run.append(row)
                continue
            shown += [run[0], len(run) - 2, run[-1]] if len(run) >= FEWEST_TO_FOLD else run
            run = [row] if row is not None else []
    for item in shown:
        yield [f"… {item} like it", *[""] * (len(COLUMNS) - 1)] if isinstance(item, int) else _cells(item)


def _numbers(row: UnitRow) -> list[str]:
    cells = _cells(row)
    return [cells[1], cells[2], *cells[5:8]]


def _cells(row: UnitRow) -> list[str]:
    return [
        row.unit,
        row.collective,
        f"{row.num_bytes / 2**20:.2f}",
        row.starts_before or "the end",
        row.awaited_before or "the end",
        f"{row.hidden_by_us / 1e3:.3f}",
        f"{row.communication_us / 1e3:.3f}",
        f"{row.exposed_us / 1e3:.3f}",
        row.reason or (f"hidden behind {', '.join(row.behind)}" if row.behind else ""),
    ]
