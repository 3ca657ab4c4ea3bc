"""What the distributed tests share: sharded, compiled training against one unsharded process, and what was sent."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import ScheduleWarning
from fsdp_passes.pipeline import CompilationRecord, record_compilations
from tests.profiles import cpu_profile
from tests.training import Batch, Result, assert_same, build, my_share, recorded_collectives, train

# The two ways of running a sharded model; Inductor only where its kernels are the point, since it takes seconds.
WAYS = ("aot_eager", "fallback")


def float_batches(steps: int, rows: int, dim: int, seed: int = 1) -> list[Batch]:
    """The same global batches on every rank, each one tensor (rows, dim)."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, dim, generator=generator),) for _ in range(steps)]


def compiled(
    module: Callable[..., Any],
    inner: str = "aot_eager",
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`module` compiled with `overlap_fsdp`; without Inductor's caches, so that every graph leaves a record."""
    if inner == "inductor":
        options["inductor"] = {"fx_graph_cache": False}
    options["inner"] = inner
    return torch.compile(module, backend=overlap_fsdp, fullgraph=fullgraph, dynamic=dynamic, options=options)


def call_of(module: Callable[..., Any], way: str) -> Callable[..., Any]:
    """`module` itself for "fallback", else compiled with that inner compiler."""
    return module if way == "fallback" else compiled(module, way)


@contextlib.contextmanager
def recorded_regions() -> Iterator[list[str]]:
    """The `FSDP:` regions that open inside, in order."""
    names: list[str] = []
    with cpu_profile() as profiler:
        yield names
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names += [event.name for event in events if event.name.startswith("FSDP:")]


def collectives(record: CompilationRecord, phase: str) -> list[str]:
    """`<kind> <unit> <dtype> <parameters in it>` of every collective of one phase, in the order of their starts."""
    return [
        f"{event.bucket.kind} {record.unit_names[event.bucket.unit]} "
        f"{str(event.bucket.dtype).removeprefix('torch.')} {event.bucket.num_params}"
        for graph in record.graphs
        if graph.phase == phase
        for event in graph.events
        if event.kind == "start" and event.bucket is not None
    ]


def kinds(names: Sequence[str]) -> list[str]:
    """`all_gather` or `reduce_scatter` for each name of a collective."""
    return [kind for name in names for kind in ("all_gather", "reduce_scatter") if name.startswith(kind)]


def assert_sends(
    record: CompilationRecord,
    gathered: dict[str, int],
    *,
    reduced: dict[str, int] | None = None,
    regathered: Sequence[str] | None = None,
) -> None:
    """Each parameter in one all-gather per direction and in one reduce-scatter; all of a unit in the same one, but for
    a root that is used at both ends.

    Args:
        record: what was compiled; each parameter of a unit in one dtype.
        gathered: unit -> its parameters, in order of first use.
        reduced: unit -> its trainable parameters, by default all.
        regathered: the units that the backward gathers again, by default all but the root. It gathers only those of
            their parameters that a gradient needs.
    """
    reduced = gathered if reduced is None else reduced
    regathered = [unit for unit in gathered if unit != "root"] if regathered is None else regathered
    forward = _params_by_unit(collectives(record, "forward"))
    backward = _params_by_unit(collectives(record, "backward"))
    assert list(forward.items()) == [(("all_gather", unit), num) for unit, num in gathered.items()], forward
    again = {unit: num for (kind, unit), num in backward.items() if kind == "all_gather"}
    assert sorted(again) == sorted(regathered), again
    assert all(num <= gathered[unit] for unit, num in again.items()), again
    assert {unit: num for (kind, unit), num in backward.items() if kind == "reduce_scatter"} == reduced, backward


def _params_by_unit(lines: list[str]) -> dict[tuple[str, str], int]:
    """(kind, unit) -> its parameters, in order of the first collective; only a root has several collectives."""
    found: dict[tuple[str, str], int] = {}
    for line in lines:
        kind, unit, _, num_params = line.split()
        assert unit == "root" or (kind, unit) not in found, lines
        found[kind, unit] = found.get((kind, unit), 0) + int(num_params)
    return found


def assert_fallback_sends(
    seen: Sequence[str], gathered: dict[str, int], reduced: dict[str, int] | None = None, **_: Any
) -> None:
    """One all-gather per unit and direction, the root's in the forward only, and one reduce-scatter.

    Args:
        seen: the regions that the profiler saw in one step; the other arguments as for `assert_sends`.
    """
    expected = [f"FSDP:{unit}:all_gather" for unit in gathered]
    expected += [f"FSDP:{unit}:all_gather" for unit in gathered if unit != "root"]
    expected += [f"FSDP:{unit}:reduce_scatter" for unit in (gathered if reduced is None else reduced)]
    found = [name for name in seen if name.endswith((":all_gather", ":reduce_scatter"))]
    assert sorted(found) == sorted(expected), found


def assert_trains_as_unsharded(
    make: Callable[[], nn.Module],
    batches: list[Batch],
    *,
    way: str = "aot_eager",
    shard: Callable[[nn.Module], Any] = fully_shard,
    sends: dict[str, Any] | None = None,
    atol: float = 1e-5,
    **how: Any,
) -> Result:
    """Train sharded, and unsharded; losses, gradients and parameters agree.

    Also asserts that the collectives of a step are those that `sends` names (the arguments of `assert_sends`), that
    there was one compilation with a schedule that loses nothing, and that the profiler sees in a step exactly the
    collectives of the compiled graphs.

    `way` is "fallback" for the uncompiled model, or the inner compiler.
    """
    model, reference = build(make)
    shard(model)
    call = call_of(model, way)
    with record_compilations() as records, warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        found = train(model, batches, sharded=True, call=call, **how)
    assert_same(found, train(reference, batches, sharded=False, **how), atol=atol)

    if way == "fallback":
        assert not records
        if sends is not None:
            with recorded_regions() as seen:
                call(*my_share(batches[0])).backward()
            assert_fallback_sends(seen, **sends)
        return found
    assert len(records) == 1, f"expected one compilation, found {len(records)}"
    if sends is not None:
        assert_sends(records[0], **sends)
    with recorded_collectives() as seen:
        call(*my_share(batches[0])).backward()
    assert kinds(seen) == kinds(collectives(records[0], "forward") + collectives(records[0], "backward")), seen
    return found
