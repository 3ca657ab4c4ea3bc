"""What the names in a trace of torch.profiler mean: kernels, collectives, and the annotations of FSDP."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

ROOT = "root"  # FSDP2 gives the root no name, this library calls it so

COMPUTE = "compute"
COMMUNICATION = "communication"  # packing and unpacking too, which hide nothing
ENTER = "enter"  # behind its end, the unit computes
LEAVE = "leave"  # from its begin, the unit no longer computes
RESET = "reset"  # no unit computes

_COLLECTIVE_KERNEL = re.compile(r"(?:void )?(?:nccl|rccl|msccl)", re.IGNORECASE)
_OURS = re.compile(r"FSDP:([^:].*):(forward_compute|backward_compute|all_gather|reduce_scatter|all_reduce)")
_FSDP2 = re.compile(r"FSDP::(\w+?)(?: \((.*)\)| for (.+))?")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_ROLES = {
    "pre_forward": (ENTER, "forward"),
    "post_forward": (LEAVE, "forward"),
    "pre_backward": (ENTER, "backward"),
    "post_backward_accumulate": (LEAVE, "backward"),
    "post_backward_reshard": (LEAVE, "backward"),
    "root_pre_forward": (RESET, ""),
    "root_post_backward_callback": (RESET, "backward"),
    "backward_prefetch": (COMMUNICATION, "backward"),
}
# Operators that wait for a collective or start one. What runs inside them on the CPU is communication's own copying.
_COLLECTIVE_NAMESPACES = ("c10d::", "_c10d_functional::", "record_param_comms", "symm_mem::")
# Frames around other operators: their time is what they call, or time spent waiting.
_FRAME_NAMESPACES = ("autograd::", "torch::", "fsdp_passes::", "profiler::")
_DTYPE_BYTES = {
    "byte": 1, "unsigned char": 1, "char": 1, "signed char": 1, "bool": 1, "half": 2, "bfloat16": 2, "short": 2,
    "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8,
    "float": 4, "int": 4, "long": 8, "long int": 8, "double": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What an annotation says about the work inside it, or around it.

    Attributes:
        role: COMPUTE and COMMUNICATION hold for what is inside; ENTER, LEAVE and RESET change what holds outside.
        unit: display name; "" where the annotation names none.
        phase: "forward", "backward" or "" where the annotation does not say.
    """

    role: str
    unit: str
    phase: str


@functools.lru_cache(maxsize=4096)
def meaning_of(annotation: str) -> Meaning | None:
    """The meaning of an annotation's name; None when it says nothing about units.

    Known are this library's regions (`FSDP:layers.0:forward_compute`), FSDP2's (`FSDP::all_gather (layers.0)`,
    `FSDP::pre_forward`) and the optimizer's.
    """
    if annotation.startswith("Optimizer."):
        return Meaning(COMPUTE, "", "")
    ours = _OURS.fullmatch(annotation)
    if ours is not None:
        unit, what = ours.groups()
        if what.endswith("_compute"):
            return Meaning(COMPUTE, unit, what.removesuffix("_compute"))
        return Meaning(COMMUNICATION, unit, "" if what == "all_gather" else "backward")
    fsdp2 = _FSDP2.fullmatch(annotation)
    if fsdp2 is None:
        return None
    what, unit, prefetched = fsdp2.groups()
    # Everything else that FSDP2 marks is communication: all_gather, all_gather_copy_out, post_backward_reduce, …
    role, phase = _ROLES.get(what, (COMMUNICATION, "backward" if what.startswith("post_backward") else ""))
    return Meaning(role, "" if role == RESET else unit or prefetched or ROOT, phase)


def step_number(annotation: str) -> int | None:
    """3 for "ProfilerStep#3", None for other annotations."""
    match = _STEP.fullmatch(annotation)
    return int(match[1]) if match else None


@functools.lru_cache(maxsize=4096)
def collective_kind(name: str) -> str:
    """The kind of a collective (as in `Span.kind`) from the name of its kernel or operator; "other" for the rest."""
    plain = name.lower().replace("_", "")
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        if kind.replace("_", "") in plain:
            return kind
    return "other"


@functools.lru_cache(maxsize=4096)
def is_collective_kernel(name: str) -> bool:
    """Whether a GPU kernel belongs to NCCL or to one of its relatives."""
    return _COLLECTIVE_KERNEL.match(name) is not None


@functools.lru_cache(maxsize=4096)
def is_collective_op(name: str) -> bool:
    """Whether a CPU operator starts a collective or waits for one."""
    return name.startswith(_COLLECTIVE_NAMESPACES)


@functools.lru_cache(maxsize=4096)
def is_cpu_work(name: str) -> bool:
    """Whether a CPU operator computes something itself, as `aten::mm` does."""
    return "::" in name and not name.startswith((*_COLLECTIVE_NAMESPACES, *_FRAME_NAMESPACES))


@functools.lru_cache(maxsize=4096)
def is_backend_annotation(name: str) -> bool:
    """Whether a CPU backend marks the run of a collective so, on a thread of its own: `gloo:all_gather`."""
    return name.startswith(("gloo:", "mpi:", "ucc:"))


@functools.lru_cache(maxsize=4096)
def is_transfer(name: str) -> bool:
    """Whether a CPU backend marks a send or a receive so: from the call that starts it to the end of the wait for it,
    on the threads of these."""
    return is_backend_annotation(name) and name.partition(":")[2] in ("send", "recv")


def num_bytes_of(arguments: dict[str, Any]) -> int:
    """Bytes of a collective's larger side, from what the profiler notes with it; 0 where it notes nothing.

    NCCL kernels carry "In msg nelems", "Out msg nelems" and "dtype" ("Float", "BFloat16"). CPU operators carry "Input
    Dims" and "Input type" ("float", "c10::BFloat16") when shapes are recorded, a list of tensors without its type.
    """
    if "Input Dims" in arguments:
        types = arguments.get("Input type", [])
        sizes = [
            _num_elements(dims) * _dtype_bytes(dtype)
            for dims, dtype in zip(arguments["Input Dims"], types, strict=False)
        ]
        return max(sizes, default=0)
    num_elements = [arguments.get(key) for key in ("In msg nelems", "Out msg nelems")]
    return max((n for n in num_elements if isinstance(n, int)), default=0) * _dtype_bytes(arguments.get("dtype", ""))


def _num_elements(dims: Any) -> int:
    if not isinstance(dims, list) or not dims or not all(isinstance(size, int) for size in dims):
        return 0
    return math.prod(dims)


def _dtype_bytes(name: object) -> int:
    plain = str(name).lower().removeprefix("c10::")
    return 1 if plain.startswith("float8") else _DTYPE_BYTES.get(plain, 0)
