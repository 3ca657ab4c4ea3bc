"""One rank of a measurement: `python -m bench.worker CONFIG`, where CONFIG is a `Config` as JSON.

For each shape: build every system and check its losses, look at its memory and its profile, then time all of them in
turn. Rank 0 prints a table for each shape (and each bandwidth of an emulated link) and keeps the JSON file up to date.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.calibrate import CalibrationError, calibrate
from bench.config import Config
from bench.control import Control
from bench.emulated import EmulatedGroup, LinkModel, init_emulated_group
from bench.measure import Measured, build_and_check, profile_each, time_in_turn
from bench.models import SHAPES
from bench.report import JsonFile, environment, say
from bench.results import results_table, rows_of
from bench.statistics import LossMismatch
from bench.systems import BUILDERS, Setting
from bench.systems_names import NOT_EMULATED, SYSTEMS

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Worker:
    """What lives as long as the process: groups, control, the JSON document."""

    def __init__(self, config: Config, *, group_exists: bool = False) -> None:
        self.config = config
        self.begin_s = time.monotonic()
        self.emulated: EmulatedGroup | None = None
        is_emulated = config.backend == "emulated"
        if config.device == "cuda":
            if not torch.cuda.is_available():
                sys.exit("Expected a CUDA device, found none. Run this on a GPU machine, with a torch built for CUDA.")
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        else:
            torch.set_num_threads(1)
        if is_emulated:
            self.emulated = init_emulated_group(
                self._model(config.bandwidths_gb_per_s[0]), config.device, num_sms=config.num_sms
            )
        elif not group_exists:
            dist.init_process_group(config.backend)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
        )
        self.mesh = init_device_mesh(config.device, (dist.get_world_size(),))
        self.control = Control(is_alone=is_emulated)
        self.is_first = dist.get_rank() == 0
        heading = {"title": config.title, "environment": environment(), "config": vars(config), "results": []}
        self.json = JsonFile(config.output if self.is_first else None, heading)

    def _model(self, gb_per_s: float) -> LinkModel:
        return LinkModel.from_gb_per_s(self.config.world_size, gb_per_s, self.config.latency_us)

    def say(self, text: str) -> None:
        if self.is_first:
            say(text)

    def leave_out(self, setting: Setting, system: str, error: Exception) -> None:
        """Note that a system could not be measured, and why."""
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        self.say(f"  LEFT OUT, {type(error).__name__}: {line}")
        if self.is_first and not isinstance(error, torch.OutOfMemoryError | LossMismatch):
            traceback.print_exc()
        entry = {"shape": setting.shape.text(), "system": system, "error": f"{type(error).__name__}: {line}"}
        self.json.document.setdefault("left_out", []).append(entry)

    def is_late(self) -> bool:
        return self.control.agreed(time.monotonic() - self.begin_s > self.config.time_limit_s)

    def run(self) -> int:
        """Measure everything; the number of shapes and systems without a result."""
        num_failed = 0
        if self.config.sizes_mb:
            from bench.bandwidth import measure_bandwidths

            self.json.document["bandwidths"] = measure_bandwidths(self)
            self.json.save()
        for name in self.config.shapes:
            if self.is_late():
                self.say(f"the time limit of {self.config.time_limit_s:.0f} s is over: {name} is left out")
                num_failed += 1
                continue
            try:
                self.measure_shape(name)
            except (LossMismatch, CalibrationError, torch.OutOfMemoryError) as error:
                if self.emulated is None and isinstance(error, torch.OutOfMemoryError):
                    raise  # the other ranks wait in a collective
                self.say(f"{name}: no times are reported. {error}")
                self.json.document["results"].append({"shape": name, "error": str(error)})
                num_failed += 1
            self.json.save()
            torch._dynamo.reset()
            gc.collect()
            if self.config.device == "cuda":
                torch.cuda.empty_cache()
        return num_failed + len(self.json.document.get("left_out", ()))

    def measure_shape(self, name: str) -> None:
        shape, config = SHAPES[name], self.config
        self.say(f"{name}: {shape.text()}")
        # An fp32 shape reduces in fp32.
        reduce_dtype = _DTYPES[config.reduce_dtype] if shape.bf16 else torch.float32
        setting = Setting(shape, self.mesh, self.device, reduce_dtype, config.optimizer)
        if self.emulated is not None:
            names = [name for name in config.systems if name not in NOT_EMULATED]
            calibration = {}
            for gb_per_s in config.bandwidths_gb_per_s:
                self.emulated.model = self._model(gb_per_s)
                calibration[gb_per_s] = calibrate(self.emulated, setting, self.say)
            self.emulated.model = self._model(config.bandwidths_gb_per_s[0])
            self.json.document.setdefault("calibration", {})[name] = calibration
        else:
            names = list(config.systems)
        batch = shape.batch_of(dist.get_rank(), self.device)
        systems: dict[str, Measured] = {}
        lr: float | None = None
        for system in names:
            if system != "compute" and self.is_late():
                self.say(f"the time limit is over: {name} without {system} and what follows it")
                break
            self.say(f"{name}: building {SYSTEMS[system]}")
            measured, lr = build_and_check(self, BUILDERS[system], setting, system, batch, systems, lr)
            if measured is not None:
                systems[system] = measured
        bandwidths: list[float | None] = [*config.bandwidths_gb_per_s] if self.emulated is not None else [None]
        for gb_per_s in bandwidths:
            if self.emulated is not None and gb_per_s is not None:
                self.emulated.model = self._model(gb_per_s)
            if config.profile and config.device == "cuda":
                label = name if gb_per_s is None else f"{name}_{gb_per_s:g}gb"
                profile_each(self, systems, batch, label)
            time_in_turn(self, systems, batch)
            self._report(name, setting, systems, gb_per_s)

    def _report(self, name: str, setting: Setting, systems: dict[str, Measured], gb_per_s: float | None) -> None:
        rows = rows_of(systems)
        result: dict[str, Any] = {
            "shape": name,
            "text": setting.shape.text(),
            "reduce_dtype": str(setting.reduce_dtype).removeprefix("torch."),
            "bandwidth_gb_per_s": gb_per_s,
            "systems": {key: measured.as_json() for key, measured in systems.items()},
            "rows": rows,
        }
        self.json.document["results"].append(result)
        self.json.save()
        if self.is_first:
            link = ""
            if gb_per_s is not None:
                link = (
                    f"; EMULATED: {self.config.world_size} ranks in one process, link of {gb_per_s:g} GB/s bus "
                    f"bandwidth and {self.config.latency_us:g} us, {self.config.num_sms} SMs held"
                )
            print(f"\n### {self.config.title}: {setting.shape.text()}{link}\n", flush=True)
            print(results_table(rows, is_gpu=self.config.device == "cuda"), flush=True)
            for entry in self.json.document.get("left_out", ()):
                if entry["shape"] == setting.shape.text():
                    print(f"\nLeft out: {SYSTEMS[entry['system']]} ({entry['error']})", flush=True)


def finish(worker: Worker) -> int:
    """Measure everything and leave the groups; the status of the process."""
    num_failed = worker.run()
    worker.control.barrier()
    dist.destroy_process_group()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(finish(Worker(Config.from_json(sys.argv[1]))))
