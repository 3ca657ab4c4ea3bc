"""`offload_policy=CPUOffloadPolicy()`: shards and gradients at home on the CPU. On a mesh of CPUs the copies are
nothing, and all else is as with a device: what is gathered, sent home, waited for and written, and when."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_passes import fully_shard
from fsdp_passes.errors import ScheduleWarning
from fsdp_passes.home_ops import SEND_HOME
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.unit import unit_of
from tests.distributed.checks import call_of
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train

HERE = "tests.distributed.test_cpu_offload"
WAYS = ["aot_eager", "inductor", "fallback"]


def trains(way: str, mixed: bool) -> None:
    """61 rows on 2 ranks: shards are padded, and gradients are the rows without padding."""
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    twin = copy.deepcopy(reference)
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    for module in (*twin.layers, twin):
        fsdp2.fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False), **how)
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy(), **how)
    batches = token_batches(3, 4, 8)
    with record_compilations() as records, warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        found = train(model, batches, sharded=True, call=call_of(model, way))
    if not mixed:
        assert_same(found, train(reference, batches, sharded=False))
    assert_same(found, train(twin, batches, sharded=True), atol=2e-2 if mixed else 1e-5, check_params=not mixed)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    for record in records:
        forward, backward = record.graphs
        # One copy home for each collective that reduces, whose result the graph returns.
        sent = [node for node in backward.snapshots["scheduled"].nodes if node.target is SEND_HOME]
        reductions = [event for event in backward.events if event.kind == "start" and "scatter" in event.bucket.kind]
        assert len(sent) == len(reductions) == 4  # two for the root, which is used at both ends
        assert not any(node.target is SEND_HOME for node in forward.snapshots["scheduled"].nodes)


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_parameters_train_as_unsharded_and_fsdp2(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:trains", way=way, mixed=False)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_offloaded_fp32_parameters_compute_in_bf16_as_fsdp2(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:trains", way=way, mixed=True)


def replicas_wait_for_one_all_reduce(way: str) -> None:
    """2 x 2 ranks, three micro-batches: two reduced over the shards only, then all of them over the replicas; then two
    whole ones without any sync and a third."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    fully_shard(model, mesh=mesh, units=["layers.*"], offload_policy=CPUOffloadPolicy(), reshard_after_forward=True)
    call = call_of(model, way)
    batches = token_batches(3, 4, 8)
    for switch in (model.set_requires_all_reduce, model.set_requires_gradient_sync):
        for index, batch in enumerate(batches):
            switch(index == 2)
            call(*my_share(batch)).backward()
            assert (model.head.weight.grad is None) == (index < 2)
            reference(*batch).backward()
        _assert_same_grads(model, reference)
        for each in (model, reference):
            each.zero_grad()


def gradients_add_up_over_steps(way: str) -> None:
    """On the CPU, in `.grad`, which two backwards and a fourth of the ranks' parts reach."""
    model, reference = build(lambda: Transformer(layers=2, hidden=61, tied=True))
    for each in (model, reference):
        each.layers[0].up.weight.requires_grad_(False)
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy(), reshard_after_forward=2)
    call = call_of(model, way)
    for batch in token_batches(2, 4, 8):
        call(*my_share(batch)).backward()
        reference(*batch).backward()
    _assert_same_grads(model, reference)
    assert model.layers[0].up.weight.grad is None


def layers_compiled_alone(way: str) -> None:
    model, reference = build(lambda: Transformer(layers=3, hidden=61))
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    for layer in model.layers:
        layer.forward = call_of(layer.forward, way)
    batches = token_batches(3, 4, 8)
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def _assert_same_grads(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        grad, other = param.grad, expected[name].grad
        assert (grad is None) == (other is None), name
        if grad is not None:
            torch.testing.assert_close(grad.full_tensor(), other, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


CASES = ["replicas_wait_for_one_all_reduce", "gradients_add_up_over_steps", "layers_compiled_alone"]


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
@pytest.mark.parametrize("case", CASES)
def test_offload_composes_with(four_ranks: RankPool, case: str, way: str) -> None:
    four_ranks.run(f"{HERE}:{case}", way=way)


def gradients_land_behind_the_backward(way: str) -> None:
    """Hooks see each gradient once, complete, when all of the backward has run; those of a backward that raised are
    never seen. `torch.autograd.grad` returns them at once."""
    model, reference = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    call = call_of(model, way)
    (batch,) = token_batches(1, 4, 8)
    loss = call(*my_share(batch))
    landed = unit_of(model).context.offloading
    loss.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    call(*my_share(batch)).backward()
    reference(*batch).backward()
    _assert_same_grads(model, reference)
    assert not landed._landing
    model.zero_grad()
    if way != "fallback":
        found = torch.autograd.grad(call(*my_share(batch)), list(model.parameters()))
        for grad, param in zip(found, reference.parameters(), strict=True):
            torch.testing.assert_close(grad.full_tensor(), param.grad, rtol=0, atol=1e-5)
        assert all(param.grad is None for param in model.parameters())
    seen: list[tuple[str, torch.Tensor]] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, n=name: seen.append((n, p.grad.full_tensor())))
    call(*my_share(batch)).backward()
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in model.named_parameters())
    expected = dict(reference.named_parameters())
    for name, grad in seen:
        torch.testing.assert_close(grad, expected[name].grad, rtol=0, atol=1e-5)


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_offloaded_gradients_reach_hooks_once_and_complete(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:gradients_land_behind_the_backward", way=way)


def accumulates_without_waiting(way: str) -> None:
    """20 micro-batches of which only the last waits for its reductions: what waits on the host does not grow, and the
    gradients are the sum."""
    model, reference = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    call, offloading = call_of(model, way), unit_of(model).context.offloading
    num_params = len(list(model.parameters()))
    for index, batch in enumerate(token_batches(20, 4, 8)):
        model.set_is_last_backward(index == 19)
        call(*my_share(batch)).backward()
        reference(*batch).backward()
        # A parameter that is reduced in two parts (the root's, at both ends) has one gradient all the same.
        assert len(offloading._landing) <= (0 if index == 19 else num_params), index
    _assert_same_grads(model, reference)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_gradients_that_wait_on_the_host_do_not_grow_with_micro_batches(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:accumulates_without_waiting", way=way)


def a_hook_raises(way: str) -> None:
    """All other gradients of that backward are there, and the next step has no trace of it."""
    model, reference = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    call = call_of(model, way)
    first, second = token_batches(2, 4, 8)
    handle = model.layers[1].up.weight.register_post_accumulate_grad_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        call(*my_share(first)).backward()
    offloading = unit_of(model).context.offloading
    assert not offloading._landing
    if way == "fallback":  # compiled, autograd itself calls the hook, in the middle of the backward, and stops there
        reference(*first).backward()
        _assert_same_grads(model, reference)
    handle.remove()
    for each in (model, reference):
        each.zero_grad()
    call(*my_share(second)).backward()
    reference(*second).backward()
    _assert_same_grads(model, reference)


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_a_hook_that_raises_loses_no_other_gradient(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:a_hook_raises", way=way)


def _step(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def steps_in_hooks(way: str) -> None:
    """Each parameter's optimizer steps as soon as its gradient is there, and writes the shard."""
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    call = call_of(model, way)
    for each in (model, reference):
        for param in each.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)
            param.register_post_accumulate_grad_hook(functools.partial(_step, optimizer))
    for batch in token_batches(3, 4, 8):
        call(*my_share(batch)).backward()
        reference(*batch).backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("way", ["aot_eager", "fallback"])
def test_optimizers_step_in_hooks_of_offloaded_parameters(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:steps_in_hooks", way=way)
