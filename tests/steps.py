"""Training step by step, for tests that have to say which step, whose gradient and by how much. Runs on the ranks of a
pool. Only clipping communicates about parameters, so that NCCL alone serves shards on the CPU without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.training import Batch, my_share, whole


@dataclasses.dataclass
class Step:
    """What one step made, on the CPU: the loss as a mean over the ranks, the gradients' norm before clipping (None
    without), and this rank's rows of the gradients that the optimizer took and of the parameters behind its step."""

    loss: float
    norm: float | None
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def own_rows(tensor: Tensor) -> Tensor:
    """A copy on the CPU of the rows that this rank has, or of a whole tensor's that it would have."""
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local().cpu().clone()
    parts = tensor.detach().chunk(dist.get_world_size())
    return (parts[dist.get_rank()] if dist.get_rank() < len(parts) else tensor.detach()[:0]).cpu().clone()


def record_steps(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    sharded: bool,
    call: Callable[..., Tensor] | None = None,
    clip: float | None = None,
    before_forward: Callable[[], None] = lambda: None,
    before_backward: Callable[[], None] = lambda: None,
    after_backward: Callable[[], None] = lambda: None,
) -> list[Step]:
    """Train with AdamW; with `sharded`, on this rank's share of every batch, else on all of it.

    The host reads the gradients as soon as `backward` has returned. The optimizer's eps lies far above rounding: near
    its default a rounded gradient moves its weight by as much as a wrong one, and a GPU's kernels that add in any order
    round differently each time.
    """
    call = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
    steps = []
    for batch in batches:
        before_forward()
        loss = call(*(my_share(batch) if sharded else batch))
        before_backward()
        loss.backward()
        after_backward()
        norm = None if clip is None else torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        grads = {name: own_rows(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float().clone()
        if sharded:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        params = {name: own_rows(param) for name, param in model.named_parameters()}
        steps.append(Step(mean.item(), None if norm is None else whole(norm).item(), grads, params))
    return steps


def assert_same_steps(found: Sequence[Step], expected: Sequence[Step], what: str, *, atol: float = 1e-5) -> None:
    """Every loss, norm, gradient and parameter of every step agrees within `atol` (absolute).

    Names all that differs in the first step that differs, gradients before the parameters that follow from them, each
    with how much of it is wrong: a few numbers look like rounding, whole rows or all of it like a copy that was read
    too early.
    """
    assert len(found) == len(expected), f"{what}: {len(found)} steps, expected {len(expected)}"
    for index, (step, other) in enumerate(zip(found, expected, strict=True)):
        wrong = _scalars(step, other, atol)
        for kind in ("grads", "params"):
            tensors, others = getattr(step, kind), getattr(other, kind)
            if tensors.keys() != others.keys():
                wrong.append(f"{kind} of only one of both: {sorted(tensors.keys() ^ others.keys())}")
            wrong += _tensors(kind, tensors, others, atol)
        assert not wrong, "\n  ".join(
            [f"{what}: step {index} of {len(found)} is the first to differ on rank {dist.get_rank()}:", *wrong]
        )


def _scalars(step: Step, other: Step, atol: float) -> list[str]:
    pairs = {"loss": (step.loss, other.loss), "norm": (step.norm, other.norm)}
    return [
        f"{name}: {one}, expected {two}"
        for name, (one, two) in pairs.items()
        if (one is None) != (two is None) or (one is not None and two is not None and not abs(one - two) <= atol)
    ]


def _tensors(kind: str, tensors: dict[str, Tensor], others: dict[str, Tensor], atol: float) -> list[str]:
    wrong = []
    for name in tensors.keys() & others.keys():
        one, two = tensors[name], others[name]
        if one.shape != two.shape:
            wrong.append(f"{kind} {name}: shape {tuple(one.shape)}, expected {tuple(two.shape)}")
            continue
        differs = ~((one - two).abs() <= atol)  # NaN differs from everything
        if differs.any():
            error = torch.where(differs, (one - two).abs().nan_to_num(nan=torch.inf), 0.0)
            place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            rows = int(differs.flatten(1).any(1).sum()) if differs.dim() > 1 else int(differs.sum())
            wrong.append(
                f"{kind} {name}: {int(differs.sum())} of {differs.numel()} numbers in {rows} of {len(differs)} rows, "
                f"most at {place}: {one[place].item():.6g}, expected {two[place].item():.6g}"
            )
    return sorted(wrong)
