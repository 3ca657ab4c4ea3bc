"""Keywords and methods of FSDP2 in both ways of running, each with numbers against the unsharded model and FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_passes import fully_shard, overlap_fsdp
from tests.distributed.checks import WAYS, call_of, recorded_regions
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_fsdp2_rows"


def small() -> Transformer:
    return Transformer(layers=3, hidden=61)


def compare(way: str, **how: Any) -> None:
    """Three steps equal the unsharded model's and FSDP2's with the same keywords."""
    model, reference = build(small)
    twin = copy.deepcopy(reference)
    for module in (*twin.layers, twin):
        fsdp2.fully_shard(module, **how)
    fully_shard(model, units=["layers.*"], **how)
    batches = token_batches(3, 4, 8)
    found = train(model, batches, sharded=True, call=call_of(model, way))
    assert_same(found, train(reference, batches, sharded=False))
    assert_same(found, train(twin, batches, sharded=True))


def on_a_mesh(way: str) -> None:
    compare(way, mesh=init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_of_one_dimension_trains_as_unsharded_and_fsdp2(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:on_a_mesh", way=way)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("way", WAYS)
def test_resharding_behind_the_forward_or_not_trains_as_unsharded_and_fsdp2(
    two_ranks: RankPool, way: str, reshard_after_forward: bool | None
) -> None:
    two_ranks.run(f"{HERE}:compare", way=way, reshard_after_forward=reshard_after_forward)


def pair() -> tuple[Any, Any, nn.Module]:
    """The same model sharded by us, by FSDP2, and whole."""
    model, reference = build(small)
    twin = copy.deepcopy(reference)
    for module in (*twin.layers, twin):
        fsdp2.fully_shard(module)
    return fully_shard(model, units=["layers.*"]), twin, reference


def prefetched(way: str) -> None:
    """The first layer's forward gathers the two behind it, the last layer's backward the two ahead of it."""
    model, twin, reference = pair()
    for module in (model, twin):
        first, second, third = module.layers
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
    call, batches = call_of(model, way), token_batches(3, 4, 8)
    found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(twin, batches, sharded=True))
    assert_same(found, train(reference, batches, sharded=False))
    if way != "fallback":
        return
    with recorded_regions() as regions:
        call(*my_share(batches[0])).backward()
    forward, backward = "FSDP:layers.0:forward_compute", "FSDP:layers.2:backward_compute"
    gathers = [f"FSDP:layers.{index}:all_gather" for index in range(3)]
    assert [name for name in regions[: regions.index(forward)] if name in gathers] == gathers
    in_backward = regions[len(regions) - regions[::-1].index("FSDP:layers.2:forward_compute") :]
    before = in_backward[: in_backward.index(backward)]
    assert [name for name in before if name in gathers] == gathers[::-1]


@pytest.mark.parametrize("way", WAYS)
def test_units_are_gathered_ahead_as_the_user_says(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:prefetched", way=way)


def unsharded_by_hand(way: str) -> None:
    """The whole values are there between the two calls, and a step around them has the numbers of any other."""
    model, twin, reference = pair()
    call, batches = call_of(model, way), token_batches(3, 4, 8)
    for batch in batches:
        layer = model.layers[1]
        handle = layer.unshard(async_op=True)
        handle.wait()
        assert torch.equal(layer.up.weight, reference.layers[1].up.weight)
        layer.reshard()
        layer.unshard()
        for run in (call, twin):
            run(*my_share(batch)).backward()
        reference(*batch).backward()
        layer.reshard()
        for triple in zip(model.named_parameters(), twin.parameters(), reference.parameters(), strict=True):
            (name, param), other, expected = triple
            torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)
            torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0, atol=1e-5, msg=name)
        with torch.no_grad():
            # The same values in all three, which equality can be asked of.
            for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
                param.mul_(0.5)
                expected.mul_(0.5)
            for param in twin.parameters():
                param.mul_(0.5)
        for module in (model, twin, reference):
            module.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_units_are_unsharded_and_resharded_by_hand(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:unsharded_by_hand", way=way)


def divided_by_the_older_name(way: str) -> None:
    """FSDP2 itself cannot do this over gloo: its mean over two ranks is scaled."""
    model, twin, _ = pair()
    for unit in (*model.layers, model):
        unit.set_reduce_scatter_divide_factor(8.0)
    (batch,) = token_batches(1, 4, 8)
    for run in (call_of(model, way), twin):
        run(*my_share(batch)).backward()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), whole(other.grad) * (2 / 8), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_the_older_name_of_the_divide_factor_divides(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:divided_by_the_older_name", way=way)


def given_up(way: str) -> None:
    """A micro-batch without sync and a forward without a backward, then the step is given up: nothing of it is in the
    gradients of the next."""
    model, twin, _ = pair()
    call = call_of(model, way)
    first, second, third = (my_share(batch) for batch in token_batches(3, 4, 8))
    with model.no_sync():
        call(*first).backward()
    call(*second)
    model.reset_iter_state()
    for run in (call, twin):
        run(*third).backward()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_was_given_up_leaves_nothing(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:given_up", way=way)


def with_mode(mode: str) -> None:
    """On a CPU the modes change Inductor's settings, and no CUDA graph is recorded."""
    model, reference = build(lambda: Transformer(dim=8, layers=1, hidden=8))
    fully_shard(model, units=["layers.*"])
    batches = token_batches(2, 4, 8)
    found = train(model, batches, sharded=True, call=torch.compile(model, backend=overlap_fsdp, mode=mode))
    assert_same(found, train(reference, batches, sharded=False))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_compile_train_as_unsharded(two_ranks: RankPool, mode: str) -> None:
    two_ranks.run(f"{HERE}:with_mode", mode=mode)
