"""One row per collective of a graph: where it starts, what hides it, and how long both take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fsdp_passes.cost.predict import GraphModel
from fsdp_passes.cost.simulate import COMPUTE_ROW
from fsdp_passes.cost.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class UnitRow:
    """One collective.

    Attributes:
        unit: display name.
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        num_bytes: of its whole tensors, padding included; of an all-reduce, of one rank's rows.
        starts_before: the unit that computes next behind its start; "" at the end of the graph.
        awaited_before: the unit that computes next behind its wait.
        behind: the units that compute in between, in order.
        hidden_by_us: their compute between start and wait.
        communication_us: how long it takes.
        exposed_us, reason: as in `Span`.
        is_avoidable: whether a matrix product or the like runs between start and wait. Where none does (the first
            gather, the last reductions), no size of the inputs could hide the collective.
    """

    unit: str
    collective: str
    num_bytes: int
    starts_before: str
    awaited_before: str
    behind: tuple[str, ...]
    hidden_by_us: float
    communication_us: float
    exposed_us: float
    reason: str
    is_avoidable: bool


def unit_rows(model: GraphModel, timeline: Timeline) -> Iterator[UnitRow]:
    """The rows of a graph's collectives, in the order of their starts; `timeline` is the model's own."""
    spans = {(span.row == COMPUTE_ROW, span.name): span for span in timeline.spans}
    compute = [
        (spans[True, step.name].duration_us if (True, step.name) in spans else 0.0) if step.kind == "compute" else 0.0
        for step in model.steps
    ]
    waits = {step.bucket: index for index, step in enumerate(model.steps) if step.kind == "wait"}
    for index, step in enumerate(model.steps):
        if step.kind != "start" or step.bucket is None:
            continue
        wait = waits.get(step.bucket, len(model.steps))
        span = spans[False, step.name]
        # What casts shards or gradients belongs to a collective, not to the compute that hides it.
        working = [i for i in range(index, wait) if model.steps[i].cost is not None and not model.steps[i].is_cast]
        units = dict.fromkeys(model.unit_name(model.steps[i].unit) for i in working)
        yield UnitRow(
            model.unit_name(step.bucket.unit),
            step.bucket.kind,
            step.bucket.num_bytes,
            _next_unit(model, index),
            _next_unit(model, wait),
            tuple(units),
            sum(compute[index:wait]),
            span.duration_us,
            span.exposed_us,
            span.reason,
            any(model.steps[i].cost.is_heavy for i in working),  # type: ignore[union-attr]
        )


def _next_unit(model: GraphModel, index: int) -> str:
    for step in model.steps[index:]:
        if step.kind == "compute" and step.cost is not None and not step.is_cast:
            return model.unit_name(step.unit)
    return ""
