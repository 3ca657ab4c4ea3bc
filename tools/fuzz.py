#!/usr/bin/env python3
"""Random models through the passes: the invariants on a fake group, the numbers on real ranks.

    python tools/fuzz.py --models 200 [--ranks 2] [--seed 0] [--only invariants|values] [--ways compiled fallback]

The invariants are checked twice: in one group, and in replicas of a group. Each failure is shrunk to a small model and
printed as a `ModelSpec`; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from fsdp_passes._torch_compat import init_fake_process_group  # noqa: E402
from fuzz_models import ModelSpec, check_invariants, model_specs  # noqa: E402
from tests.ranks import RankPool  # noqa: E402

WORLD_SIZE = 3  # of the fake groups: most shapes cannot be divided by it
NUM_REPLICAS = 2
_PER_SEED = 100  # models that hypothesis draws from one seed
_MOST_SHRINKS = 100
_LONGEST_SHRINKING_S = 120.0  # each failure of a rank takes its pool down, or as long as the pool waits for an answer

Failure = str | None  # the smallest model that fails, and its traceback


def _run(body: Callable[[ModelSpec], object], seed_: int, phases: tuple[Phase, ...]) -> None:
    """Call `body` with the models of a seed: always the same, until it raises."""

    @seed(seed_)
    @settings(
        max_examples=_PER_SEED,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        report_multiple_bugs=False,
    )
    @given(model_specs)
    def run(spec: ModelSpec) -> None:
        body(spec)

    with contextlib.redirect_stderr(io.StringIO()):
        run()


def draw(seed_: int, max_leaves: int = sys.maxsize) -> Iterator[tuple[int, ModelSpec]]:
    """Random models, no two equal, each with the seed from which hypothesis made it; without end."""
    seen = set()
    while True:
        drawn: list[ModelSpec] = []
        _run(drawn.append, seed_, (Phase.generate,))
        for spec in drawn:
            if spec not in seen and spec.num_leaves <= max_leaves:
                seen.add(spec)
                yield seed_, spec
        seed_ += 1


def search(
    check: Callable[[ModelSpec], object],
    num_models: int,
    seed_: int,
    *,
    max_leaves: int = sys.maxsize,
    time_limit_s: float = float("inf"),
) -> tuple[int, Failure]:
    """Check `num_models` random models of at most `max_leaves` leaves, fewer when the time is over; how many ran, and
    the smallest failure.

    They are drawn before they are checked: hypothesis calls from a deep stack, which Dynamo takes down again and again,
    and it draws a tenth of them twice.
    """
    end_s = time.monotonic() + time_limit_s
    for count, (its_seed, spec) in enumerate(draw(seed_ * 1000, max_leaves)):
        if count == num_models or time.monotonic() > end_s:
            return count, None
        try:
            check(spec)
        except Exception:
            return count + 1, _shrink(check, its_seed, spec, traceback.format_exc())
    raise AssertionError("draw() never ends")


def _shrink(check: Callable[[ModelSpec], object], seed_: int, failing: ModelSpec, text: str) -> str:
    """Draw the seed's models again up to the `failing` one, and let hypothesis make that smaller, for a while.

    What has failed is printed before, so that it is known also when this is interrupted.
    """
    smallest, has_begun, num_left = f"{failing!r}\n{text}", False, _MOST_SHRINKS
    print(f"making this failure smaller: {smallest}", file=sys.stderr, flush=True)
    end_s = time.monotonic() + _LONGEST_SHRINKING_S

    def run(spec: ModelSpec) -> None:
        nonlocal smallest, has_begun, num_left
        has_begun = has_begun or spec == failing
        if not has_begun or num_left == 0 or time.monotonic() > end_s:
            return
        num_left -= 1
        try:
            check(spec)
        except Exception:
            smallest = f"{spec!r}\n{traceback.format_exc()}"
            raise

    with contextlib.suppress(Exception):
        _run(run, seed_, (Phase.generate, Phase.shrink))
    return smallest


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """What has been imported is not garbage: looking through it for each graph would take a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def search_invariants(
    num_models: int,
    seed_: int,
    *,
    num_replicas: int = 1,
    max_leaves: int = sys.maxsize,
    time_limit_s: float = float("inf"),
) -> tuple[int, Failure]:
    """On a fake group of WORLD_SIZE ranks, or on replicas of such groups."""
    init_fake_process_group(WORLD_SIZE * num_replicas)
    try:
        names = ("replicas", "shards") if num_replicas > 1 else ("shards",)
        mesh = init_device_mesh("cpu", (num_replicas, WORLD_SIZE)[-len(names) :], mesh_dim_names=names)
        check = functools.partial(check_invariants, mesh=mesh)
        with _rare_collections():
            return search(check, num_models, seed_, max_leaves=max_leaves, time_limit_s=time_limit_s)
    finally:
        dist.destroy_process_group()


def search_values(
    num_models: int,
    seed_: int,
    pool: RankPool,
    ways: tuple[str, ...] = ("compiled", "fallback"),
    *,
    max_leaves: int = sys.maxsize,
    time_limit_s: float = float("inf"),
) -> tuple[int, Failure]:
    """On the ranks of `pool`, in each of the `ways` of running."""

    def check(spec: ModelSpec) -> None:
        differences = pool.run("fuzz_models:check_values", spec=spec, ways=ways)
        assert not any(differences), differences[0] or differences

    return search(check, num_models, seed_, max_leaves=max_leaves, time_limit_s=time_limit_s)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("invariants", "values"))
    parser.add_argument("--ways", nargs="+", choices=("compiled", "fallback"), default=["compiled", "fallback"])
    parser.add_argument(
        "--time-limit-s", type=float, default=float("inf"), help="of each search; no new model behind it"
    )
    args = parser.parse_args(argv)
    limit: dict[str, float] = {"time_limit_s": args.time_limit_s}
    pool = RankPool(args.ranks, timeout_s=120)
    half = args.models // 2
    searches: dict[str, Callable[[], tuple[int, Failure]]] = {
        "invariants": lambda: search_invariants(args.models - half, args.seed, **limit),
        "invariants, with replicas": lambda: search_invariants(half, args.seed + 1, num_replicas=NUM_REPLICAS, **limit),
        "values": lambda: search_values(args.models, args.seed, pool, tuple(args.ways), **limit),
    }
    failed = False
    try:
        for name, run in searches.items():
            if args.only is not None and not name.startswith(args.only):
                continue
            begin_s = time.monotonic()
            count, failure = run()
            print(
                f"{name}: {count} models in {time.monotonic() - begin_s:.0f} s, {'FAILED' if failure else 'all right'}"
            )
            if failure:
                failed = True
                print(failure, flush=True)
    finally:
        pool.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
