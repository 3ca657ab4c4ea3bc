"""`tools/bench_two_hosts`: real gloo between two network namespaces, one core for each rank."""

from __future__ import annotations

import argparse
import os
import sys

from bench.config import Config
from bench.launch import rank_environment, run_ranks, signals_as_exit
from bench.network import ADDRESSES, INTERFACES, NetworkError, inside, measure_mbit_per_s, two_hosts
from bench.report import say
from bench.systems_names import DEFAULT_SYSTEMS, SYSTEMS, parse_systems


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench_two_hosts",
        description="Compare systems over a slow link: two network namespaces, a veth pair limited by tc tbf in both "
        "directions, one core per rank, real gloo. Needs Linux and root. The namespaces are removed at the end.",
    )
    parser.add_argument("--gbit", type=float, default=2.0, help="rate in Gbit/s in each direction (default: 2)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay one way, in milliseconds (default: 0)")
    parser.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS), help=f"out of {', '.join(SYSTEMS)}")
    parser.add_argument("--shapes", default="two_hosts", help="names of bench.models.SHAPES (default: two_hosts)")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each system (default: 10)")
    parser.add_argument("--cores", default="0,1", help="the core of each rank (default: 0,1)")
    parser.add_argument("--quick", action="store_true", help="3 rounds of the systems that are compiled")
    parser.add_argument("--time-limit-s", type=float, default=1800.0)
    parser.add_argument("--json", default="results/two_hosts.json", help="where to write the results")
    args = parser.parse_args(argv)
    args.core_numbers = [int(core) for core in args.cores.split(",")]
    available = sorted(os.sched_getaffinity(0))
    if len(set(args.core_numbers)) != 2 or not set(args.core_numbers) <= set(available):
        parser.error(f"--cores: expected two different ones out of {available}, found {args.cores}")
    try:
        args.systems = parse_systems(args.systems)
    except ValueError as error:
        parser.error(f"--systems: {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    rounds, systems = args.rounds, args.systems
    if args.quick:
        rounds = min(rounds, 3)
        systems = [name for name in systems if name not in ("fsdp2_eager", "eager")]
    delay = f", {args.delay_ms:g} ms one way" if args.delay_ms else ""
    config = Config(
        backend="gloo",
        device="cpu",
        shapes=args.shapes.split(","),
        systems=systems,
        rounds=rounds,
        output=args.json,
        time_limit_s=args.time_limit_s,
        title=f"two hosts, {args.gbit:g} Gbit/s{delay}, gloo, one core per rank",
    )
    try:
        with signals_as_exit(), two_hosts(mbit_per_s=args.gbit * 1e3, delay_ms=args.delay_ms):
            for sender in (0, 1):
                reached = measure_mbit_per_s(sender)
                say(f"link from host {sender}: {reached / 1e3:.2f} Gbit/s over one TCP connection")
                if reached < 0.8 * args.gbit * 1e3:
                    say("  WARNING: far below the rate that was asked for; is the machine busy?")
            commands, environments = [], []
            for rank, core in enumerate(args.core_numbers):
                commands.append(inside(rank, sys.executable, "-m", "bench.worker", config.to_json(), core=core))
                environment = rank_environment(rank, 2, ADDRESSES[0], 29601, local_rank=0)
                threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACES[rank]}
                environments.append({**environment, **threads})
            return run_ranks(commands, environments, time_limit_s=args.time_limit_s + 120)
    except NetworkError as error:
        print(f"tools/bench_two_hosts: {error}", file=sys.stderr)
        return 2
