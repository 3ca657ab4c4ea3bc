"""An explanation as plain data for JSON; docs/explanation.schema.json describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdp_passes.cost.timeline import Timeline
from fsdp_passes.verify import ScheduleReport

if TYPE_CHECKING:
    from fsdp_passes.inspect.explain import ExplainedGraph, Explanation

VERSION = 1  # raised when a field changes its meaning or goes


def explanation_dict(explanation: Explanation) -> dict[str, Any]:
    """Everything that the explanation holds, but for the closed forms of the cost."""
    options = {
        field.name: getattr(explanation.options, field.name) for field in dataclasses.fields(explanation.options)
    }
    del options["inductor"], options["inner"], options["verify"]  # explain's own, not what the user runs with
    del options["agreement_timeout_s"], options["collective_timeout_s"]  # shape no schedule
    cluster = dataclasses.asdict(explanation.cluster)
    cluster["accelerator"]["flops"] = dict(explanation.cluster.accelerator.flops)
    return {
        "version": VERSION,
        "model": explanation.name,
        "world_size": explanation.world_size,
        "num_replicas": explanation.num_replicas,
        "sharded_bytes": explanation.sharded_bytes,
        "offloaded_bytes": explanation.offloaded_bytes,
        "hardware": cluster,
        "options": options,
        "graphs": [_graph_dict(graph) for graph in explanation.graphs],
    }


def _graph_dict(graph: ExplainedGraph) -> dict[str, Any]:
    kernels = graph.kernel_schedule
    return {
        "phase": graph.phase,
        "readable": graph.readable,
        "passes": dict(graph.passes),
        "schedule": [dataclasses.asdict(event) for event in graph.schedule],
        "kernel_schedule": None if kernels is None else [dataclasses.asdict(event) for event in kernels],
        "collectives": [{**dataclasses.asdict(row), "behind": list(row.behind)} for row in graph.rows],
        "report": _report_dict(graph.report),
        "kernel_report": None if graph.kernel_report is None else _report_dict(graph.kernel_report),
        "timeline": timeline_dict(graph.timeline),
        "timeline_before": timeline_dict(graph.timeline_before),
    }


def _report_dict(report: ScheduleReport) -> Mapping[str, Any]:
    values = dataclasses.asdict(report)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def timeline_dict(timeline: Timeline) -> dict[str, Any]:
    """A timeline with its totals."""
    return {
        "title": timeline.title,
        "is_measured": timeline.is_measured,
        "total_us": timeline.total_us,
        "exposed_us": timeline.exposed_us,
        "spans": [dataclasses.asdict(span) for span in timeline.spans],
        "memory": [dataclasses.asdict(point) for point in timeline.memory],
    }
