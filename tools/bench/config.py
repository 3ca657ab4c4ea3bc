"""What a measurement is asked to do: made by a tool, read by every rank."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from bench.systems_names import DEFAULT_SYSTEMS


@dataclasses.dataclass
class Config:
    """All settings of one run of `bench.worker`.

    Attributes:
        backend: "gloo" (CPU), "nccl" (one GPU shared by all ranks or one for each), "emulated".
        device: "cpu" or "cuda".
        shapes: names of `models.SHAPES`.
        systems: names of `systems.SYSTEMS`; "compute" first.
        rounds: timed steps of each system.
        warmup: steps before them, those of the check of values aside.
        check_steps: steps of gradient descent whose losses are compared.
        loss_tolerance: the largest relative difference from the losses of the whole model.
        optimizer: "none" or "adamw": what a timed step does behind its backward.
        reduce_dtype: "bf16" or "fp32", of the reduce-scatters of a bf16 shape.
        world_size: emulated ranks; the number of real ranks comes from the environment.
        bandwidths_gb_per_s: bus bandwidths of the emulated link, each its own table.
        latency_us: of the emulated link.
        num_sms: multiprocessors that an emulated collective holds.
        profile: also profile one step of each system (GPU only).
        trace_folder: where to leave the profiles' traces; "" for nowhere.
        sizes_mb: buffers whose grouped and packed collectives are timed alone (real ranks only).
        output: the JSON file.
        time_limit_s: no new shape, system or round begins after this time; what was measured is reported.
        title: what is measured, for the heading of the tables.
    """

    backend: str
    device: str
    shapes: list[str]
    systems: list[str] = dataclasses.field(default_factory=lambda: list(DEFAULT_SYSTEMS))
    rounds: int = 10
    warmup: int = 3
    check_steps: int = 3
    loss_tolerance: float = 1e-4
    optimizer: str = "none"
    reduce_dtype: str = "bf16"
    world_size: int = 0
    bandwidths_gb_per_s: list[float] = dataclasses.field(default_factory=list)
    latency_us: float = 15.0
    num_sms: int = 16
    profile: bool = True
    trace_folder: str = ""
    sizes_mb: list[float] = dataclasses.field(default_factory=list)
    output: str = ""
    time_limit_s: float = 480.0
    title: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        values: dict[str, Any] = json.loads(text)
        return cls(**values)
