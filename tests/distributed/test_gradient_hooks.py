"""Hooks on sharded parameters, optimizers that step in the backward, and the optimizers' own variants."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_gradient_hooks"


def make() -> Transformer:
    return Transformer(layers=2, hidden=61, tied=True)


def fire_once(way: str, syncs: bool) -> None:
    """Each hook is called once in a backward, with the sharded gradient of this backward, and may replace it."""
    model, reference = build(make)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    calls: list[str] = []
    for module in (model, reference):
        for name, param in module.named_parameters():
            if module is model:

                def accumulated(param: torch.Tensor, name: str = name) -> None:
                    assert isinstance(param.grad, DTensor)
                    calls.append(f"accumulated {name}")

                param.register_hook(lambda grad, name=name: calls.append(f"gradient {name}"))
                param.register_post_accumulate_grad_hook(accumulated)
            if name.endswith("up.weight"):
                param.register_hook(lambda grad: grad * 3)
    batches = token_batches(2, 4, 8)
    names = [name for name, _ in model.named_parameters()]
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(syncs or index == 1)
        call(*my_share(batch)).backward()
        reference(*batch).backward()
        expected = 0 if not syncs and index == 0 else 1
        for kind in ("gradient", "accumulated"):
            assert [calls.count(f"{kind} {name}") for name in names] == [expected] * len(names)
        calls.clear()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("syncs", [True, False])
def test_gradient_hooks_fire_once_for_each_reduction(two_ranks: RankPool, syncs: bool, way: str) -> None:
    two_ranks.run(f"{HERE}:fire_once", way=way, syncs=syncs)


def step_in_backward(way: str) -> None:
    """One optimizer per parameter, which steps as soon as the gradient is there and drops it."""
    model, reference = build(make)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    for module in (model, reference):
        for param in module.parameters():
            optimizer = torch.optim.AdamW([param], lr=1e-2, eps=1e-4)

            def step(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
    for batch in token_batches(3, 4, 8):
        call(*my_share(batch)).backward()
        reference(*batch).backward()
        assert all(param.grad is None for param in model.parameters())
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), other.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_steps_in_the_backward_trains_as_unsharded(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:step_in_backward", way=way)


def optimizer_variants(way: str) -> None:
    """With gradients clipped to a norm that is well below theirs."""
    model, _ = build(make)
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    batches = token_batches(3, 4, 8)
    for variant in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        _, reference = build(make)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(distribute_tensor(state[name], param.device_mesh, param.placements))
        how = {"optimizer": functools.partial(torch.optim.AdamW, eps=1e-6, **variant), "clip": 0.1}
        found = train(model, batches, sharded=True, call=call, **how)
        assert_same(found, train(reference, batches, sharded=False, **how))


@pytest.mark.parametrize("way", WAYS)
def test_foreach_and_fused_adamw_with_clipping_train_as_unsharded(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:optimizer_variants", way=way)
