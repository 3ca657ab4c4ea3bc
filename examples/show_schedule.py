"""Show the schedule of a compiled model, and measure how much of its communication is hidden behind its compute.

    python examples/show_schedule.py --ranks 2

The schedule is read from Inductor's final kernel order. The measurement is of real steps on gloo ranks on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import ranks
from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.pipeline import CompilationRecord, GraphRecord, record_compilations
from fsdp_passes.schedule import Bucket, ScheduleEvent
from gpt import GPT
from text import Batches, read_stdlib

Intervals = list[tuple[float, float]]


def schedule_lines(graph: GraphRecord, unit_names: Sequence[str]) -> list[str]:
    """One line for each start, each group of waits, and the kernels between them."""
    lines = []
    for (kind, bucket), group in itertools.groupby(graph.kernel_events or graph.events, key=_line_key):
        events = list(group)
        if bucket is None:
            kernels = [event for event in events if event.kind == "compute"]
            if kernels:
                lines.append(f"    compute{_units_read(kernels, unit_names)}: {len(kernels)} kernels")
            continue
        what = f"{kind:5} {bucket.kind:14} {unit_names[bucket.unit]}"
        lines.append(f"  {what} ({bucket.num_params} parameters, {bucket.num_bytes / 2**20:.2f} MiB)")
    return lines


def _line_key(event: ScheduleEvent) -> tuple[str, Bucket | None]:
    return (event.kind, event.bucket) if event.bucket is not None else ("compute", None)


def _units_read(kernels: Iterable[ScheduleEvent], unit_names: Sequence[str]) -> str:
    names = dict.fromkeys(unit_names[bucket.unit] for event in kernels for bucket in event.reads)
    return f" with {', '.join(names)}" if names else ""


def print_schedules(records: Iterable[CompilationRecord]) -> None:
    """Print the schedule of every graph that was compiled."""
    for record in records:
        for graph in record.graphs:
            print(f"\n{graph.phase} graph, in the order of Inductor's kernels:")
            print("\n".join(schedule_lines(graph, record.unit_names)))
            report = graph.kernel_report
            if report is not None:
                size = report.max_unsharded_bytes / 2**20
                print(f"  (at most {report.max_unsharded_units} units unsharded at once, {size:.2f} MiB)")


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same points in time as disjoint intervals in order."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Intervals) -> float:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def overlap(first: Intervals, second: Intervals) -> float:
    """How long both run; each a list of disjoint intervals."""
    return length(first) + length(second) - length(union([*first, *second]))


def communication_times(events: Iterable[FunctionEvent]) -> tuple[float, float]:
    """Milliseconds during which collectives run, and those of them during which this rank does not compute.

    A collective runs while one of gloo's threads executes it. The rank does not compute while its own thread is inside
    a functional collective: it starts one, or it waits for one.
    """
    events = list(events)
    spans = {
        prefix: union((e.time_range.start, e.time_range.end) for e in events if e.name.startswith(prefix))
        for prefix in ("gloo:", "_c10d_functional::")
    }
    running, held_up = spans["gloo:"], spans["_c10d_functional::"]
    return length(running) / 1e3, overlap(running, held_up) / 1e3


def main(argv: list[str] | None = None) -> int:
    """Print schedules and times; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description="Show the schedule of the GPT, and how much communication it hides.")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on this machine")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a global batch, over all ranks")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=320)
    parser.add_argument("--steps", type=int, default=5, help="steps to measure")
    args = parser.parse_args(argv)
    if not ranks.is_under_torchrun():
        return ranks.start(__file__, argv, args.ranks)

    here = ranks.join("cpu")
    torch.manual_seed(0)
    model = GPT(args.dim, args.layers, args.seq)
    fully_shard(model, units=["layers.*"])
    # A graph from the cache is not compiled, so there would be no schedule to show. Compiled kernels are reused.
    options = {"inductor": {"fx_graph_cache": False}}
    compiled = torch.compile(model, backend=overlap_fsdp, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = Batches(read_stdlib(), args.batch, args.seq, seed=0)

    def step(index: int) -> None:
        compiled(*batches.at(index, here.rank, here.num_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with record_compilations() as records:
        step(0)
    if here.rank == 0:
        print_schedules(records)
    step(1)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for index in range(args.steps):
            step(2 + index)
    running_ms, exposed_ms = communication_times(profiler.events())
    if here.rank == 0:
        share = 1 - exposed_ms / running_ms
        print(f"\ncommunication hidden: {share:.0%}")
        print(
            f"  Measured on rank 0 over {args.steps} steps: gloo's threads execute collectives during "
            f"{running_ms / args.steps:.0f} ms of a step, and\n  during {exposed_ms / args.steps:.0f} ms of those the "
            "rank's own thread starts a collective or waits for one. During the rest it computes.\n  Ranks on one "
            "machine share its cores, so hidden communication still slows the compute down here."
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
