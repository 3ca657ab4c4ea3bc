"""The rows of a table of results, out of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.measure import Measured
from bench.report import number, table
from bench.systems_names import BASELINE, COMMUNICATION, SYSTEMS

GIB = 2**30

# (key of a row, heading, digits, only of a GPU)
_COLUMNS = (
    ("median_ms", "step ms", 2, False),
    ("min_ms", "min", 2, False),
    ("max_ms", "max", 2, False),
    ("to_compute", "/ compute", 3, False),
    ("to_limit", "/ max(compute, comm.)", 3, False),
    ("cpu_ms", "CPU ms", 0, False),
    ("exposed_ms", "exposed ms", 2, True),
    ("compute_slowdown", "compute x", 3, True),
    ("matmul_slowdown", "matmul x", 3, True),
    ("idle_ms", "idle ms", 2, True),
    ("allocated_gib", "alloc. GiB", 2, True),
    ("reserved_gib", "reserved GiB", 2, True),
    ("allocated_to_baseline", "alloc. / FSDP2", 3, True),
    ("num_kernels", "kernels", 0, True),
)


def rows_of(systems: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """One row for each system: medians, ratios to compute alone and to the limit, memory, profile.

    `to_limit` needs communication alone, in the backend's own collectives; slow-downs compare the time of compute's
    kernels with compute alone's.
    """
    compute = systems["compute"]
    communication = systems.get("communication")
    limit_ms = None
    if communication is not None:
        limit_ms = max(compute.summary.median_ms, communication.summary.median_ms)
    baseline = systems.get(BASELINE)
    rows = []
    for name, measured in systems.items():
        summary, profile = measured.summary, measured.profile
        row: dict[str, Any] = {
            "system": name,
            "median_ms": summary.median_ms,
            "min_ms": summary.min_ms,
            "max_ms": summary.max_ms,
            "to_compute": summary.median_ms / compute.summary.median_ms,
            "to_limit": summary.median_ms / limit_ms if limit_ms else None,
            "cpu_ms": statistics.median(measured.cpu_ms) if measured.cpu_ms else None,
            "allocated_gib": measured.peak_allocated_bytes / GIB,
            "reserved_gib": measured.peak_reserved_bytes / GIB,
        }
        if baseline is not None and baseline.peak_allocated_bytes:
            row["allocated_to_baseline"] = measured.peak_allocated_bytes / baseline.peak_allocated_bytes
        if profile is not None:
            row |= {"exposed_ms": profile.exposed_ms, "idle_ms": profile.idle_ms, "num_kernels": profile.num_kernels}
            if compute.profile is not None and compute.profile.compute_ms and name not in COMMUNICATION:
                row["compute_slowdown"] = profile.compute_ms / compute.profile.compute_ms
                if compute.profile.matmul_ms:
                    row["matmul_slowdown"] = profile.matmul_ms / compute.profile.matmul_ms
        rows.append(row)
    return rows


def results_table(rows: Sequence[Mapping[str, Any]], *, is_gpu: bool) -> str:
    """Rows of `rows_of` as a Markdown table; columns that only a GPU fills are left out without one."""
    columns = [column for column in _COLUMNS if is_gpu or not column[3]]
    heading = ["system", *(title for _, title, _, _ in columns)]
    cells = [[SYSTEMS[row["system"]], *(number(row.get(key), digits) for key, _, digits, _ in columns)] for row in rows]
    return table(heading, cells)
