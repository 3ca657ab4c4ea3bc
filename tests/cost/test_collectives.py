"""collectives.py and hardware.py: times by hand, and what cannot be."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch

from fsdp_passes.cost.collectives import all_reduce_us, bandwidth, collective_us, latency_us
from fsdp_passes.cost.hardware import ACCELERATORS, ALGORITHMS, CLUSTERS, LINKS, Cluster, Link, find_cluster
from fsdp_passes.errors import HardwareError

# Round numbers: 1 GB/s = 1000 bytes per microsecond inside a node, a tenth of it between nodes.
INSIDE = Link("inside", 1e9, 1.0, "test", efficiency=1.0)
BETWEEN = Link("between", 1e8, 10.0, "test", efficiency=1.0)


def cluster(algorithm: str = "ring", per_node: int = 4) -> Cluster:
    return Cluster("test", ACCELERATORS["h100"], INSIDE, BETWEEN, per_node, algorithm, base_latency_us=5.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_communicates_nothing(algorithm: str) -> None:
    assert collective_us(1e9, 1, cluster(algorithm)) == 0


def test_a_ring_in_one_node_by_hand() -> None:
    # 4 ranks: 3 hops of 1 us behind 5 us; 3/4 of 8000 bytes at 1000 bytes/us.
    assert collective_us(8000, 4, cluster()) == pytest.approx(5 + 3 + 6)


def test_a_ring_over_nodes_by_hand() -> None:
    # 8 ranks in 2 nodes: 1 hop of 10 us and 6 of 1 us; the 4 ports of a node carry 400 bytes/us, less than the node.
    assert collective_us(8000, 8, cluster()) == pytest.approx(5 + 10 + 6 + 7000 / 400)


def test_a_hierarchical_collective_by_hand() -> None:
    # 1 hop between nodes with 1/8 of 8000 bytes at 100 bytes/us; 3 hops inside with 3/4 at 1000 bytes/us.
    assert collective_us(8000, 8, cluster("hierarchical")) == pytest.approx(5 + 10 + 3 + 1000 / 100 + 6000 / 1000)


def test_recursive_doubling_moves_as_much_in_fewer_steps() -> None:
    # log2(2) steps of 10 us and log2(4) of 1 us.
    assert collective_us(8000, 8, cluster("recursive_doubling")) == pytest.approx(5 + 10 + 2 + 10 + 6)


def test_with_many_ranks_the_steps_of_a_ring_cost_most() -> None:
    times = {algorithm: latency_us(4096, cluster(algorithm)) for algorithm in ALGORITHMS}
    assert times["ring"] > times["hierarchical"] > times["recursive_doubling"]
    assert times["recursive_doubling"] == 5 + 10 * 10 + 2 * 1


def test_a_ring_is_no_faster_than_the_inside_of_a_node() -> None:
    fast = dataclasses.replace(cluster(), inter=dataclasses.replace(BETWEEN, bandwidth=1e12))
    assert bandwidth(64, fast) == 1e9


def test_every_constant_has_a_source_and_every_cluster_is_complete() -> None:
    for entry in [*ACCELERATORS.values(), *LINKS.values()]:
        assert entry.source
    for name, entry in CLUSTERS.items():
        assert entry.name == name
        assert entry.accelerator.flops_of(torch.bfloat16) > entry.accelerator.flops_of(torch.float32)


def test_links_reach_what_their_sources_say() -> None:
    """GB/s: NCCL's own figures for each NVLink times their number, and what its maintainers expect of a port."""
    reached = {name: round(link.reached / 1e9, 1) for name, link in LINKS.items()}
    assert reached["nvlink3"] == 12 * 20.0
    assert reached["nvlink4"] == pytest.approx(18 * 20.6, rel=0.01)
    assert reached["nvlink5"] == pytest.approx(18 * 40.1, rel=0.01)
    assert (reached["infiniband_hdr"], reached["infiniband_ndr"]) == (23.0, 46.0)
    assert (reached["ethernet_100g"], reached["ethernet_400g"]) == (11.2, 45.0)


def test_a_dtype_without_an_entry_counts_as_float32() -> None:
    accelerator = ACCELERATORS["a100"]
    assert accelerator.flops_of(torch.float8_e4m3fn) == accelerator.flops_of(torch.float32)


def test_a_users_own_hardware_from_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.json"
    link = {"name": "slow", "bandwidth": 1e9, "latency_us": 50, "source": "measured"}
    path.write_text(json.dumps({"accelerator": "h200", "intra": "nvlink4", "inter": link, "per_node": 4}))
    found = find_cluster(str(path))
    assert (found.accelerator, found.inter.bandwidth, found.per_node) == (ACCELERATORS["h200"], 1e9, 4)
    assert find_cluster(found) is found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a file that cannot be read"),
        ("[]", "expected a JSON object with the fields of Cluster, found list"),
        ('{"accelerator": "h900", "intra": "nvlink4", "inter": "nvlink4"}', "for accelerator one of a100, h100"),
        ('{"accelerator": "h100", "intra": "nvlink4"}', "expected for inter one of nvlink3, .*, found no inter"),
        ('{"accelerator": "h100", "intra": "nvlink4", "inter": "nvlink4", "nodes": 2}', "the fields of Cluster"),
        ('{"accelerator": "h100", "intra": "nvlink4", "inter": "nvlink4", "per_node": 0}', "at least 1 accelerator"),
        ('{"accelerator": "h100", "intra": "nvlink4", "inter": "nvlink4", "algorithm": "star"}', "one of ring"),
        (
            '{"accelerator": "h100", "intra": "nvlink4", "inter": {"name": "x", "bandwidth": 0, "latency_us": 1, '
            '"source": ""}}',
            "a rate above 0",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(HardwareError, match=message):
        find_cluster(str(path))


def test_unknown_hardware_lists_the_known() -> None:
    with pytest.raises(HardwareError, match=r"expected one of a100, h100, h200, b200.*found 'h1000'"):
        find_cluster("h1000")


def test_an_all_reduce_between_replicas_by_hand() -> None:
    # Replicas of 4 ranks fill a node each, so that equal shards are in different nodes: there and back 1 hop of 10 us,
    # behind 5 us, and half of 8000 bytes at 100 bytes/us.
    assert all_reduce_us(8000, 2, 4, cluster()) == pytest.approx(5 + 2 * 10 + 2 * 4000 / 100)


def test_an_all_reduce_inside_a_node_by_hand() -> None:
    # Two replicas of 2 ranks share a node.
    assert all_reduce_us(8000, 2, 2, cluster()) == pytest.approx(5 + 2 * 1 + 2 * 4000 / 1000)
    assert all_reduce_us(8000, 1, 2, cluster()) == 0
