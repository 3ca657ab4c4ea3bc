"""The schedule of a graph as data: buckets of collectives, and the events of a graph or of Inductor's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_passes._torch_compat import collective_name, scheduler_node_kind
from fsdp_passes.gather_ops import START_NEXT_GRAPH
from fsdp_passes.ops import REGION_BEGIN, REGION_END
from fsdp_passes.regions import ALL_GATHER_REGION, ALL_REDUCE_REGION, REDUCE_SCATTER_REGION
from fsdp_passes.watchdog import AWAIT_COLLECTIVE

# The region around a collective has the name of its kind.
ALL_GATHER = ALL_GATHER_REGION
REDUCE_SCATTER = REDUCE_SCATTER_REGION
ALL_REDUCE = ALL_REDUCE_REGION

BUCKET_META = "fsdp_bucket"
ROLE_META = "fsdp_role"
PREPARE, START, WAIT, FINISH = "prepare", "start", "wait", "finish"


@dataclasses.dataclass(frozen=True)
class ShardedShape:
    """A whole parameter or gradient that a collective carries, or a part of: its rows without padding, and bytes per
    row on the wire."""

    rows: int
    bytes_per_row: int

    def padded_rows(self, world_size: Any) -> Any:
        """Rows with padding: every rank has as many."""
        return -(-self.rows // world_size) * world_size


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One collective: the parameters of one unit that travel together.

    Attributes:
        kind: ALL_GATHER, REDUCE_SCATTER, or ALL_REDUCE: over the replicas, of what a reduce-scatter made.
        index: position among the buckets of this kind in the graph.
        unit: index of the unit in the graph, in order of first use in the user's code.
        num_params: parameters in it.
        num_bytes: bytes of the gathered tensors, or of the gradients before reduction, padding included. An all-reduce
            carries this rank's rows only.
        dtype: dtype on the wire.
        reshard: whether the gathered tensors are dropped after the forward (all-gathers only).
        run: counts the places at which the graph uses the unit, with another unit in between. Gathers of one run are
            started together.
        half: 1 for the second half of a run that is split because nothing can hide it, else 0.
        shapes: what it carries, in order; from them follow its bytes for any number of ranks.
        num_ranks: ranks that it spans. 0 where nobody said: those over which the parameters are sharded.
        copied_bytes: of this rank's shards that are copied from the CPU to the device ahead of it, or of its gradients
            that are copied to the CPU behind it; 0 where both live on the device.
    """

    kind: str
    index: int
    unit: int
    num_params: int
    num_bytes: int
    dtype: torch.dtype
    reshard: bool = True
    run: int = 0
    half: int = 0
    shapes: tuple[ShardedShape, ...] = dataclasses.field(default=(), compare=False)
    num_ranks: int = dataclasses.field(default=0, compare=False)
    copied_bytes: int = dataclasses.field(default=0, compare=False)

    @property
    def group(self) -> tuple[int, int]:
        """Unit and run: what is scheduled as one."""
        return self.unit, self.run

    @property
    def label(self) -> str:
        """Short name for messages: `all_gather 3 (unit 2)`."""
        return f"{self.kind} {self.index} (unit {self.unit})"


@dataclasses.dataclass(frozen=True)
class ScheduleEvent:
    """One step of a schedule.

    Attributes:
        kind: "start", "wait", "compute", "region_begin", "region_end", or "start_next": the first gather of the graph
            that runs behind this one is started.
        name: of the graph node or kernel.
        bucket: the collective that is started or awaited.
        reads: buckets whose results a compute step reads, directly or through views and casts; of a start, those whose
            results it sends on.
        is_heavy: whether a compute step holds a matrix product, a convolution or the like.
        text: the region's phase, for region events.
    """

    kind: str
    name: str
    bucket: Bucket | None = None
    reads: tuple[Bucket, ...] = ()
    is_heavy: bool = False
    text: str = ""


def bucket_of(node: fx.Node) -> Bucket | None:
    """The bucket that a node was made for, if any."""
    return node.meta.get(BUCKET_META)


def role_of(node: fx.Node) -> str | None:
    """PREPARE, START, WAIT or FINISH for a bucket's nodes."""
    return node.meta.get(ROLE_META)


def is_wait(node: fx.Node) -> bool:
    """Whether a bucket's node waits: for one result, or as the passes leave it for all of them."""
    waits = (torch.ops._c10d_functional.wait_tensor.default, AWAIT_COLLECTIVE)
    return role_of(node) == WAIT and node.target in waits


def awaited_by(wait: fx.Node) -> list[fx.Node]:
    """The results that a wait waits for."""
    results = wait.args[0]
    return list(results) if isinstance(results, list | tuple) else [results]  # type: ignore[list-item, arg-type]


_HEAVY = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "convolution", "convolution_backward", "dot", "mv", "addmv")


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is worth hiding communication behind: matrix products, convolutions, attention, foreign ops."""
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.split("::")[1]
    if target.namespace in ("aten", "prims", "inductor_prims"):
        return name in _HEAVY or "attention" in name or name.startswith(("_scaled_mm", "_cdist", "_fft"))
    return target.namespace not in ("_c10d_functional", "fsdp_passes")


_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def gathered_reads(graph: fx.Graph) -> dict[fx.Node, tuple[Bucket, ...]]:
    """For each compute node, the buckets whose results it reads through nothing but views and casts."""
    return _reads_and_carriers(graph)[0]


def gathered_outputs(graph: fx.Graph) -> set[Bucket]:
    """The buckets of which a graph returns a result, or a view or cast of one: it lives on behind the graph."""
    carriers = _reads_and_carriers(graph)[1]
    return {bucket for node in graph.output_node().all_input_nodes for bucket in carriers.get(node, ())}


def _reads_and_carriers(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, tuple[Bucket, ...]], dict[fx.Node, tuple[Bucket, ...]]]:
    """Compute nodes -> what they read, and nodes that are a gather's result or nothing but a view or cast of one."""
    reads: dict[fx.Node, tuple[Bucket, ...]] = {}
    carries: dict[fx.Node, tuple[Bucket, ...]] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        if bucket is not None:
            if role_of(node) in (WAIT, FINISH):
                carries[node] = (bucket,)
            continue
        if node.op != "call_function":
            continue
        seen = dict.fromkeys(b for arg in node.all_input_nodes for b in carries.get(arg, ()))
        if seen:
            reads[node] = tuple(seen)
            if isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _CASTS):
                carries[node] = tuple(seen)
    return reads, carries


def sent_on(start: fx.Node) -> tuple[Bucket, ...]:
    """The collectives whose results the collective that begins at `start` carries: an all-reduce sends on what a
    reduce-scatter made."""
    own, found = bucket_of(start), dict[Bucket, None]()
    pending = list(start.all_input_nodes)
    while pending:
        node = pending.pop()
        bucket = bucket_of(node)
        if bucket == own:
            pending += node.all_input_nodes
        elif bucket is not None and role_of(node) in (WAIT, FINISH):
            found[bucket] = None
    return tuple(found)


def events_from_graph(graph: fx.Graph) -> list[ScheduleEvent]:
    """The schedule of an FX graph, in the order of its nodes."""
    reads = gathered_reads(graph)
    events = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        event = _event_of_node(node, reads)
        if event is not None:
            events.append(event)
    return events


def is_marker(node: fx.Node) -> bool:
    """Whether a node computes nothing: the ends of regions, the start of the next graph's gather."""
    return node.target in (REGION_BEGIN, REGION_END, START_NEXT_GRAPH)


def _event_of_node(node: fx.Node, reads: dict[fx.Node, tuple[Bucket, ...]]) -> ScheduleEvent | None:
    bucket, role = bucket_of(node), role_of(node)
    if node.target is REGION_BEGIN:
        return ScheduleEvent("region_begin", node.name, text=str(node.args[1]))
    if node.target is REGION_END:
        return ScheduleEvent("region_end", node.name)
    if node.target is START_NEXT_GRAPH:
        return ScheduleEvent("start_next", node.name)
    if bucket is not None:
        if role == START:
            return ScheduleEvent(START, node.name, bucket, sent_on(node))
        return ScheduleEvent(WAIT, node.name, bucket) if is_wait(node) else None
    return ScheduleEvent("compute", node.name, reads=reads.get(node, ()), is_heavy=is_heavy(node))


def events_from_kernels(snodes: Sequence[Any], graph: fx.Graph) -> list[ScheduleEvent]:
    """The schedule of Inductor's scheduler nodes, in their final order; a kernel reads what any of its origins in
    `graph` reads."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    graph_reads = gathered_reads(graph)
    events = []
    for snode in snodes:
        nodes = origins_in_order(snode, position)
        if not nodes:
            continue
        kind, name = scheduler_node_kind(snode), snode.get_name()
        if kind in ("collective", "wait"):
            role = START if kind == "collective" else WAIT
            # The newest: one that reduces in place counts what made its input among its origins.
            newest = next((node for node in reversed(nodes) if role_of(node) == role), None)
            if newest is not None:
                carried = sent_on(newest) if role == START else ()
                events.append(ScheduleEvent(role, name, bucket_of(newest), carried))
        elif kind == "region":
            marker = _event_of_node(nodes[-1], graph_reads)
            assert marker is not None
            events.append(dataclasses.replace(marker, name=name))
        elif kind == "compute" and any(bucket_of(node) is None for node in nodes):
            reads = dict.fromkeys(b for node in nodes for b in graph_reads.get(node, ()))
            heavy = any(is_heavy(node) for node in nodes)
            events.append(ScheduleEvent("compute", name, reads=tuple(reads), is_heavy=heavy))
    return events


def origins_in_order(snode: Any, position: dict[fx.Node, int]) -> list[fx.Node]:
    """The FX nodes that a scheduler node was made from, in graph order."""
    found = {
        origin
        for part in snode.get_nodes()
        if part.node is not None
        for origin in part.node.get_origins()
        if origin in position
    }
    return sorted(found, key=lambda node: position[node])


def collective_order_of_kernels(snodes: Sequence[Any]) -> list[str]:
    """ "start <operator>" and "wait" for each collective among Inductor's scheduler nodes, the user's own included."""
    order = []
    for snode in snodes:
        for part in snode.get_nodes():
            kind = scheduler_node_kind(part)
            if kind == "collective":
                order.append(f"start {collective_name(part)}")
            elif kind == "wait":
                order.append("wait")
    return order
