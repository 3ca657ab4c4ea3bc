"""`explain`: what the compiler makes of a sharded model, without running a step."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn

from fsdp_passes.cost.hardware import Cluster, find_cluster
from fsdp_passes.cost.model_cost import ModelCost
from fsdp_passes.cost.predict import GraphModel
from fsdp_passes.cost.steps import steps_of_graph
from fsdp_passes.cost.symbolic import graph_cost, input_symbol
from fsdp_passes.cost.timeline import Timeline
from fsdp_passes.errors import ExplainError
from fsdp_passes.inspect.capture import Call, capture, prepare, units_of, with_symbols
from fsdp_passes.inspect.report import explanation_text
from fsdp_passes.inspect.rows import UnitRow, unit_rows
from fsdp_passes.options import OverlapOptions
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.pipeline import CompilationRecord, GraphRecord, graph_text
from fsdp_passes.schedule import ALL_GATHER, ScheduleEvent
from fsdp_passes.verify import ScheduleReport, check_schedule, with_unit_names

SIZES = ("batch", "length")


@dataclasses.dataclass(frozen=True)
class ExplainedEvent:
    """One step of a schedule.

    Attributes:
        kind: "start", "wait", "compute"; "copy_to_device" of shards that live on the CPU, which the collective that
            starts next waits for; or "copy_to_cpu" of the gradients that were awaited before it.
        unit: display name of the unit whose collective or copy it is, or whose gathered parameters a compute step
            reads; "" for compute that reads none.
        bytes: of the collective's whole tensors, padding included; of a copy, of this rank's part; 0 for compute.
        collective: "all_gather", "reduce_scatter", "all_reduce"; "" for compute and copies.
        name: of the graph's node or of Inductor's kernel; of a copy, of its collective's.
    """

    kind: str
    unit: str
    bytes: int
    collective: str
    name: str


@dataclasses.dataclass(frozen=True)
class ExplainedGraph:
    """One forward or backward graph.

    Attributes:
        phase: "forward" or "backward".
        readable: the scheduled graph as text, one node a line; each collective's line says whose it is and why there.
        passes: pass name -> the graph's text after it, in order.
        schedule: the events of the scheduled graph.
        kernel_schedule: those of Inductor's final kernel order; None unless asked for with `kernels=True`.
        report: what the verifier finds in the schedule. Nothing is raised: seeing a bad schedule is the point.
        kernel_report: the same for the kernel schedule.
        timeline: predicted from the schedule.
        timeline_before: predicted for the same collectives before they were scheduled: each is awaited at once.
        rows: one per collective, with its times; what the table shows.
        model: what the predictions are made from.
    """

    phase: str
    readable: str
    passes: Mapping[str, str]
    schedule: tuple[ExplainedEvent, ...]
    kernel_schedule: tuple[ExplainedEvent, ...] | None
    report: ScheduleReport
    kernel_report: ScheduleReport | None
    timeline: Timeline
    timeline_before: Timeline
    rows: tuple[UnitRow, ...]
    model: GraphModel


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the passes made of a model. `str()` gives a table per graph.

    Attributes:
        name: the model's class.
        world_size: ranks over which it is sharded.
        num_replicas: how many times it is there, each time over as many ranks.
        cluster: the hardware that the times are predicted for.
        graphs: in the order in which they were compiled, each forward before its backward.
        sharded_bytes: of one rank's shards of all parameters.
        offloaded_bytes: of those, what lives on the CPU.
    """

    name: str
    world_size: int
    cluster: Cluster
    options: OverlapOptions
    graphs: tuple[ExplainedGraph, ...]
    sharded_bytes: int
    call: Call = dataclasses.field(repr=False)
    num_replicas: int = 1
    offloaded_bytes: int = 0

    @property
    def ranks(self) -> str:
        """Over which ranks it is sharded, in words."""
        replicas = f" in each of {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}{replicas}"

    def __str__(self) -> str:
        return explanation_text(self)

    @functools.cached_property
    def cost(self) -> ModelCost:
        """The cost in closed form.

        The model is traced once more, with symbols for the leading sizes of its tensor arguments: "batch" and "length".
        A size that the model's code needs as a number stays one. The process group must still exist.
        """
        call = with_symbols(self.call, SIZES)
        found: set[str] = set()
        costs = []
        for record in capture(call, dataclasses.replace(self.options, inner="aot_eager")):
            for graph, model in zip(record.graphs, _models(record, self.world_size), strict=True):
                symbols = _named_symbols(graph.snapshots["scheduled"], call.sizes)
                found |= {str(symbol) for symbol in symbols.values() if isinstance(symbol, sympy.Symbol)}
                costs.append(graph_cost(model, self.cluster, symbols))
        given = {name: size for name, size in zip(SIZES, _leading_sizes(self.call), strict=False) if name in found}
        return ModelCost(tuple(costs), {**given, "world_size": self.world_size}, self.cluster)

    def sections(self) -> list[tuple[str, list[Timeline]]]:
        """For the timeline page: per graph a title, and the timelines before and after scheduling."""
        return [(graph.timeline.title, [graph.timeline_before, graph.timeline]) for graph in self.graphs]

    def to_dict(self) -> dict[str, Any]:
        """As plain data; the schema is in docs/explanation.schema.json."""
        from fsdp_passes.inspect.export import explanation_dict

        return explanation_dict(self)

    def to_json(self, path: str | pathlib.Path) -> None:
        """Write `to_dict` to a file."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_html(self, path: str | pathlib.Path) -> None:
        """Write one self-contained page with the timelines of all graphs, before and after scheduling."""
        from fsdp_passes.inspect.page import PageSection, timeline_page

        heading = f"{self.name} over {self.ranks}, predicted for {self.cluster.name}"
        page = timeline_page(heading, [PageSection(title, timelines) for title, timelines in self.sections()])
        pathlib.Path(path).write_text(page, encoding="utf-8")


def explain(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    hardware: str | Cluster = "h100",
    kernels: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Show what `torch.compile(model, backend=overlap_fsdp, options=options)(*args, **kwargs)` and its backward would
    do.

    The graphs are traced, scheduled and verified, and their times predicted; no step runs, nothing is communicated and
    the model stays as it is. It may lie on the meta device, and the process group may be a fake one of any size.

    Args:
        model: sharded by `fully_shard`.
        args, kwargs: as for the model itself. Tensors may be on the meta device when the model is.
        options: as for the backend, see `OverlapOptions`.
        hardware: a `fsdp_passes.cost.hardware.Cluster`, the name of one ("h100"), or a JSON file.
        kernels: whether to let Inductor generate code too, for `kernel_schedule`; takes longer. The graphs are then
            Inductor's, otherwise they are made of ATen's operators, with the same schedule.

    A model whose forward takes a keyword of one of these names is given it through a function around the model.

    Raises:
        ExplainError: the model is not sharded, or nothing could be traced.
        HardwareError, UnknownOptionError, OptionValueError.
    """
    cluster = find_cluster(hardware)
    settings = OverlapOptions.from_dict(options)
    if kernels:
        # A graph from a cache runs no pass, so that there would be nothing to show.
        inductor = {**settings.inductor, "force_disable_caches": True}
        settings = dataclasses.replace(settings, inner="inductor", inductor=inductor, verify=False)
    else:
        settings = dataclasses.replace(settings, inner="aot_eager", verify=False)
    call = prepare(model, args, kwargs)
    params = [param for unit in units_of(model) for param in unit.params]
    world_size = params[0].world_size
    records = capture(call, settings)
    graphs: list[ExplainedGraph] = []
    for record in records:
        for graph, graph_model in zip(record.graphs, _models(record, world_size), strict=True):
            number = f" {len(graphs) // 2 + 1}" if len(records) > 1 else ""
            graphs.append(_explained(graph, graph_model, record, cluster, f"{graph.phase}{number}"))
    sharded = sum(map(_sharded_bytes, params))
    offloaded = sum(_sharded_bytes(param) for param in params if param.home is not None)
    name = str(type(model).__dict__.get("_fsdp_original_class", type(model)).__name__)
    replicas = params[0].num_replicas
    return Explanation(name, world_size, cluster, settings, tuple(graphs), sharded, call, replicas, offloaded)


def _sharded_bytes(param: FsdpParameter) -> int:
    return param.padded_local.numel() * param.orig_dtype.itemsize


def _models(record: CompilationRecord, world_size: int, snapshot: str = "scheduled") -> list[GraphModel]:
    kept: tuple[Any, ...] = ()
    models: list[GraphModel] = []
    for graph in record.graphs:
        is_forward = graph.phase == "forward"
        steps = steps_of_graph(graph.snapshots[snapshot])
        models.append(
            GraphModel(
                graph.phase,
                tuple(steps),
                tuple(record.unit_names),
                world_size,
                () if is_forward else kept,
                record.options.unify_communication_stream,
            )
        )
        if is_forward:
            kept = tuple(step.bucket for step in steps if step.bucket is not None and step.is_kept)
    return models


def _explained(
    graph: GraphRecord, model: GraphModel, record: CompilationRecord, cluster: Cluster, title: str
) -> ExplainedGraph:
    before = dataclasses.replace(model, steps=tuple(steps_of_graph(graph.snapshots["bucketed"])))
    timeline = model.timeline(cluster, title=title)
    kernels = graph.kernel_events
    return ExplainedGraph(
        graph.phase,
        _readable(graph.snapshots["scheduled"]),
        graph.passes,
        _events(graph.events, record.unit_names),
        None if kernels is None else _events(kernels, record.unit_names),
        _checked(graph.events, record),
        None if kernels is None else _checked(kernels, record),
        timeline,
        before.timeline(cluster, title=f"{title}, before scheduling"),
        tuple(unit_rows(model, timeline)),
        model,
    )


def _checked(events: Sequence[ScheduleEvent], record: CompilationRecord) -> ScheduleReport:
    return with_unit_names(check_schedule(events, prefetch=record.options.prefetch), record.unit_names)


def _events(events: Sequence[ScheduleEvent], unit_names: Sequence[str]) -> tuple[ExplainedEvent, ...]:
    """Without regions, and each collective's waits once: they stand together. Copies belong to a collective's start, or
    come behind its waits."""
    found: list[ExplainedEvent] = []
    awaited = set()
    for event in events:
        bucket = event.bucket
        if bucket is not None and (event.kind == "start" or bucket not in awaited):
            if event.kind == "wait":
                awaited.add(bucket)
            unit, copied = unit_names[bucket.unit], bucket.copied_bytes
            if copied and event.kind == "start" and bucket.kind == ALL_GATHER:
                found.append(ExplainedEvent("copy_to_device", unit, copied, "", event.name))
            found.append(ExplainedEvent(event.kind, unit, bucket.num_bytes, bucket.kind, event.name))
            if copied and event.kind == "wait" and bucket.kind != ALL_GATHER:
                found.append(ExplainedEvent("copy_to_cpu", unit, copied, "", event.name))
        elif event.kind == "compute":
            units = [unit_names[read.unit] for read in event.reads if read.kind == ALL_GATHER]
            found.append(ExplainedEvent("compute", units[-1] if units else "", 0, "", event.name))
    return tuple(found)


def _readable(graph: fx.Graph) -> str:
    lines = graph_text(graph).splitlines()
    for index, node in enumerate(graph.nodes):
        custom = node.meta.get("custom", {})
        if "unit" in custom and "reason" in custom:
            lines[index] += f"  # {custom['unit']}: {custom['reason']}"
    return "\n".join(lines)


def _named_symbols(graph: fx.Graph, sizes: Mapping[str, int]) -> dict[sympy.Symbol, Any]:
    """The graph's symbols -> ours, told by their sizes; a symbol of another size stands for that number."""
    by_size = {size: input_symbol(name) for name, size in sizes.items()}
    found: dict[sympy.Symbol, Any] = {}
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            dims = value.shape if isinstance(value, torch.Tensor) else [value]
            for dim in dims:
                if isinstance(dim, torch.SymInt) and isinstance(dim.node.expr, sympy.Symbol):
                    known: Any = dim.node.hint
                    hint = int(known)
                    found[dim.node.expr] = by_size.get(hint, sympy.Integer(hint))
    return found


def _leading_sizes(call: Call) -> tuple[int, ...]:
    """The sizes that `SIZES` names, as the caller gave them."""
    values = [*call.args, *call.kwargs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    first = max(tensors, key=lambda tensor: min(tensor.dim(), len(SIZES)), default=None)
    if first is None:
        raise ExplainError("cost: expected a tensor among the model's arguments, found none to take sizes from.")
    return tuple(first.shape[: len(SIZES)])
