"""What the distributed tests share: sharded, compiled training against one unsharded process, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.pipeline import CompilationRecord, record_compilations
from tests.training import Batch, Result, assert_same, build, my_share, recorded_collectives, train


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
    """One all-gather per unit and direction and one reduce-scatter, each with every parameter once.

    Args:
        record: what was compiled; each parameter of a unit in one dtype.
        gathered: unit -> its parameters, all of them in one all-gather of the forward, in order of first use.
        reduced: unit -> its trainable parameters, by default all; all of them in one reduce-scatter.
        regathered: the units that the backward gathers again, by default all but the root. It gathers only those of
            their parameters that a gradient needs.
    """
    reduced = gathered if reduced is None else reduced
    regathered = [unit for unit in gathered if unit != "root"] if regathered is None else regathered
    forward = [line.split() for line in collectives(record, "forward")]
    backward = [line.split() for line in collectives(record, "backward")]
    assert [(kind, unit, int(n)) for kind, unit, _, n in forward] == [("all_gather", *u) for u in gathered.items()]
    again = {unit: int(n) for kind, unit, _, n in backward if kind == "all_gather"}
    assert sorted(again) == sorted(regathered), again
    assert all(n <= gathered[unit] for unit, n in again.items()), again
    found = sorted((unit, int(n)) for kind, unit, _, n in backward if kind == "reduce_scatter")
    assert found == sorted(reduced.items()), found
    assert len(backward) == len(regathered) + len(reduced), backward


def assert_trains_as_unsharded(
    make: Callable[[], nn.Module],
    batches: list[Batch],
    *,
    inner: str = "aot_eager",
    shard: Callable[[nn.Module], Any] = fully_shard,
    sends: dict[str, Any] | None = None,
    atol: float = 1e-5,
    **how: Any,
) -> Result:
    """Train sharded and compiled, and unsharded; losses, gradients and parameters agree.

    Also asserts that there was one compilation, that it passes `assert_sends(**sends)`, and that the profiler saw
    exactly the collectives of its graphs in a further step.
    """
    model, reference = build(make)
    shard(model)
    call = compiled(model, inner)
    with record_compilations() as records:
        found = train(model, batches, sharded=True, call=call, **how)
    assert_same(found, train(reference, batches, sharded=False, **how), atol=atol)

    assert len(records) == 1, f"expected one compilation, found {len(records)}"
    if sends is not None:
        assert_sends(records[0], **sends)
    with recorded_collectives() as seen:
        call(*my_share(batches[0])).backward()
    assert kinds(seen) == kinds(collectives(records[0], "forward") + collectives(records[0], "backward")), seen
    return found
