"""Keep the graph's order through Inductor's scheduler."""

from __future__ import annotations

import heapq
from typing import Any

from fsdp_passes._torch_compat import scheduled_fx_nodes
from fsdp_passes.schedule import bucket_of, origins_in_order


def pin_schedule(snodes: list[Any]) -> list[Any]:
    """Sort Inductor's kernels by the place of their newest FX node, as far as their dependencies allow.

    Before:  start(0) wait(0) compute(0) start(1) wait(1) compute(1)     (fusion and memory reordering moved them)
    After:   start(0) start(1) wait(0) compute(0) wait(1) compute(1)     (the order of the scheduled graph)

    A kernel that fuses steps of two units takes the later one's place. Runs as Inductor's last reordering pass. Does
    nothing in a graph without buckets. A module-level function, since Inductor's cache keys hold its name.
    """
    position = {node: index for index, node in enumerate(scheduled_fx_nodes())}
    if not any(bucket_of(node) is not None for node in position):
        return snodes
    place: list[tuple[int, int]] = []
    for index, snode in enumerate(snodes):
        origins = origins_in_order(snode, position)
        # A kernel without origins stays behind what came before it.
        place.append((position[origins[-1]], index) if origins else (place[-1][0] if place else -1, index))
    return _stable_topological_sort(snodes, place)


def _stable_topological_sort(snodes: list[Any], place: list[tuple[int, int]]) -> list[Any]:
    maker = {name: index for index, snode in enumerate(snodes) for name in snode.get_buffer_names()}
    users: list[list[int]] = [[] for _ in snodes]
    num_missing = [0] * len(snodes)
    for index, snode in enumerate(snodes):
        needed = {maker[dep.name] for dep in snode.unmet_dependencies if dep.name in maker}
        needed.discard(index)
        num_missing[index] = len(needed)
        for other in needed:
            users[other].append(index)
    ready = [(place[index], index) for index in range(len(snodes)) if num_missing[index] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(snodes[index])
        for user in users[index]:
            num_missing[user] -= 1
            if num_missing[user] == 0:
                heapq.heappush(ready, (place[user], user))
    assert len(order) == len(snodes), "the scheduler's dependencies have a cycle"
    return order
