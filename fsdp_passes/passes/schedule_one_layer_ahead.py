"""Put every collective where something hides it."""

from __future__ import annotations

import operator

from torch import fx

from fsdp_passes.ownership import gradient_makers
from fsdp_passes.schedule import (
    ALL_GATHER,
    PREPARE,
    REDUCE_SCATTER,
    START,
    Bucket,
    bucket_of,
    gathered_reads,
    is_heavy,
    role_of,
    sent_on,
)


def schedule_one_layer_ahead(graph: fx.Graph, *, prefetch: int) -> bool:
    """Start each unit's all-gather while the unit before it computes, and hide each reduce-scatter behind the next.

    Before:  start(0) wait(0) compute(0) start(1) wait(1) compute(1) start(2) wait(2) compute(2)
    After:   start(0) start(1) wait(0) compute(0) start(2) wait(1) compute(1) wait(2) compute(2)

    The units are taken in the order in which this graph first reads them, so that a backward graph, which reads them
    in reverse, is scheduled by the same rule. With `prefetch` = k, start(i + k) lies before compute(i). Each collective
    is awaited before its own first read.

    A reduce-scatter starts as soon as its last gradient exists. When the next unit's boundary follows without a matrix
    product in between, the boundary's all-gather goes first: somebody waits for it soon, and on one communication
    stream it would otherwise queue behind a reduction that nobody waits for. The reduction's own wait comes behind the
    next reduction's start, so that at most two units' whole gradients are alive. An all-reduce over replicas starts
    where its reduce-scatter is awaited, and is awaited itself one reduction later:

        start(rs 1) wait(rs 2) start(ar 2) wait(ar 3) compute(0) start(rs 0) wait(rs 1) start(ar 1) wait(ar 2)

    The compute itself keeps its order, and so do the user's own collectives. The exception are small steps that
    nothing but the backward reads and that the partitioner left at the end of the forward (a norm's scale): they move
    behind what they are made from. Inductor fuses them with it, and the kernel would take the later place.

    Requires: bucketed collectives.   Ensures: invariants 1 to 3.   Does nothing without buckets.
    Returns: whether the order changed.
    """
    return _Scheduler(graph, prefetch).run()


def _saved_values_early(compute: list[fx.Node]) -> list[fx.Node]:
    """`compute` with every light node that only the output reads moved behind its newest input."""
    late: set[fx.Node] = set()
    for node in reversed(compute):
        is_light = node.op == "call_function" and not is_heavy(node) and not node.is_impure()
        if is_light and all(user in late or user.op == "output" for user in node.users):
            late.add(node)
    # Results that are taken out of a step right behind it are as early as it is: moving them past each other would only
    # be noise. They move with a step that moves itself.
    step: fx.Node | None = None
    for node in compute:
        if node.target is not operator.getitem or node.args[0] is not step:
            step = node
        elif step not in late:
            late.discard(node)
    known = set(compute)
    rank = {node: index for index, node in enumerate(compute)}
    anchor: dict[fx.Node, fx.Node] = {}
    attached: dict[fx.Node, list[fx.Node]] = {}
    for node in compute:
        sources = [anchor.get(arg, arg) for arg in node.all_input_nodes if arg in known]
        if node in late and sources:
            anchor[node] = max(sources, key=lambda source: rank[source])
            attached.setdefault(anchor[node], []).append(node)
    order = []
    for node in compute:
        if node not in anchor:
            order += [node, *attached.get(node, ())]
    return order


Group = tuple[int, int]  # unit and run


class _Scheduler:
    def __init__(self, graph: fx.Graph, prefetch: int) -> None:
        self.graph = graph
        self.prefetch = prefetch
        self.before = list(graph.nodes)
        self.inputs = [node for node in self.before if node.op in ("placeholder", "get_attr")]
        self.compute = _saved_values_early(
            [
                node
                for node in self.before
                if bucket_of(node) is None and node.op not in ("placeholder", "get_attr", "output")
            ]
        )
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()
        starts: dict[Bucket, list[fx.Node]] = {}
        waits: dict[Bucket, list[fx.Node]] = {}
        for node in self.before:
            bucket = bucket_of(node)
            if bucket is not None:
                part = starts if role_of(node) in (PREPARE, START) else waits
                part.setdefault(bucket, []).append(node)
        self.starts, self.waits = starts, waits
        # Reduction -> the one that sends its results on, and the other way round.
        self.sources = {bucket: sent_on(nodes[-1]) for bucket, nodes in starts.items()}
        self.following: dict[Bucket, list[Bucket]] = {}
        for bucket, sources in self.sources.items():
            for source in sources:
                self.following.setdefault(source, []).append(bucket)
        position = {node: index for index, node in enumerate(self.compute)}
        self.first_read = self._first_reads(position)
        self.boundaries: dict[int, list[Group]] = {}  # compute position -> the units whose compute begins there
        self.group_order: list[Group] = []
        begins = self._begins(position)
        for bucket in sorted(self.first_read, key=lambda bucket: (begins[bucket.group], bucket.index)):
            if bucket.group not in self.group_order:
                self.group_order.append(bucket.group)
                self.boundaries.setdefault(begins[bucket.group], []).append(bucket.group)
        self.ready = self._ready_reductions(position)
        self.num_started = 0
        self.awaiting: list[Bucket] = []  # reductions in flight, oldest first

    def _first_reads(self, position: dict[fx.Node, int]) -> dict[Bucket, int]:
        """All-gather -> compute position at which its results are first read."""
        first: dict[Bucket, int] = {}
        for node, buckets in gathered_reads(self.graph).items():
            for bucket in buckets:
                if bucket.kind == ALL_GATHER:
                    first[bucket] = min(position[node], first.get(bucket, position[node]))
        # What nothing but the output reads (its weight is returned, or saved) comes last.
        for bucket in self.starts:
            if bucket.kind == ALL_GATHER:
                first.setdefault(bucket, len(self.compute))
        return first

    def _begins(self, position: dict[fx.Node, int]) -> dict[Group, int]:
        """Compute position at which each unit's compute begins: its first read, or in a backward the product for the
        gradient of one of its weights, which autograd makes before the one that reads the weight."""
        begins: dict[Group, int] = {}
        for bucket, where in self.first_read.items():
            begins[bucket.group] = min(where, begins.get(bucket.group, where))
        makers = [(position[node], unit) for node, unit in gradient_makers(self.graph).items() if is_heavy(node)]
        for group, where in begins.items():
            begins[group] = min([where, *(made for made, unit in makers if unit == group[0])])
        return begins

    def _ready_reductions(self, position: dict[fx.Node, int]) -> dict[int, list[Bucket]]:
        """Compute position -> reductions whose last gradient is made there (-1: all are graph inputs)."""
        ready: dict[int, list[Bucket]] = {}
        for bucket, nodes in self.starts.items():
            if bucket.kind == REDUCE_SCATTER:
                last = max((position.get(arg, -1) for node in nodes for arg in node.all_input_nodes), default=-1)
                ready.setdefault(last, []).append(bucket)
        return ready

    # ---- emission ----------------------------------------------------------------------------------------------------

    def _emit(self, nodes: list[fx.Node]) -> None:
        for node in nodes:
            if node not in self.done:
                self.done.add(node)
                self.order.append(node)

    def _emit_gather_starts(self, up_to: int) -> None:
        for group in self.group_order[self.num_started : up_to]:
            for bucket in sorted(self.first_read, key=lambda bucket: (self.first_read[bucket], bucket.index)):
                if bucket.group == group:
                    self._emit(self.starts[bucket])
        self.num_started = max(self.num_started, up_to)

    def _emit_gather_waits(self, index: int) -> None:
        for bucket, where in self.first_read.items():
            if where == index:
                self._emit(self.waits[bucket])

    def _emit_reductions(self, buckets: list[Bucket]) -> None:
        """Start reductions, then wait for those that were in flight before them, and start what sends their results
        on."""
        for bucket in buckets:
            self._emit(self.starts[bucket])
        if buckets:
            self._await_reductions(buckets)

    def _await_reductions(self, started: list[Bucket]) -> None:
        awaited, self.awaiting = self.awaiting, list(started)
        for earlier in awaited:
            self._emit(self.waits[earlier])
            for bucket in self.following.get(earlier, ()):
                self._emit(self.starts[bucket])
                self.awaiting.append(bucket)

    def _emit_waits_needed_by(self, node: fx.Node) -> None:
        """A compute step may read a reduced gradient (not in a plain backward, but in a user's own graph)."""
        for arg in node.all_input_nodes:
            bucket = bucket_of(arg)
            if bucket is not None and arg not in self.done:
                self._emit_whole(bucket)

    def _emit_whole(self, bucket: Bucket) -> None:
        for source in self.sources[bucket]:
            self._emit_whole(source)
        self._emit(self.starts[bucket])
        self._emit(self.waits[bucket])

    def _reaches_boundary(self, index: int) -> bool:
        """Whether the next unit's boundary follows position `index` without anything to hide communication behind."""
        for following in range(index + 1, len(self.compute)):
            if following in self.boundaries:
                return True
            if is_heavy(self.compute[following]):
                return False
        return False

    def run(self) -> bool:
        if not self.starts:
            return False
        self._emit(self.inputs)
        # Nothing is whole yet: as many as will be whole at once from then on. In a backward they travel while the
        # head's gradients are computed, and the loss where it is in the graph.
        self._emit_gather_starts(1 + self.prefetch)
        held = self.ready.get(-1, [])
        num_passed = 0
        for index in range(len(self.compute) + 1):
            for _ in self.boundaries.get(index, ()):
                self._emit_gather_starts(num_passed + 1 + self.prefetch)
                self._emit_reductions(held)
                held = []
                num_passed += 1
            self._emit_gather_waits(index)
            if index == len(self.compute):
                break
            node = self.compute[index]
            self._emit_waits_needed_by(node)
            self._emit([node])
            held = held + self.ready.get(index, [])
            if held and not self._reaches_boundary(index):
                self._emit_reductions(held)
                held = []
        self._emit_reductions(held)
        while self.awaiting:
            self._await_reductions([])
        return self._apply()

    def _apply(self) -> bool:
        output = self.before[-1]
        assert len(self.order) == len(self.before) - 1, "a node was lost while scheduling"
        if self.order == self.before[:-1]:
            return False
        for node in self.order:
            output.prepend(node)
        return True
