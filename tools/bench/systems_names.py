"""Names of the systems, without importing torch: the tools' own processes only start ranks."""

from __future__ import annotations

# In the order of the tables. "compute" is always measured: the others are compared with it.
SYSTEMS: dict[str, str] = {
    "compute": "compute alone",
    "communication": "communication alone",
    "communication_ours": "communication alone, as ours starts it",
    "fsdp2_eager": "FSDP2 eager",
    "fsdp2": "FSDP2, compiled layers",
    "fsdp2_last_kept": "FSDP2, last layer kept",
    "simple_fsdp": "SimpleFSDP, compiled whole",
    "simple_fsdp_overlap": "SimpleFSDP, Inductor's overlap",
    "eager": "ours eager",
    "compiled": "ours compiled",
    "compiled_packed": "ours compiled, packed",
    "compiled_two_streams": "ours compiled, two streams",
    "compiled_prefetch2": "ours compiled, prefetch 2",
    "compiled_last_kept": "ours compiled, last layer kept",
    "compiled_saved": "ours compiled, elementwise saved",
}

DEFAULT_SYSTEMS = ("compute", "communication", "fsdp2_eager", "fsdp2", "simple_fsdp", "eager", "compiled")

# Without a step of a model: they have no losses, and no compute of their own.
COMMUNICATION = ("communication", "communication_ours")

# The system with which peak memory is compared.
BASELINE = "fsdp2"

# A second group would be a second link, which the emulator of one link does not have.
NOT_EMULATED = ("compiled_two_streams",)


def parse_systems(text: str) -> list[str]:
    """Names separated by commas, "compute" added in front; an unknown one is an error that lists the valid ones."""
    names = list(dict.fromkeys(["compute", *(name.strip() for name in text.split(",") if name.strip())]))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"Expected systems out of {', '.join(SYSTEMS)}; found {', '.join(unknown)}.")
    return names
