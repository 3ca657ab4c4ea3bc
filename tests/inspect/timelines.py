"""Timelines with known exposed times, for tests of the page."""

from __future__ import annotations

from fsdp_passes.cost.timeline import MemoryPoint, Span, Timeline

COMPUTE_US, GATHER_US, UNIT_BYTES = 1000.0, 600.0, 50 << 20


def forward_and_backward(num_layers: int, *, is_ahead: bool, title: str, kernels_per_unit: int = 1) -> Timeline:
    """Units of equal compute and gathers that are `is_ahead` one unit ahead of it, else right before it.

    Ahead, the first gather of each direction is exposed alone; the reduce-scatters follow on the communication row.
    """
    units = ["root", *(f"layers.{index}" for index in range(num_layers))]
    spans: list[Span] = []
    changes: list[tuple[float, int]] = []
    compute_free = communication_free = last_begin = 0.0

    def communicate(kind: str, unit: str, phase: str, earliest: float, exposed: float) -> float:
        begin = max(communication_free, earliest)
        why = f"{unit} ({phase}) waits for it" if exposed else ""
        spans.append(
            Span("communication", unit, phase, kind, kind, begin, GATHER_US, UNIT_BYTES, max(exposed, 0.0), why)
        )
        return begin

    for phase, order in (("forward", units), ("backward", units[::-1])):
        for unit in order:
            earliest = last_begin if is_ahead else compute_free
            begin = max(communication_free, earliest)
            exposed = max(0.0, begin + GATHER_US - max(begin, compute_free))
            communicate("all_gather", unit, phase, earliest, exposed)
            communication_free = begin + GATHER_US
            last_begin = max(compute_free, communication_free)
            for index in range(kernels_per_unit):
                begin_us, width = last_begin + index * COMPUTE_US / kernels_per_unit, COMPUTE_US / kernels_per_unit
                pause = 0.02 * width if kernels_per_unit > 1 else 0.0
                spans.append(Span("compute", unit, phase, "compute", "aten.mm", begin_us, width - pause))
            compute_free = last_begin + COMPUTE_US
            changes += [(begin, UNIT_BYTES), (compute_free, -UNIT_BYTES)]
            if phase == "backward" and not is_ahead:
                communicate("reduce_scatter", unit, phase, compute_free, GATHER_US)
                communication_free = compute_free = compute_free + GATHER_US
    points, alive = [], 0
    for time, change in sorted(changes):
        alive += change
        points.append(MemoryPoint(time, alive))
    return Timeline(title, tuple(sorted(spans, key=lambda span: span.start_us)), tuple(points))
