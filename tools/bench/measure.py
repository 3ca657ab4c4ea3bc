"""Build a system, check its losses, look at its memory and profile; then time systems in turn."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bench.profile import StepProfile, profile_step
from bench.statistics import LossMismatch, Summary, check_losses, in_turn, slowest_rank, summarize
from bench.systems import ComputeAlone, Setting
from bench.systems_names import COMMUNICATION

if TYPE_CHECKING:
    from bench.worker import Worker

Batch = tuple[torch.Tensor, torch.Tensor]

STEPS_PER_SAMPLE = 3


@dataclasses.dataclass
class Measured:
    """One system and everything that was found out about it. Memory and profile are this rank's.

    Attributes:
        losses: of the check's steps, means over the ranks; empty for communication alone.
        build_s: building, compiling and the first steps.
        peak_allocated_bytes: of a step, the system's own parameters included, what other systems hold left out.
        peak_reserved_bytes: the same of what the caching allocator took from the driver. Systems share its pools, so
            this is less exact.
        samples_ms: of one step, means over `STEPS_PER_SAMPLE` in a row; the slowest rank's each.
        cpu_ms: processor time of this rank's process in each timed step, all threads.
    """

    system: Any
    losses: list[float]
    build_s: float
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    profile: StepProfile | None = None
    samples_ms: list[float] = dataclasses.field(default_factory=list)
    cpu_ms: list[float] = dataclasses.field(default_factory=list)

    @property
    def summary(self) -> Summary:
        return summarize(self.samples_ms)

    def as_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "system"}
        fields["profile"] = dataclasses.asdict(self.profile) if self.profile is not None else None
        return fields


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_and_check(
    worker: Worker,
    build: Callable[[Setting], Any],
    setting: Setting,
    name: str,
    batch: Batch,
    others: dict[str, Measured],
    lr: float | None,
) -> tuple[Measured | None, float | None]:
    """Build one system, compare its losses with those of "compute", warm it up, and look at its memory.

    Returns it and the rate of the check, which "compute" chooses. None for a system whose losses are wrong, or that
    fails in an emulated run (it does not fit, or a release's own scheduler does not take the group): the tables say so.
    With real ranks any other error goes on, since the other ranks wait in a collective.

    Raises:
        LossMismatch: the reference's own loss does not move, so that nothing was checked.
    """
    config, device = worker.config, setting.device
    is_gpu = device.type == "cuda"
    if is_gpu:
        gc.collect()
        torch.cuda.empty_cache()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if is_gpu else (0, 0)
    begin_s = time.monotonic()
    try:
        system = build(setting)
        losses = []
        if name not in COMMUNICATION:
            for _ in range(config.check_steps):
                loss, lr = system.train_step(batch, lr)
                losses.append(statistics.fmean(worker.control.all_of(loss.item())))
            known = {other: measured.losses for other, measured in others.items() if measured.losses}
            worst = check_losses({**known, name: losses}, next(iter(known), name), config.loss_tolerance)
            worker.say(f"  losses {[round(loss, 6) for loss in losses]}, off by {worst[name]:.1e}")
        if isinstance(system, ComputeAlone):
            system.drop_masters()
        for _ in range(config.warmup):
            system.step(batch)
        synchronize(device)
    except Exception as error:
        # Every rank compares the same means and comes to the same answer; after another error the other ranks may wait
        # in a collective.
        is_on_every_rank = isinstance(error, LossMismatch) or worker.emulated is not None
        if name == "compute" or not is_on_every_rank:
            raise
        worker.leave_out(setting, name, error)
        return None, lr
    measured = Measured(system, losses, build_s=time.monotonic() - begin_s)
    if is_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            system.step(batch)
        torch.cuda.synchronize()
        measured.peak_allocated_bytes = torch.cuda.max_memory_allocated() - before[0]
        measured.peak_reserved_bytes = torch.cuda.max_memory_reserved() - before[1]
    worker.say(f"  built and warm after {measured.build_s:.1f} s")
    return measured, lr


def profile_each(worker: Worker, systems: dict[str, Measured], batch: Batch, label: str) -> None:
    """Profile one step of each system on every rank; `label` is part of the names of the traces that are kept."""
    folder, rank = worker.config.trace_folder, worker.control.rank
    # The first profile of a process also starts the profiler's own machinery, which would show as idle time.
    profile_step(functools.partial(next(iter(systems.values())).system.step, batch))
    for name, measured in systems.items():
        measured.system.step(batch)
        synchronize(worker.device)
        worker.control.barrier()
        trace = f"{folder}/{label}_{name}_rank{rank}.json" if folder else None
        measured.profile = profile_step(functools.partial(measured.system.step, batch), trace)
    worker.say("profiled")


def time_in_turn(worker: Worker, systems: dict[str, Measured], batch: Batch) -> None:
    """Time `rounds` samples of each system, A B A B, after one round that does not count.

    A sample is `STEPS_PER_SAMPLE` steps without a wait of the host in between, as a training loop runs them: the host
    prepares the next step while the GPU works on this one.
    """
    device = worker.device
    mine: dict[str, list[float]] = {name: [] for name in systems}
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    for index, name in in_turn(list(systems), worker.config.rounds + 1):
        is_new_round = name == next(iter(systems))
        if is_new_round and index > 3 and worker.is_late():
            worker.say(f"the time limit is over after {index - 1} rounds")
            break
        # Both ranks begin together: a step that begins late would be waited for in the other rank's collectives.
        synchronize(device)
        worker.control.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        num_steps = STEPS_PER_SAMPLE if device.type == "cuda" else 1
        for _ in range(num_steps):
            systems[name].system.step(batch)
        synchronize(device)
        if index > 0:
            mine[name].append((time.perf_counter() - begin_s) * 1e3 / num_steps)
            cpu[name].append((time.process_time() - begin_cpu_s) * 1e3 / num_steps)
    by_rank = worker.control.all_of(mine)
    for name, measured in systems.items():
        measured.samples_ms = slowest_rank([samples[name] for samples in by_rank])
        measured.cpu_ms = cpu[name]
    worker.say("timed " + ", ".join(f"{name} {m.summary.median_ms:.1f} ms" for name, m in systems.items()))
