"""Train a model in three ways on the same global batches and compare; runs on the ranks of a pool."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_passes.inspect.trace_names import collective_kind
from tests.profiles import cpu_profile

Batch = tuple[Tensor, ...]


@dataclasses.dataclass
class Result:
    """Losses averaged over the ranks, whole gradients of the last step, whole parameters at the end."""

    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor, a detached copy of anything else."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def my_share(batch: Batch) -> Batch:
    """This rank's rows of a global batch; copies, since Dynamo's guards on views look at the whole batch too."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return tuple(t.chunk(world_size)[rank].clone() for t in batch)


def _adamw(params: Iterable[Tensor], lr: float) -> torch.optim.AdamW:
    """With the default eps of 1e-8, a gradient that is zero but for rounding moves its weight by a full step; with 1e-6
    by more, on some processors, than what is compared here allows."""
    return torch.optim.AdamW(params, lr=lr, eps=1e-4)


def train(
    model: nn.Module,
    batches: list[Batch],
    *,
    sharded: bool,
    call: Callable[..., Tensor] | None = None,
    lr: float = 2e-3,
    clip: float | None = 1.0,
    optimizer: Callable[..., torch.optim.Optimizer] = _adamw,
) -> Result:
    """Train; with `sharded`, each rank takes its share of every batch, else all of it.

    `call` is what computes the loss (the compiled model), by default the model itself.
    """
    call = model if call is None else call
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = optimizer(trainable, lr=lr)
    losses, grads = [], {}
    for step, batch in enumerate(batches):
        loss = call(*(my_share(batch) if sharded else batch))
        loss.backward()
        mean = loss.detach().float().clone()
        if sharded:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
        if step == len(batches) - 1:
            grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable, clip)
        opt.step()
        opt.zero_grad()
    return Result(losses, grads, {name: whole(p) for name, p in model.named_parameters()})


def assert_same(
    found: Result, expected: Result, *, atol: float = 1e-5, check_grads: bool = True, check_params: bool = True
) -> None:
    """Losses, last gradients and parameters agree within `atol` (absolute), name by name."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=atol)
    # Ranks import this file as it is, where a bare `assert` would say nothing.
    assert found.params.keys() == expected.params.keys(), (
        f"parameters of one: {found.params.keys() ^ expected.params.keys()}"
    )
    for name, value in expected.params.items() if check_params else ():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    if check_grads:
        assert found.grads.keys() == expected.grads.keys(), (
            f"gradients of one: {found.grads.keys() ^ expected.grads.keys()}"
        )
        for name, value in expected.grads.items():
            torch.testing.assert_close(
                found.grads[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"gradient of {n}: {m}"
            )


def build(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Two equal copies of one model, the same on every rank."""
    torch.manual_seed(seed)
    model = make()
    return model, copy.deepcopy(model)


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[str]]:
    """The collectives that start inside, in order, as the profiler saw them: those of graphs, whoever runs them."""
    names: list[str] = []
    with cpu_profile() as profiler:
        yield names
    for event, kind in _started(profiler.events()):
        # What the fallback sends, or reduces behind a graph, is no operator's.
        around = [name for name in _names_around(event) if name.startswith(("fsdp_passes::", "_c10d_functional::"))]
        if around:
            is_ahead = kind == "all_gather" and "fsdp_passes::start_next_graph" in around
            names.append("all_gather_ahead" if is_ahead else kind)


@contextlib.contextmanager
def recorded_all_gathers(units: str) -> Iterator[list[str]]:
    """The all-gathers of units whose names begin with `units`, whoever starts them, in order."""
    names: list[str] = []
    with cpu_profile() as profiler:
        yield names
    gathers = [event for event, kind in _started(profiler.events()) if kind == "all_gather"]
    names += [event.name for event in gathers if _is_of(event, units)]


def _started(events: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each call that starts a collective, in order, with the collective's kind; of an exchange between two ranks, which
    receives first and then sends, the first receive."""
    calls = [event for event in events if event.name.startswith("c10d::")]
    calls.sort(key=lambda event: event.time_range.start)
    for before, event in zip([None, *calls], calls, strict=False):
        # A receive's kind is that of the operator or the region, `FSDP:u:all_gather`, that it lies in.
        names = _names_around(event) if event.name == "c10d::recv_" else [event.name]
        kind = next((kind for name in names if (kind := collective_kind(name)) != "other"), "other")
        is_first = before is None or before.name != event.name or event.name != "c10d::recv_"
        if kind != "other" and is_first:
            yield event, kind


def _is_of(event: Any, units: str) -> bool:
    regions = (name for name in _names_around(event) if name.startswith("FSDP:") and name.endswith(":all_gather"))
    return next(regions, "").startswith(f"FSDP:{units}")


def _names_around(event: Any) -> Iterator[str]:
    """The name of a profiler's event and of those that it lies in, from inside out."""
    while event is not None:
        yield event.name
        event = event.cpu_parent
