"""The options of the `overlap_fsdp` backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fsdp_passes.errors import OptionValueError, UnknownOptionError

INNER_COMPILERS = ("inductor", "aot_eager", "eager")
BUCKET_MODES = ("coalesced", "packed")

# We own these Inductor settings; a second value for one of them would undo the schedule without a word, or what we do
# when a backward raises.
RESERVED_INDUCTOR_OPTIONS = (
    "joint_custom_post_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "reorder_for_compute_comm_overlap",
    "reorder_for_compute_comm_overlap_passes",
    "_post_fusion_custom_pass",
    "cudagraph_policy",
)


@dataclasses.dataclass(frozen=True)
class OverlapOptions:
    """What a user can set through `torch.compile(model, backend=overlap_fsdp, options={...})`.

    Attributes:
        prefetch: number of units whose all-gather is started ahead of the unit that computes (>= 1).
        inner: what runs the scheduled graphs: "inductor", "aot_eager" (ATen kernels, no code generation) or "eager"
            (node by node in Python, for debugging).
        bucket_mode: "coalesced" issues one grouped collective per unit without copies; "packed" copies the shards of
            a unit into one buffer and issues a single collective.
        unify_communication_stream: True serializes all-gathers and reduce-scatters on one stream, so that their
            temporary buffers can be reused for each other; False gives reduce-scatters a group of their own.
        recompute_elementwise: whether the backward computes again what elementwise operators made, also where a matrix
            product of the backward then reads it from memory: a gated MLP saves the two products that it multiplies and
            not their product. False leaves the choice to AOTAutograd's defaults, which save such a tensor.
        nvtx: whether profilers see `FSDP:<unit>:forward_compute` / `backward_compute` around each unit's compute, and
            `FSDP:<unit>:<collective>` around each start. Of the graphs: what hooks of eager units start, and reductions
            that are sent behind a graph (of accumulated gradients, of layers compiled one by one), are shown always.
        verify: whether to check the invariants on the graph and on Inductor's final kernel order.
        agreement_timeout_s: before a graph runs for the first time, ranks compare its collectives; how many seconds a
            rank waits for the others, which may still be compiling. 0 switches the comparison off.
        collective_timeout_s: how many seconds a collective waits for a missing rank before this rank gets an error that
            names it. None leaves the process group's own timeout, any other number replaces it, also for other
            collectives of that group; 0 leaves it too, and waits are not watched.
        inductor: further Inductor options, as in `torch.compile(options=...)`.
    """

    prefetch: int = 1
    inner: str = "inductor"
    bucket_mode: str = "coalesced"
    unify_communication_stream: bool = True
    recompute_elementwise: bool = True
    nvtx: bool = True
    verify: bool = True
    agreement_timeout_s: float = 600.0
    collective_timeout_s: float | None = None
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < 1:
            raise OptionValueError("prefetch", self.prefetch, "an integer of at least 1")
        if self.inner not in INNER_COMPILERS:
            raise OptionValueError("inner", self.inner, f"one of {', '.join(INNER_COMPILERS)}")
        if self.bucket_mode not in BUCKET_MODES:
            raise OptionValueError("bucket_mode", self.bucket_mode, f"one of {', '.join(BUCKET_MODES)}")
        for name in ("unify_communication_stream", "recompute_elementwise", "nvtx", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise OptionValueError(name, getattr(self, name), "True or False")
        if not _is_duration(self.agreement_timeout_s):
            expected = "a finite number of seconds, 0 for never"
            raise OptionValueError("agreement_timeout_s", self.agreement_timeout_s, expected)
        if self.collective_timeout_s is not None and not _is_duration(self.collective_timeout_s):
            expected = "a finite number of seconds, 0 for unwatched, or None for the process group's own"
            raise OptionValueError("collective_timeout_s", self.collective_timeout_s, expected)
        if not isinstance(self.inductor, Mapping):
            raise OptionValueError("inductor", self.inductor, "a dict of Inductor options")
        for name in RESERVED_INDUCTOR_OPTIONS:
            if name in self.inductor:
                raise OptionValueError(
                    "inductor", name, "options other than " + ", ".join(RESERVED_INDUCTOR_OPTIONS) + " (set by us)"
                )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> OverlapOptions:
        """Build from what a user passed. Raises `UnknownOptionError` or `OptionValueError`."""
        given = dict(options or {})
        valid = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in valid:
                raise UnknownOptionError(name, valid)
        return cls(**given)

    def fingerprint(self) -> str:
        """Text that differs whenever the compiled result may: part of the key of Inductor's caches."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["inductor"] = sorted((name, repr(value)) for name, value in self.inductor.items())
        return repr(sorted(values.items()))


def _is_duration(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf
