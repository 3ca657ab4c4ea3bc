#!/usr/bin/env python3
"""Random models through the passes: the invariants on a fake group, the numbers on real ranks.

    python tools/fuzz.py --models 200 [--ranks 2] [--seed 0] [--only invariants|values] [--ways aot_eager fallback]

Each failure is shrunk to a small model and printed as a `ModelSpec`; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from fsdp_passes._torch_compat import init_fake_process_group  # noqa: E402
from fuzz_models import ModelSpec, check_invariants, model_specs  # noqa: E402
from tests.ranks import RankPool  # noqa: E402


def search(
    check: Callable[[ModelSpec], object], num_models: int, seed_: int, time_limit_s: float = float("inf")
) -> tuple[int, str | None]:
    """Check `num_models` random models, fewer when the time is over; (how many ran, the smallest failure)."""
    count, smallest = 0, ""
    end_s = time.monotonic() + time_limit_s

    @seed(seed_)
    @settings(
        max_examples=num_models,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(model_specs)
    def run(spec: ModelSpec) -> None:
        nonlocal count, smallest
        if time.monotonic() > end_s:
            return
        count += 1
        try:
            check(spec)
        except Exception:
            smallest = f"{spec!r}\n{traceback.format_exc()}"
            raise

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            run()
    except Exception:
        return count, smallest
    return count, None


def search_invariants(
    num_models: int, seed_: int, time_limit_s: float = float("inf"), world_size: int = 3
) -> tuple[int, str | None]:
    """On a fake group, whose size most shapes cannot be divided by."""
    init_fake_process_group(world_size)
    try:
        return search(check_invariants, num_models, seed_, time_limit_s)
    finally:
        dist.destroy_process_group()


def search_values(
    num_models: int, seed_: int, pool: RankPool, ways: list[str], time_limit_s: float = float("inf")
) -> tuple[int, str | None]:
    """On the ranks of `pool`, in each of the `ways` of running."""

    def check(spec: ModelSpec) -> None:
        for way in ways:
            pool.run("fuzz_models:check_values", spec=spec, way=way)

    return search(check, num_models, seed_, time_limit_s)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("invariants", "values"))
    parser.add_argument("--ways", nargs="+", default=["aot_eager", "fallback"])
    parser.add_argument(
        "--time-limit-s", type=float, default=float("inf"), help="of each search; no new model behind it"
    )
    args = parser.parse_args(argv)
    failed = False
    for name in ("invariants", "values"):
        if args.only not in (None, name):
            continue
        begin_s = time.monotonic()
        if name == "invariants":
            count, failure = search_invariants(args.models, args.seed, args.time_limit_s)
        else:
            pool = RankPool(args.ranks, timeout_s=120)
            try:
                count, failure = search_values(args.models, args.seed, pool, args.ways, args.time_limit_s)
            finally:
                pool.close()
        print(f"{name}: {count} models in {time.monotonic() - begin_s:.0f} s, {'FAILED' if failure else 'all right'}")
        if failure:
            failed = True
            print(failure, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
