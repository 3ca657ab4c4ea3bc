"""Several backwards before one optimizer step, in the ways in which people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_accumulation"

Calls = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def pair(way: str) -> tuple[nn.Module, nn.Module, Calls]:
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    fully_shard(model, units=["layers.*"])
    return model, reference, (call_of(model, way), reference)


def assert_same_grads(model: nn.Module, reference: nn.Module, what: str) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{what}, {n}: {m}"
        )


def micro_batches(way: str) -> None:
    """Three micro-batches give the gradient of their sum, then the optimizer steps, twice."""
    model, reference, (call, expected_call) = pair(way)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, reference)]
    batches = token_batches(6, 4, 8)
    for step in range(2):
        for batch in batches[3 * step : 3 * step + 3]:
            (call(*my_share(batch)) / 3).backward()
            (expected_call(*batch) / 3).backward()
        assert_same_grads(model, reference, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=0, atol=1e-5, msg=name)


def zeroed_in_place(way: str) -> None:
    """`zero_grad(set_to_none=False)` keeps the gradient's tensor; later backwards add to it."""
    model, reference, (call, expected_call) = pair(way)
    for step, batch in enumerate(token_batches(3, 4, 8)):
        call(*my_share(batch)).backward()
        expected_call(*batch).backward()
        assert_same_grads(model, reference, f"step {step}")
        before = {name: param.grad for name, param in model.named_parameters()}
        for module in (model, reference):
            module.zero_grad(set_to_none=False)
        assert all(param.grad is before[name] for name, param in model.named_parameters())
        assert all(not whole(param.grad).any() for param in model.parameters())


def backward_twice(way: str) -> None:
    """`retain_graph=True`: the same forward's backward runs again, and gathers again."""
    model, reference, calls = pair(way)
    (batch,) = token_batches(1, 4, 8)
    for call, share in zip(calls, (my_share(batch), batch), strict=True):
        loss = call(*share)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_grads(model, reference, "after both backwards")


def gradient_by_name(way: str) -> None:
    """`torch.autograd.grad` returns the sharded gradients and leaves `.grad` alone."""
    model, reference, (call, expected_call) = pair(way)
    (batch,) = token_batches(1, 4, 8)
    names = ["layers.1.up.weight", "embed.weight", "layers.0.norm1.bias"]
    found = torch.autograd.grad(call(*my_share(batch)), [model.get_parameter(name) for name in names])
    expected = torch.autograd.grad(expected_call(*batch), [reference.get_parameter(name) for name in names])
    for name, grad, value in zip(names, found, expected, strict=True):
        torch.testing.assert_close(whole(grad), value, rtol=0, atol=1e-5, msg=name)
    assert all(param.grad is None for param in model.parameters())


def two_forwards_then_two_backwards(way: str) -> None:
    """Two forwards, then two backwards in the other order, no step in between."""
    model, reference, calls = pair(way)
    first, second = token_batches(2, 4, 8)
    for call, share in zip(calls, (my_share, tuple), strict=True):
        losses = [call(*share(first)), call(*share(second))]
        losses[1].backward()
        losses[0].backward()
    assert_same_grads(model, reference, "after both backwards")


CASES = ("micro_batches", "zeroed_in_place", "backward_twice", "two_forwards_then_two_backwards")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_accumulate_like_those_of_the_unsharded_model(two_ranks: RankPool, case: str, way: str) -> None:
    two_ranks.run(f"{HERE}:{case}", way=way)


def test_autograd_grad_returns_sharded_gradients_of_compiled_code(two_ranks: RankPool) -> None:
    # Not in the fallback: its gradients are reduced by hooks on accumulation, which autograd.grad does not reach.
    two_ranks.run(f"{HERE}:gradient_by_name", way="aot_eager")
