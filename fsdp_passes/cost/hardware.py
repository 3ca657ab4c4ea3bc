"""Hardware: what an accelerator computes and reads in a second, what a link carries, and how both make up a cluster.

Every constant is the vendor's figure for dense arithmetic and one direction of a link; its source stands beside it.
What of it real kernels reach is said once, in the `…efficiency` fields, so that nothing is scaled down twice:

    matmul_efficiency 0.7, memory_efficiency 0.8
        Together they predict 81.5 ms of compute for the Llama of 8 layers, 4096 tokens, for which 80.5 to 81.2 ms were
        measured on an H200 (docs/performance.md). The best single matrix product reaches 0.80 of the H100's figure,
        0.78 of the B200's and 0.87 of the A100's (S. Bekman, Machine Learning Engineering, "Maximum Achievable Matmul
        FLOPS"). For other accelerators than the H200 both are assumptions.
    NVLink 0.80, 0.82, 0.80
        What NCCL itself counts on in a ring: 20.0, 20.6 and 40.1 GB/s of a link's 25, 25 and 50 (SM80_, SM90_ and
        SM100_NVLINK_BW in its src/graph/topo.h).
    InfiniBand 0.92
        NCCL's maintainers expect 46 to 48 GB/s of a port of 400 Gbit/s (nccl-tests, issue 290), and 12 and 24 GB/s of
        100 and 200 Gbit/s at best (issue 119); the lowest of these, as many ports are busy at once. XDR by analogy.
    Ethernet 0.90
        The same adapters, with more around each packet: RoCE v2 needs 82 bytes for 4096 (preamble, Ethernet, IPv4,
        UDP, transport header, two checksums, gap), InfiniBand 26: 0.92 * (4122 / 4178), rounded down. Frames of 1500
        bytes carry packets of 1024 only, which is 0.86; TCP reaches less. Give a `Link` of your own for these.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_passes.errors import HardwareError

ALGORITHMS = ("ring", "hierarchical", "recursive_doubling")


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One GPU.

    Attributes:
        name: for messages.
        flops: dtype name ("bfloat16") -> dense floating-point operations per second of matrix products. A dtype that
            is missing counts as "float32".
        memory_bandwidth: bytes per second, read and written together.
        memory_bytes: size of its memory.
        source: where the figures are from.
        matmul_efficiency, memory_efficiency: the part of the two rates that kernels of a training step reach.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    source: str
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.8

    def flops_of(self, dtype: torch.dtype) -> float:
        """Operations per second that matrix products of `dtype` reach."""
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name, self.flops["float32"]) * self.matmul_efficiency


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins accelerators.

    Attributes:
        name: for messages.
        bandwidth: bytes per second, one direction, of one accelerator.
        latency_us: microseconds for one hop, the collective library's work included.
        source: where the figures are from.
        efficiency: the part of the bandwidth that large collectives reach. The default is for links of one's own.
    """

    name: str
    bandwidth: float
    latency_us: float
    source: str
    efficiency: float = 0.85

    @property
    def reached(self) -> float:
        """Bytes per second that a large collective reaches."""
        return self.bandwidth * self.efficiency


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` accelerators joined by `intra`, the nodes joined by `inter` (one port per accelerator).

    Attributes:
        algorithm: one of ALGORITHMS, see `fsdp_passes.cost.collectives`.
        base_latency_us: microseconds of one collective before its first hop.
    """

    name: str
    accelerator: Accelerator
    intra: Link
    inter: Link
    per_node: int = 8
    algorithm: str = "ring"
    # baseLat of the ring with the Simple protocol in NCCL's tuning model (src/graph/tuning.cc, 2.2x).
    base_latency_us: float = 8.4

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise HardwareError(self.name, f"algorithm {self.algorithm!r}", f"one of {', '.join(ALGORITHMS)}")
        if self.per_node < 1:
            raise HardwareError(self.name, f"per_node {self.per_node}", "at least 1 accelerator per node")
        rates = {
            "flops": min(self.accelerator.flops.values(), default=0),
            "memory_bandwidth": self.accelerator.memory_bandwidth,
            f"bandwidth of {self.intra.name}": self.intra.bandwidth,
            f"bandwidth of {self.inter.name}": self.inter.bandwidth,
        }
        for what, value in rates.items():
            if not value > 0:
                raise HardwareError(self.name, f"{what} {value}", "a rate above 0")
        if "float32" not in self.accelerator.flops:
            raise HardwareError(self.name, f"flops of {', '.join(self.accelerator.flops)}", 'an entry "float32"')


_H100_FLOPS = {"float8_e4m3fn": 1979e12, "bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 67e12}

ACCELERATORS = {
    "a100": Accelerator(
        "A100 SXM 80GB",
        {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
        2.039e12,
        80e9,
        "NVIDIA A100 80GB datasheet (SXM), dense; float32 without TF32",
    ),
    "h100": Accelerator(
        "H100 SXM", _H100_FLOPS, 3.35e12, 80e9, "NVIDIA H100 datasheet (SXM5), halved to dense; float32 without TF32"
    ),
    "h200": Accelerator(
        "H200 SXM", _H100_FLOPS, 4.8e12, 141e9, "NVIDIA H200 datasheet (SXM), halved to dense; float32 without TF32"
    ),
    "b200": Accelerator(
        "B200 SXM",
        {"float8_e4m3fn": 4.5e15, "bfloat16": 2.25e15, "float16": 2.25e15, "float32": 75e12, "float64": 37e12},
        7.7e12,
        180e9,
        "NVIDIA HGX B200 datasheet, of one GPU, halved to dense; float32 without TF32",
    ),
}

# Latencies per hop: hwLat of the ring with the Simple protocol in NCCL's tuning model (src/graph/tuning.cc), in a node
# (NVLink) and over a network.
_NVLINK_US, _NETWORK_US = 3.4, 14.0

LINKS = {
    "nvlink3": Link("NVLink 3", 300e9, _NVLINK_US, "NVIDIA A100 datasheet: 600 GB/s, both directions", 0.80),
    "nvlink4": Link("NVLink 4", 450e9, _NVLINK_US, "NVIDIA H100 datasheet: 900 GB/s, both directions", 0.82),
    "nvlink5": Link("NVLink 5", 900e9, _NVLINK_US, "NVIDIA HGX B200 datasheet: 1.8 TB/s, both directions", 0.80),
    "infiniband_hdr": Link("InfiniBand HDR", 25e9, _NETWORK_US, "IBTA, 4 lanes of HDR: 200 Gbit/s of data", 0.92),
    "infiniband_ndr": Link("InfiniBand NDR", 50e9, _NETWORK_US, "IBTA, 4 lanes of NDR: 400 Gbit/s of data", 0.92),
    "infiniband_xdr": Link("InfiniBand XDR", 100e9, _NETWORK_US, "IBTA, 4 lanes of XDR: 800 Gbit/s of data", 0.92),
    # The rate of IEEE's MAC is that of whole frames, behind the line code: 100 Gbit/s are 12.5 GB/s of them.
    "ethernet_100g": Link("Ethernet 100G", 12.5e9, _NETWORK_US, "IEEE 802.3ba: 100 Gbit/s at the MAC", 0.90),
    "ethernet_200g": Link("Ethernet 200G", 25e9, _NETWORK_US, "IEEE 802.3bs: 200 Gbit/s at the MAC", 0.90),
    "ethernet_400g": Link("Ethernet 400G", 50e9, _NETWORK_US, "IEEE 802.3bs: 400 Gbit/s at the MAC", 0.90),
}

CLUSTERS = {
    "a100": Cluster("a100", ACCELERATORS["a100"], LINKS["nvlink3"], LINKS["infiniband_hdr"]),
    "h100": Cluster("h100", ACCELERATORS["h100"], LINKS["nvlink4"], LINKS["infiniband_ndr"]),
    "h200": Cluster("h200", ACCELERATORS["h200"], LINKS["nvlink4"], LINKS["infiniband_ndr"]),
    "b200": Cluster("b200", ACCELERATORS["b200"], LINKS["nvlink5"], LINKS["infiniband_ndr"]),
    "h100-ethernet": Cluster("h100-ethernet", ACCELERATORS["h100"], LINKS["nvlink4"], LINKS["ethernet_100g"]),
}


def find_cluster(name: str | Cluster) -> Cluster:
    """A cluster of the table by name, or one read from a JSON file with the fields of `Cluster`.

    In the file, "accelerator", "intra" and "inter" are names of the tables or objects with the fields of
    `Accelerator` and `Link`. Raises `HardwareError` for an unknown name or a file that does not fit.
    """
    if isinstance(name, Cluster):
        return name
    if name in CLUSTERS:
        return CLUSTERS[name]
    path = pathlib.Path(name)
    if path.suffix != ".json":
        raise HardwareError("hardware", repr(name), f"one of {', '.join(CLUSTERS)}, or a file that ends in .json")
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HardwareError(name, f"a file that cannot be read ({error})", "a JSON object") from None
    return _cluster_from(name, data)


def _cluster_from(where: str, data: Any) -> Cluster:
    if not isinstance(data, dict):
        raise HardwareError(where, type(data).__name__, "a JSON object with the fields of Cluster")
    fields = {"name": where, **data}
    try:
        fields["accelerator"] = _entry(where, "accelerator", fields, ACCELERATORS, Accelerator)
        fields["intra"] = _entry(where, "intra", fields, LINKS, Link)
        fields["inter"] = _entry(where, "inter", fields, LINKS, Link)
        return Cluster(**fields)
    except TypeError as error:  # a field too many, too few, or of the wrong type
        raise HardwareError(where, str(error), "the fields of Cluster, Accelerator and Link") from None


def _entry(where: str, field: str, fields: Mapping[str, Any], table: Mapping[str, Any], kind: type) -> Any:
    value = fields.get(field)
    if isinstance(value, dict):
        return kind(**value)
    if isinstance(value, str) and value in table:
        return table[value]
    found = f"{field}: {value!r}" if field in fields else f"no {field}"
    raise HardwareError(
        where, found, f"for {field} one of {', '.join(table)}, or an object with the fields of its class"
    )
