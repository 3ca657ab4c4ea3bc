"""`tools/bench_one_gpu`: real NCCL ranks that share one GPU, or emulated ranks in one process."""

from __future__ import annotations

import argparse
import os
import sys

from bench.config import Config
from bench.launch import rank_environment, run_ranks, signals_as_exit
from bench.mps import SharedGpuError, multi_process_service, nccl_environment
from bench.network import free_port
from bench.systems_names import DEFAULT_SYSTEMS, NOT_EMULATED, SYSTEMS, parse_systems

_RANKS_SHAPES = "mlp_1k,mlp_4k,mlp_16k,transformer"
_RANKS_QUICK = ("mlp_4k", ("compute", "communication", "fsdp2", "compiled"))
_EMULATED_SHAPES = "llama_2b,llama_2b_batch4,llama_8b"
_EMULATED_QUICK = ("llama_2b", ("compute", "communication", "fsdp2", "simple_fsdp", "compiled"))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench_one_gpu",
        description="Compare systems on one GPU. --ranks N: real NCCL ranks that share it through CUDA MPS; ratios and "
        "memory are real, absolute times are not a cluster's. --emulate N: one process, in which each collective "
        "copies real values and then holds multiprocessors for the modelled time.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--ranks", type=int, choices=(2, 4), help="real NCCL ranks on the one GPU")
    which.add_argument("--emulate", type=int, metavar="N", help="emulated ranks in one process")
    parser.add_argument("--quick", action="store_true", help="one shape and the most telling systems, under 5 minutes")
    parser.add_argument("--shapes", help=f"names of bench.models.SHAPES (default: {_RANKS_SHAPES} with --ranks, "
                        f"{_EMULATED_SHAPES} with --emulate)")  # fmt: skip
    parser.add_argument("--systems", help=f"out of {', '.join(SYSTEMS)} (default: {', '.join(DEFAULT_SYSTEMS)}; with "
                        "--emulate simple_fsdp_overlap too)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each system (default: 12)")
    parser.add_argument("--check-steps", type=int, default=3, help="steps whose losses are compared (default: 3)")
    parser.add_argument("--loss-tolerance", type=float, default=1e-4, help="relative (default: 1e-4)")
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none", help="behind each timed backward")
    parser.add_argument("--reduce-dtype", choices=("bf16", "fp32"), default="bf16", help="of the gradients' reduction")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiler's columns")
    parser.add_argument("--traces", default="", metavar="FOLDER", help="leave the profiles' Chrome traces there")
    parser.add_argument("--time-limit-s", type=float, default=480.0, help="report what is there then (default: 480)")
    parser.add_argument("--json", help="where to write the results (default: results/one_gpu_….json)")
    parser.add_argument("--nccl", metavar="LIBNCCL.so.2", help="--ranks: NCCL 2.30 or newer, when torch's own is older")
    parser.add_argument("--bandwidth", default="340,100,45", help="--emulate: GB/s of bus bandwidth (340,100,45)")
    parser.add_argument("--latency-us", type=float, default=15.0, help="--emulate: of each collective (default: 15)")
    parser.add_argument("--num-sms", type=int, default=16, help="--emulate: held by each collective (default: 16)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="--emulate: cpu only tries the tool")
    args = parser.parse_args(argv)
    if args.emulate is not None and args.emulate < 2:
        parser.error(f"--emulate: expected at least 2 ranks, found {args.emulate}")
    try:
        args.bandwidths = [float(part) for part in args.bandwidth.split(",")]
        args.systems = parse_systems(args.systems) if args.systems else None
    except ValueError as error:
        parser.error(str(error))
    refused = [name for name in args.systems or () if args.emulate and name in NOT_EMULATED]
    if refused:
        parser.error(f"--systems: {', '.join(refused)} needs a second link, which is not emulated; use --ranks")
    return args


def config_of(args: argparse.Namespace) -> Config:
    """What each rank is told."""
    is_emulated = args.emulate is not None
    quick_shapes, quick_systems = _EMULATED_QUICK if is_emulated else _RANKS_QUICK
    default_systems = [*DEFAULT_SYSTEMS, "simple_fsdp_overlap"] if is_emulated else [*DEFAULT_SYSTEMS]
    shapes = args.shapes or (quick_shapes if args.quick else (_EMULATED_SHAPES if is_emulated else _RANKS_SHAPES))
    number = args.emulate if is_emulated else args.ranks
    kind = f"{number} emulated ranks" if is_emulated else f"{number} real NCCL ranks sharing one GPU"
    return Config(
        backend="emulated" if is_emulated else "nccl",
        device=args.device if is_emulated else "cuda",
        shapes=shapes.split(","),
        systems=args.systems or list(quick_systems if args.quick else default_systems),
        rounds=args.rounds,
        check_steps=args.check_steps,
        loss_tolerance=args.loss_tolerance,
        optimizer=args.optimizer,
        reduce_dtype=args.reduce_dtype,
        world_size=number,
        bandwidths_gb_per_s=args.bandwidths if is_emulated else [],
        latency_us=args.latency_us,
        num_sms=args.num_sms,
        profile=not args.no_profile,
        trace_folder=args.traces,
        output=args.json or f"results/one_gpu_{'emulated' if is_emulated else 'ranks'}_{number}.json",
        time_limit_s=args.time_limit_s,
        title=kind,
    )


def main(argv: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    config = config_of(args)
    command = [sys.executable, "-m", "bench.worker", config.to_json()]
    port = free_port()
    # Beyond the limit a rank may still finish the compilation or the shape that it is in.
    patience_s = args.time_limit_s + 60
    with signals_as_exit():
        if args.emulate is not None:
            return run_ranks([command], [rank_environment(0, 1, "127.0.0.1", port, 0)], time_limit_s=patience_s)
        try:
            nccl = nccl_environment(args.ranks, args.nccl)
            with multi_process_service() as mps:
                environments = [
                    {**rank_environment(rank, args.ranks, "127.0.0.1", port, local_rank=0), **mps, **nccl}
                    for rank in range(args.ranks)
                ]
                # Compiling ranks share the processors.
                threads = str(max(1, (os.cpu_count() or 1) // args.ranks // 2))
                for environment in environments:
                    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
                    environment.setdefault("OMP_NUM_THREADS", "1")
                    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for `Control`; all ranks are on this host
                return run_ranks([command] * args.ranks, environments, time_limit_s=patience_s)
        except SharedGpuError as error:
            print(f"tools/bench_one_gpu: {error}", file=sys.stderr)
            return 2
