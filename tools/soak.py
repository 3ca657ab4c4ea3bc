#!/usr/bin/env python3
"""Many steps with random lengths, exceptions and switches between training, evaluation and accumulation.

    python tools/soak.py --steps 1000 --ranks 2 [--ways aot_eager fallback] [--seed 0]

The losses must equal those of one unsharded process that met the same events, and behind half of the steps nothing may
grow any more: tensors, storages, hooks, compiled graphs, queues, keys in the store. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fsdp_passes import fully_shard, overlap_fsdp  # noqa: E402
from fsdp_passes._torch_compat import default_store, local_tensor  # noqa: E402
from fsdp_passes.unit import unit_of  # noqa: E402
from tests.ranks import RankPool  # noqa: E402
from tests.training import build, my_share  # noqa: E402

VOCAB, DIM, LAYERS, BATCH = 16, 8, 3, 4
LENGTHS = range(2, 12)
_TOLERANCE = 2e-5  # of a loss: float32 sums in another order, over hundreds of steps of plain SGD


@dataclasses.dataclass(frozen=True)
class Event:
    """One step.

    Attributes:
        kind: "train", "eval" or "accumulate" (one micro-batch for each length, reduced behind the last).
        lengths: of the sequences of each micro-batch.
        raises: "" or "<layer> forward" / "<layer> backward": where the last micro-batch raises; the step is given up.
    """

    kind: str
    lengths: tuple[int, ...]
    raises: str = ""


def make_events(steps: int, seed: int) -> list[Event]:
    """The same on every rank, and for the reference."""
    chance = random.Random(seed)
    events = []
    for _ in range(steps):
        kind = chance.choices(("train", "eval", "accumulate"), (6, 2, 2))[0]
        lengths = tuple(chance.choice(LENGTHS) for _ in range(chance.randint(2, 3) if kind == "accumulate" else 1))
        raises = ""
        if chance.random() < 0.15:
            where = "forward" if kind == "eval" else chance.choice(("forward", "backward"))
            raises = f"{chance.randrange(LAYERS)} {where}"
        events.append(Event(kind, lengths, raises))
    return events


# ---- a model that raises where it is told to -------------------------------------------------------------------------

_trap = ""


class TrapError(Exception):
    """What the events ask for."""


@torch.library.custom_op("fsdp_passes_soak::pass_trap", mutates_args=())
def pass_trap(x: Tensor, where: str) -> Tensor:
    if where == _trap:
        raise TrapError(where)
    return x.clone()


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.layer = inputs[1].split()[0]


def _trap_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.fsdp_passes_soak.pass_trap(grad, f"{ctx.layer} backward"), None


pass_trap.register_fake(lambda x, where: torch.empty_like(x))
pass_trap.register_autograd(_trap_backward, setup_context=_save_place)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]  # so that the length matters
        y = self.down(F.gelu(self.up(self.norm(y))))
        return x + torch.ops.fsdp_passes_soak.pass_trap(y, f"{self.index} forward")


class Model(nn.Module):
    """Token ids and targets, each (batch, length), in; the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# ---- playing the events ----------------------------------------------------------------------------------------------


def play(
    model: nn.Module,
    call: Callable[..., Tensor],
    events: list[Event],
    *,
    is_sharded: bool,
    behind: Callable[[int], None] = lambda step: None,
) -> list[float | None]:
    """The loss of each step, averaged over the ranks; None where it was given up. `behind` is called after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    losses: list[float | None] = []
    for step, event in enumerate(events):
        try:
            total = _play_one(model, call, event, generator, is_sharded=is_sharded)
        except TrapError:
            losses.append(None)
        else:
            losses.append(total)
            if event.kind != "eval":
                optimizer.step()
        optimizer.zero_grad()
        behind(step)
    return losses


def _play_one(
    model: nn.Module, call: Callable[..., Tensor], event: Event, generator: torch.Generator, *, is_sharded: bool
) -> float:
    global _trap
    batches = [
        tuple(torch.randint(0, VOCAB, (BATCH, length), generator=generator) for _ in range(2))
        for length in event.lengths
    ]
    total = torch.zeros(())
    model.train(event.kind != "eval")
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        if is_sharded:
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        _trap = event.raises if is_last else ""
        try:
            with torch.set_grad_enabled(event.kind != "eval"):
                loss = call(*(my_share(batch) if is_sharded else batch)) / len(batches)
            if event.kind != "eval":
                loss.backward()
        finally:
            _trap = ""
        total += loss.detach()
    if is_sharded:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def census(model: nn.Module) -> dict[str, int]:
    """How many there are of what must not grow."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    traced = [value for value in tensors if isinstance(value, FakeTensor)]  # they belong to graphs
    tensors = [value for value in tensors if not isinstance(value, FakeTensor)]
    plain = [local_tensor(t) if hasattr(t, "placements") else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain if t.layout == torch.strided}
    modules = list(model.modules())
    units = [unit for module in modules if (unit := unit_of(module)) is not None]
    context = units[0].context
    placeholders = [param.placeholder for unit in units for param in unit.params]
    lookahead = context.lookahead
    return {
        "tensors": len(tensors),
        "traced tensors": len(traced),
        "storage bytes": sum(storages.values()),
        "module hooks": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules
        ),
        "parameter hooks": sum(
            len(getattr(p, name, None) or {})
            for p in (*placeholders, *model.parameters())
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ),
        "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        "compilations": int(sum(torch._dynamo.utils.counters["aot_autograd"].values())),
        "queued": len(context.delayed_releases) + len(context.delayed_reductions) + len(context.started_reductions),
        "started gathers": len(lookahead.started),
        "remembered order": len(lookahead._start) + len(lookahead._successor) + len(context.forward_order),
        "whole units": sum(unit.gathered_versions is not None for unit in units if not unit.is_root),
        "agreement and other keys": int(default_store().num_keys()) - _num_marks(),
    }


def _num_marks() -> int:
    marks = [f"fsdp_passes/marks/0/1/rank{rank}" for rank in range(dist.get_world_size())]
    return sum(default_store().check([mark]) for mark in marks)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@dataclasses.dataclass
class Report:
    """What one rank found: the largest difference of a loss, and what there was behind a half and behind all steps."""

    worst: float
    middle: dict[str, int]
    end: dict[str, int]
    grown_bytes: int
    num_given_up: int


def soak(steps: int, seed: int, way: str) -> Report:
    """Called on every rank. Raises `AssertionError` when a loss is wrong or something grows."""
    events = make_events(steps, seed)
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    call = model
    if way != "fallback":
        call = torch.compile(model, backend=overlap_fsdp, dynamic=True, options={"inner": way})
    expected = play(reference, reference, events, is_sharded=False)
    seen: dict[int, dict[str, int]] = {}
    resident: dict[int, int] = {}

    def behind(step: int) -> None:
        if step in (steps // 2, steps - 1):
            seen[step], resident[step] = census(model), resident_bytes()

    found = play(model, call, events, is_sharded=True, behind=behind)
    assert [loss is None for loss in found] == [loss is None for loss in expected]
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    worst = max(differences)
    pairs = enumerate(zip(found, expected, strict=True))
    wrong = [step for step, (a, b) in pairs if a is not None and b is not None and abs(a - b) > _TOLERANCE]
    assert not wrong, (
        f"step {wrong[0]}: expected loss {expected[wrong[0]]}, found {found[wrong[0]]}; the events up to it: "
        f"{events[max(0, wrong[0] - 3) : wrong[0] + 1]}"
    )
    middle, end = seen[steps // 2], seen[steps - 1]
    grown = {name: (middle[name], end[name]) for name in end if end[name] > middle[name]}
    assert not grown, f"grew between step {steps // 2} and {steps - 1}: {grown}"
    return Report(worst, middle, end, resident[steps - 1] - resident[steps // 2], sum(loss is None for loss in found))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", default=["aot_eager", "fallback"])
    args = parser.parse_args(argv)
    failed = False
    for way in args.ways:
        begin_s = time.monotonic()
        pool = RankPool(args.ranks, timeout_s=3600)
        try:
            reports = pool.run("soak:soak", steps=args.steps, seed=args.seed, way=way)
        except AssertionError as error:
            failed = True
            print(f"{way}: FAILED\n{error}", flush=True)
            continue
        finally:
            pool.close()
        first = reports[0]
        print(
            f"{way}: {args.steps} steps on {args.ranks} ranks in {time.monotonic() - begin_s:.0f} s, "
            f"{first.num_given_up} given up; losses within {max(report.worst for report in reports):.1e}; resident "
            f"memory grew by {max(report.grown_bytes for report in reports) / 2**20:.1f} MiB in the second half"
        )
        print("  " + ", ".join(f"{name} {count}" for name, count in first.end.items()), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
