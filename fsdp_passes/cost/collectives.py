"""How long a collective takes: alpha-beta models, one per algorithm.

The whole tensor (gathered, or before the reduction) has `num_bytes`, so that each of `world_size` ranks sends and
receives (world_size - 1) / world_size of it. An all-gather and a reduce-scatter of the same tensor take the same time:
one is the other run backwards.

    ring                 world_size - 1 hops around all ranks. With several nodes NCCL builds one ring per network port,
                         so that the ports of a node carry it together; the slower of node and network bounds it.
    hierarchical         a ring among the ranks with the same place in their nodes, then one inside each node.
    recursive_doubling   log2(world_size) exchanges, the ones between nodes first, while the pieces are small.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), sections 3 and 4,
give the ring and recursive doubling.
"""

from __future__ import annotations

import dataclasses
import math

from fsdp_passes.cost.hardware import Cluster


def latency_us(world_size: int, cluster: Cluster) -> float:
    """The part of a collective's time that does not depend on its size, in microseconds; 0 for one rank."""
    if world_size <= 1:
        return 0.0
    nodes, per_node = _layout(world_size, cluster)
    inside, between = cluster.intra.latency_us, cluster.inter.latency_us
    if cluster.algorithm == "ring":
        hops_us = (nodes - 1) * between + (world_size - nodes) * inside
    elif cluster.algorithm == "hierarchical":
        hops_us = (nodes - 1) * between + (per_node - 1) * inside
    else:
        hops_us = math.ceil(math.log2(nodes)) * between + math.ceil(math.log2(per_node)) * inside
    return cluster.base_latency_us + hops_us


def bandwidth(world_size: int, cluster: Cluster) -> float:
    """Bytes per second at which a rank receives the (world_size - 1) / world_size of a tensor that it lacks."""
    nodes, per_node = _layout(world_size, cluster)
    inside, between = cluster.intra.reached, cluster.inter.reached
    if nodes == 1:
        return inside
    if cluster.algorithm == "ring":
        return min(inside, between * per_node)
    # A rank receives (nodes - 1) / world_size of the tensor over the network, the rest inside its node.
    seconds_per_byte = (nodes - 1) / world_size / between + (per_node - 1) / per_node / inside
    return (world_size - 1) / world_size / seconds_per_byte


def collective_us(num_bytes: float, world_size: int, cluster: Cluster) -> float:
    """Microseconds of one all-gather or reduce-scatter whose whole tensor has `num_bytes`."""
    if world_size <= 1:
        return 0.0
    received = num_bytes * (world_size - 1) / world_size
    return latency_us(world_size, cluster) + received / bandwidth(world_size, cluster) * 1e6


def between_replicas(cluster: Cluster, num_shards: int) -> Cluster:
    """The cluster as ranks see it that hold the same shard: their neighbours in a node hold the others, so that a node
    has a `num_shards`-th of its ranks for them, and at least one."""
    return dataclasses.replace(cluster, per_node=max(1, cluster.per_node // num_shards))


def all_reduce_us(num_bytes: float, num_replicas: int, num_shards: int, cluster: Cluster) -> float:
    """Microseconds of one all-reduce of `num_bytes` over replicas of `num_shards` ranks each: a reduce-scatter and an
    all-gather of the same tensor, started as one."""
    if num_replicas <= 1:
        return 0.0
    cluster = between_replicas(cluster, num_shards)
    return 2 * collective_us(num_bytes, num_replicas, cluster) - cluster.base_latency_us


def _layout(world_size: int, cluster: Cluster) -> tuple[int, int]:
    """Nodes, and ranks of a full node. A partly filled last node counts as a node."""
    per_node = min(world_size, cluster.per_node)
    return math.ceil(world_size / per_node), per_node
