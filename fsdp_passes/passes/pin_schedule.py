"""Keep the graph's order through Inductor's scheduler."""

from __future__ import annotations

import heapq
from typing import Any

from fsdp_passes._torch_compat import scheduled_fx_nodes, scheduler_node_kind
from fsdp_passes.schedule import bucket_of, origins_in_order

Place = tuple[float, int]  # in the graph, and among the kernels that Inductor handed over


def pin_schedule(snodes: list[Any]) -> list[Any]:
    """Sort Inductor's kernels by the place of their newest FX node, as far as their dependencies allow.

    Before:  start(0) wait(0) compute(0) start(1) wait(1) compute(1)     (fusion and memory reordering moved them)
    After:   start(0) start(1) wait(0) compute(0) wait(1) compute(1)     (the order of the scheduled graph)

    A kernel that fuses steps from far apart takes the place of the newest, or an earlier one when a kernel that reads
    it is due before (a norm's statistics, fused with the update of the running ones at the end of the graph); but never
    one ahead of a collective or wait that it needs itself, which would have to come early too.

    Runs as Inductor's last reordering pass. Does nothing in a graph without buckets. A module-level function, since
    Inductor's cache keys hold its name.
    """
    position = {node: index for index, node in enumerate(scheduled_fx_nodes())}
    if not any(bucket_of(node) is not None for node in position):
        return snodes
    place: list[Place] = []
    for index, snode in enumerate(snodes):
        origins = origins_in_order(snode, position)
        # A kernel without origins stays behind what came before it.
        place.append((position[origins[-1]], index) if origins else (place[-1][0] if place else -1, index))
    needs = _needs(snodes)
    fixed = _fixed_places(snodes, place, position)
    place = _due(_topological_order(needs, place), needs, place, fixed)
    return [snodes[index] for index in _topological_order(needs, place)]


def _needs(snodes: list[Any]) -> list[set[int]]:
    """For each kernel the indices of those that it depends on."""
    maker = {name: index for index, snode in enumerate(snodes) for name in snode.get_buffer_names()}
    needs = [{maker[dep.name] for dep in snode.unmet_dependencies if dep.name in maker} for snode in snodes]
    return [needed - {index} for index, needed in enumerate(needs)]


def _fixed_places(snodes: list[Any], place: list[Place], position: dict[Any, int]) -> list[float | None]:
    """Where what must stay is done: a collective's start, a region, and for a wait the last wait of its bucket, since
    nothing may run between them. None for compute."""
    last_wait: dict[Any, float] = {}
    buckets = []
    for index, snode in enumerate(snodes):
        origins = origins_in_order(snode, position) if scheduler_node_kind(snode) == "wait" else []
        bucket = bucket_of(origins[-1]) if origins else None
        buckets.append(bucket)
        if bucket is not None:
            last_wait[bucket] = max(place[index][0], last_wait.get(bucket, -1))
    return [
        None if scheduler_node_kind(snode) == "compute" else last_wait.get(bucket, place[index][0])
        for index, (snode, bucket) in enumerate(zip(snodes, buckets, strict=True))
    ]


def _due(order: list[int], needs: list[set[int]], place: list[Place], fixed: list[float | None]) -> list[Place]:
    """`place`, but earlier for kernels that an earlier one reads: where that one is, behind what they need themselves.

    `order` satisfies the dependencies. What is fixed stays.
    """
    latest = [-1.0] * len(needs)  # the place of the last fixed step that the kernel needs
    for index in order:
        for other in needs[index]:
            own = fixed[other]
            latest[index] = max(latest[index], latest[other], -1.0 if own is None else own)
    due = list(place)
    for index in reversed(order):
        for other in needs[index]:
            if fixed[other] is None and due[index][0] < due[other][0]:
                # Half a place: behind that step and ahead of the next one.
                due[other] = min(due[other], (max(due[index][0], latest[other] + 0.5), place[other][1]))
    return due


def _topological_order(needs: list[set[int]], place: list[Place]) -> list[int]:
    """The indices by place, each behind what it needs."""
    users: list[list[int]] = [[] for _ in needs]
    num_missing = [len(needed) for needed in needs]
    for index, needed in enumerate(needs):
        for other in needed:
            users[other].append(index)
    ready = [(place[index], index) for index in range(len(needs)) if num_missing[index] == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for user in users[index]:
            num_missing[user] -= 1
            if num_missing[user] == 0:
                heapq.heappush(ready, (place[user], user))
    assert len(order) == len(needs), "the scheduler's dependencies have a cycle"
    return order
