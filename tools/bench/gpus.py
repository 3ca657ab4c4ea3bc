"""`tools/bench_gpus`: under torchrun on several GPUs of one host, a GPU for each rank."""

from __future__ import annotations

import argparse
import os
import sys

from bench.config import Config
from bench.systems_names import SYSTEMS, parse_systems

_SYSTEMS = (
    "compute,communication,fsdp2,simple_fsdp,simple_fsdp_overlap,eager,compiled,compiled_packed,compiled_two_streams"
)
_QUICK_SYSTEMS = "compute,communication,fsdp2,compiled"
_SIZES_MB = "1,4,16,64,256,1000"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N tools/bench_gpus",
        description="Compare systems on real GPUs through NCCL, and time collectives alone.",
    )
    parser.add_argument("--quick", action="store_true", help="one shape, the most telling systems, three sizes")
    parser.add_argument("--shapes", help="names of bench.models.SHAPES (default: llama_2b,llama_2b_batch4,llama_8b)")
    parser.add_argument("--systems", help=f"out of {', '.join(SYSTEMS)} (default: {_SYSTEMS})")
    parser.add_argument("--sizes-mb", help=f"of collectives alone, whole buffers; '' for none (default: {_SIZES_MB})")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each system (default: 12)")
    parser.add_argument("--check-steps", type=int, default=3, help="steps whose losses are compared (default: 3)")
    parser.add_argument("--loss-tolerance", type=float, default=1e-4, help="relative (default: 1e-4)")
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none", help="behind each timed backward")
    parser.add_argument("--reduce-dtype", choices=("bf16", "fp32"), default="bf16", help="of the gradients' reduction")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiler's columns")
    parser.add_argument("--traces", default="", metavar="FOLDER", help="leave the profiles' Chrome traces there")
    parser.add_argument("--time-limit-s", type=float, default=480.0, help="report what is there then (default: 480)")
    parser.add_argument("--json", default="results/gpus.json", help="where to write the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu (gloo) only tries the tool")
    args = parser.parse_args(argv)
    try:
        args.systems = parse_systems(args.systems or (_QUICK_SYSTEMS if args.quick else _SYSTEMS))
    except ValueError as error:
        parser.error(f"--systems: {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    if "LOCAL_RANK" not in os.environ:
        print("tools/bench_gpus: start it with torchrun --nproc-per-node N tools/bench_gpus", file=sys.stderr)
        return 2
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for `Control`; all ranks are on this host
    from bench.worker import Worker, finish  # imports torch

    world_size = int(os.environ["WORLD_SIZE"])
    sizes = args.sizes_mb if args.sizes_mb is not None else ("1,64,1000" if args.quick else _SIZES_MB)
    shapes = args.shapes or ("llama_2b" if args.quick else "llama_2b,llama_2b_batch4,llama_8b")
    worker = Worker(
        Config(
            backend="nccl" if args.device == "cuda" else "gloo",
            device=args.device,
            shapes=shapes.split(","),
            systems=args.systems,
            rounds=args.rounds,
            check_steps=args.check_steps,
            loss_tolerance=args.loss_tolerance,
            optimizer=args.optimizer,
            reduce_dtype=args.reduce_dtype,
            profile=not args.no_profile,
            trace_folder=args.traces,
            sizes_mb=[float(size) for size in sizes.split(",") if size],
            output=args.json,
            time_limit_s=args.time_limit_s,
            title=f"{world_size} ranks through {'NCCL' if args.device == 'cuda' else 'gloo'}, a device for each",
        )
    )
    return finish(worker)
