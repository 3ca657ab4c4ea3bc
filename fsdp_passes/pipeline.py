"""The order of the passes, and the runner: only this file knows both.

The runner lints after each pass that changed something, times each pass, keeps the graph's text when somebody records,
and verifies. Who calls it recompiles the module, as Inductor does at the end of its post-grad passes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fsdp_passes._torch_compat import (
    CustomGraphPass,
    SchedulerPass,
    get_hash_for_files,
    is_backward_graph,
    scheduled_graph_module,
    trace_artifact,
)
from fsdp_passes.arguments import ReduceGrad, Unshard
from fsdp_passes.errors import ProcessGroupGoneError
from fsdp_passes.generated_code import check_generated_code
from fsdp_passes.ops import REDUCE_GRAD, REDUCE_REPLICAS, UNSHARD
from fsdp_passes.options import OverlapOptions
from fsdp_passes.passes.agree_on_schedule import agree_on_schedule
from fsdp_passes.passes.annotate_collectives import annotate_collectives
from fsdp_passes.passes.annotate_regions import annotate_regions
from fsdp_passes.passes.await_collectives import await_collectives
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_all_reduces import bucket_all_reduces
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.keep_reads_of_written import keep_reads_of_written
from fsdp_passes.passes.pin_schedule import pin_schedule
from fsdp_passes.passes.prefetch_across_graphs import prefetch_across_graphs
from fsdp_passes.passes.reshard_to_group import read_first_gather, reshard_to_group
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from fsdp_passes.passes.tag_reshard_after_forward import tag_reshard_after_forward
from fsdp_passes.schedule import (
    ScheduleEvent,
    collective_order_of_kernels,
    events_from_graph,
    events_from_kernels,
)
from fsdp_passes.verify import ScheduleReport, verify_schedule

log = logging.getLogger(__name__)

RECORD_META = "fsdp_passes_record"

# The passes behind `insert_unshard` whose results are kept for looking at, in the order in which they run.
PASS_NAMES = (
    "bucket_all_gathers",
    "bucket_reduce_scatters",
    "schedule_one_layer_ahead",
    "prefetch_across_graphs",
    "annotate_regions",
    "await_collectives",
)


@dataclasses.dataclass
class GraphRecord:
    """What the passes did to one graph.

    Attributes:
        phase: "forward" (inference graphs too) or "backward".
        passes: pass name -> the graph's text after it, in order; filled only inside `record_compilations`.
        snapshots: copies of the graph, also only there: "traced" (one `unshard` per parameter), "bucketed" (one
            collective per unit, not scheduled yet) and "scheduled" (as it leaves the passes).
        pass_us: pass name -> its duration in microseconds.
        events: the schedule on the FX graph.
        kernel_events: the schedule on Inductor's final order; None when another inner compiler ran.
        kernel_collectives: every collective's start and wait in that order, the user's own included, as
            `generated_code.collective_order` names them.
        report: what `verify_schedule` found on the FX graph; None with `verify=False`.
        kernel_report: the same on the final order.
    """

    phase: str
    passes: dict[str, str] = dataclasses.field(default_factory=dict)
    snapshots: dict[str, fx.Graph] = dataclasses.field(default_factory=dict)
    pass_us: dict[str, float] = dataclasses.field(default_factory=dict)
    events: list[ScheduleEvent] = dataclasses.field(default_factory=list)
    kernel_events: list[ScheduleEvent] | None = None
    kernel_collectives: list[str] | None = None
    report: ScheduleReport | None = None
    kernel_report: ScheduleReport | None = None


@dataclasses.dataclass
class CompilationRecord:
    """One Dynamo graph that was compiled: the names of its units by index, and its graphs."""

    unit_names: list[str]
    options: OverlapOptions
    graphs: list[GraphRecord] = dataclasses.field(default_factory=list)
    is_observed: bool = False


_observer: contextvars.ContextVar[list[CompilationRecord] | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def record_compilations() -> Iterator[list[CompilationRecord]]:
    """Collect a `CompilationRecord` for everything that `overlap_fsdp` compiles inside.

    A graph that comes from Inductor's cache is not compiled and leaves no `GraphRecord`; pass
    `options={"inductor": {"force_disable_caches": True}}` to see every graph.
    """
    records: list[CompilationRecord] = []
    token = _observer.set(records)
    try:
        yield records
    finally:
        _observer.reset(token)


def start_record(unit_names: list[str], options: OverlapOptions) -> CompilationRecord:
    """A record for one compilation, handed to the surrounding `record_compilations` if there is one."""
    record = CompilationRecord(unit_names, options)
    observer = _observer.get()
    if observer is not None:
        record.is_observed = True
        observer.append(record)
    return record


@functools.cache  # every pass of every graph asks
def _sources_hash() -> bytes:
    package = pathlib.Path(__file__).parent
    return get_hash_for_files(tuple(str(path) for path in sorted(package.rglob("*.py"))))


class TagJointGraph(CustomGraphPass):
    """The passes over the joint graph, as Inductor's joint-graph pass."""

    def __call__(self, graph: fx.Graph) -> None:
        if reshard_to_group(graph):
            graph.lint()
        tag_reshard_after_forward(graph)
        keep_reads_of_written(graph)

    def uuid(self) -> Any:
        return _sources_hash()


class LowerAndSchedule(CustomGraphPass):
    """Everything that happens to a forward or backward graph, as Inductor's last post-grad pass."""

    def __init__(
        self,
        options: OverlapOptions,
        record: CompilationRecord,
        backends: tuple[str, ...] = (),
        *,
        has_peers: bool = False,
    ) -> None:
        self.options = options
        self.record = record
        self.has_peers = has_peers
        # Of the process groups: whether one can average decides what the graph computes behind a reduction.
        self.backends = backends

    def uuid(self) -> Any:
        return (_sources_hash(), self.options.fingerprint(), torch.__version__, self.backends, self.has_peers)

    def __call__(self, graph: fx.Graph) -> None:
        calls: list[Unshard | ReduceGrad] = [*map(Unshard.of, graph.find_nodes(op="call_function", target=UNSHARD))]
        calls += map(ReduceGrad.of, graph.find_nodes(op="call_function", target=REDUCE_GRAD))
        if not calls:
            return
        labels = {call.unit: call.label for call in calls if call.label is not None}
        backward = is_backward_graph(graph)
        options = self.options
        result = GraphRecord("backward" if backward else "forward")
        self.record.graphs.append(result)
        unit_names = self.record.unit_names
        if backward and not dist.is_initialized():  # it is compiled when it first runs, which may be too late
            raise ProcessGroupGoneError(unit_names[calls[0].unit])

        def show(name: str) -> None:
            if self.record.is_observed:
                result.passes[name] = graph_text(graph)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s graph after %s:\n%s", result.phase, name, graph_text(graph))
            trace_artifact(f"fsdp_passes_{result.phase}_after_{name}", lambda: graph_text(graph))

        def keep(name: str) -> None:
            if self.record.is_observed:
                result.snapshots[name] = copy_graph(graph)

        def run(name: str, apply: Callable[[], Any]) -> None:
            begin = time.perf_counter()
            if apply():
                graph.lint()
            result.pass_us[name] = (time.perf_counter() - begin) * 1e6
            show(name)

        read_first_gather(graph)
        show("insert_unshard")
        keep("traced")
        mode = options.bucket_mode
        run("bucket_all_gathers", lambda: bucket_all_gathers(graph, bucket_mode=mode))
        if graph.find_nodes(op="call_function", target=REDUCE_REPLICAS):
            run("bucket_all_reduces", lambda: bucket_all_reduces(graph, bucket_mode=mode))
        run("bucket_reduce_scatters", lambda: bucket_reduce_scatters(graph, bucket_mode=mode))
        keep("bucketed")
        run("schedule_one_layer_ahead", lambda: schedule_one_layer_ahead(graph, prefetch=options.prefetch))
        run("prefetch_across_graphs", lambda: prefetch_across_graphs(graph, is_backward=backward))
        run(
            "annotate_regions",
            lambda: annotate_regions(graph, labels=labels, is_backward=backward, is_shown=options.nvtx),
        )
        annotate_collectives(graph, unit_names=unit_names)
        is_watched = self.has_peers and options.collective_timeout_s != 0
        run(
            "await_collectives",
            lambda: await_collectives(
                graph, labels=labels if is_watched else {}, holds_sent=options.inner == "inductor"
            ),
        )
        keep("scheduled")
        result.events = events_from_graph(graph)
        if self.has_peers and options.agreement_timeout_s > 0:
            timeout_s = float(options.agreement_timeout_s)
            run(
                "agree_on_schedule",
                lambda: agree_on_schedule(graph, labels=labels, is_backward=backward, timeout_s=timeout_s),
            )
        if options.verify:
            where = f"{result.phase} graph of units {', '.join(self.record.unit_names)}"
            result.report = verify_schedule(result.events, prefetch=options.prefetch, where=where)
        if graph.owning_module is not None:
            graph.owning_module.meta[RECORD_META] = (self.record, result)


class SchedulerPassWithSources(SchedulerPass):  # type: ignore[misc]
    """A pass over Inductor's scheduler nodes whose cache key covers the sources of the whole package."""

    def __init__(self, function: Callable[[list[Any]], list[Any]]) -> None:
        self.function = function

    def __call__(self, snodes: list[Any]) -> list[Any]:
        return self.function(snodes)

    def uuid(self) -> Any:
        return (_sources_hash(), self.function.__name__)


def verify_kernel_order(snodes: list[Any]) -> list[Any]:
    """Check the invariants on Inductor's final order; runs behind `pin_schedule` and changes nothing."""
    found = scheduled_graph_module().meta.get(RECORD_META)
    if found is None:
        return snodes
    record, result = found
    events = events_from_kernels(snodes, scheduled_graph_module().graph)
    result.kernel_events = events
    result.kernel_collectives = collective_order_of_kernels(snodes)
    if record.options.verify:
        where = f"Inductor's {result.phase} kernels of units {', '.join(record.unit_names)}"
        result.kernel_report = verify_schedule(events, prefetch=record.options.prefetch, where=where)
    return snodes


def pin_and_verify(snodes: list[Any]) -> list[Any]:
    """`pin_schedule`, then `verify_kernel_order`, as one of Inductor's scheduler passes."""
    return verify_kernel_order(pin_schedule(snodes))


def verify_generated_code(record: CompilationRecord, source: str, is_backward: bool) -> None:
    """Check the code that Inductor generated just now, or took from its cache."""
    if not record.options.verify:
        return
    phase = "backward" if is_backward else "forward"
    made = [graph for graph in record.graphs if graph.phase == phase]
    scheduled = made[-1].kernel_collectives if made else None
    where = f"Inductor's {phase} code of units {', '.join(record.unit_names)}"
    check_generated_code(source, scheduled=scheduled, where=where)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same names and metadata, for looking at: its nodes share the values of the original's."""
    copy = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned = copy.graph_copy(graph, copied)
    copy.output(returned)
    return copy


def graph_text(graph: fx.Graph) -> str:
    """The graph as one line per node: name, shape and dtype, op and arguments; without paths or addresses."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = ""
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            kind = f": {dtype}[{', '.join(str(size) for size in value.shape)}]"
        if node.op == "placeholder":
            lines.append(f"{node.name}{kind} = input")
        elif node.op == "output":
            lines.append(f"return {_arguments_text(node.args[0])}")
        else:
            target = node.target
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            if isinstance(target, torch._ops.OpOverload):
                name = str(target)
            arguments = [_arguments_text(arg) for arg in node.args]
            arguments += [f"{key}={_arguments_text(arg)}" for key, arg in node.kwargs.items()]
            lines.append(f"{node.name}{kind} = {name}({', '.join(arguments)})")
    return "\n".join(lines)


def _arguments_text(argument: Any) -> str:
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(_arguments_text(item) for item in argument) + "]"
    return repr(argument) if isinstance(argument, str) else str(argument)
