"""How long a collective takes on a modelled link."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LinkModel:
    """Latency plus bytes over bus bandwidth, as nccl-tests defines it.

    A ring moves (world - 1) / world of the whole buffer over each link in an all-gather or a reduce-scatter, and twice
    that in an all-reduce. The bus bandwidth is the rate of that traffic, so it does not depend on the number of ranks.

    Attributes:
        world_size: ranks of the ring.
        bandwidth_bytes_per_us: bus bandwidth; 1 GB/s is 1000 bytes per microsecond.
        latency_us: paid once for each collective, a grouped one included.
    """

    world_size: int
    bandwidth_bytes_per_us: float
    latency_us: float

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.bandwidth_bytes_per_us <= 0 or self.latency_us < 0:
            raise ValueError(
                "Expected world_size >= 1, bandwidth > 0 and latency >= 0, found "
                f"{self.world_size}, {self.bandwidth_bytes_per_us} bytes/us and {self.latency_us} us."
            )

    @classmethod
    def from_gb_per_s(cls, world_size: int, gb_per_s: float, latency_us: float) -> LinkModel:
        """A model of `gb_per_s` GB/s (10^9 bytes per second) of bus bandwidth."""
        return cls(world_size, gb_per_s * 1e3, latency_us)

    def gather_us(self, whole_bytes: int) -> float:
        """An all-gather to, or a reduce-scatter from, buffers of `whole_bytes` in all."""
        moved_bytes = whole_bytes * (self.world_size - 1) / self.world_size
        return self.latency_us + moved_bytes / self.bandwidth_bytes_per_us

    def all_reduce_us(self, whole_bytes: int) -> float:
        """An all-reduce of buffers of `whole_bytes` in all."""
        return 2 * self.gather_us(whole_bytes) - self.latency_us
