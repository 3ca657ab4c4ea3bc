"""Rows that do not divide by the world size, and ranks without any: same values, same graphs on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_passes import fully_shard
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import (
    WAYS,
    assert_fallback_sends,
    assert_sends,
    call_of,
    collectives,
    compiled,
    float_batches,
    recorded_regions,
)
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_uneven_shapes"


class Uneven(nn.Module):
    """Dimension 0 is 5, 7, 3 or 1: on four ranks every one of them leaves a rank short or without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.ones(1, 3))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x) * self.scale).square().mean()


GATHERED = {"layers.0": 2, "layers.2": 2, "layers.4": 2, "root": 3}


def adamw_step_by_step(way: str, fused: bool) -> tuple[list[str], str, list[tuple[int, ...]]]:
    """Returns the collectives, the graphs and the local shapes, to be compared between ranks."""
    model, reference = build(Uneven)
    fully_shard(model, units=["layers.0", "layers.2", "layers.4"])
    call = call_of(model, way)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused) for m in (model, reference)]
    with record_compilations() as records:
        for batch in float_batches(4, 8, 6):
            call(*my_share(batch)).backward()
            reference(*batch).backward()
            for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(param.grad, DTensor)
                assert param.grad.shape == expected.shape
                assert param.grad.to_local().shape == param.to_local().shape
                torch.testing.assert_close(whole(param.grad), expected.grad, rtol=0, atol=1e-5, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=0, atol=1e-5, msg=name)
        found_state, expected_state = optimizers[0].state[param], optimizers[1].state[expected]
        assert found_state.keys() == expected_state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in expected_state.items():
            torch.testing.assert_close(whole(found_state[key]), value, rtol=0, atol=1e-5, msg=f"{key} of {name}")
    with torch.no_grad():
        x = float_batches(1, 8, 6)[0][0]
        torch.testing.assert_close(call(x), reference(x), rtol=0, atol=1e-5)
    shapes = [tuple(param.to_local().shape) for param in model.parameters()]
    if way == "fallback":
        with recorded_regions() as sent:
            call(*my_share(batch)).backward()
        assert_fallback_sends(sent, GATHERED)
        return sent, "", shapes
    assert_sends(records[0], GATHERED, regathered=["layers.2", "layers.4"])
    graphs = "\n".join(list(graph.passes.values())[-1] for record in records for graph in record.graphs)
    return [line for phase in ("forward", "backward") for line in collectives(records[0], phase)], graphs, shapes


@pytest.mark.parametrize(
    ("way", "fused"), [("aot_eager", False), ("aot_eager", True), ("inductor", False), ("fallback", True)]
)
def test_uneven_rows_on_two_ranks_equal_the_reference_with_the_same_graph_on_every_rank(
    two_ranks: RankPool, way: str, fused: bool
) -> None:
    (sent_0, graphs_0, shapes_0), (sent_1, graphs_1, shapes_1) = two_ranks.run(
        f"{HERE}:adamw_step_by_step", way=way, fused=fused
    )
    assert sent_0 == sent_1
    assert graphs_0 == graphs_1
    assert shapes_0[1:3] == [(3, 6), (3,)]
    assert shapes_1[1:3] == [(2, 6), (2,)]


@pytest.mark.parametrize(("way", "fused"), [("aot_eager", False), ("aot_eager", True), ("fallback", False)])
def test_ranks_without_rows_take_part_like_the_others(four_ranks: RankPool, way: str, fused: bool) -> None:
    answers = four_ranks.run(f"{HERE}:adamw_step_by_step", way=way, fused=fused)
    sent, graphs, shapes = zip(*answers, strict=True)
    assert all(other == sent[0] for other in sent)
    assert all(other == graphs[0] for other in graphs)
    # The scale's one row is on rank 0; of seven rows, ranks get 2, 2, 2 and 1; of five, 2, 2, 1 and 0.
    assert [local[0] for local in shapes] == [(1, 3), (0, 3), (0, 3), (0, 3)]
    assert [local[3][0] for local in shapes] == [2, 2, 2, 1]
    assert [local[1][0] for local in shapes] == [2, 2, 1, 0]


def training_with_clipping(way: str) -> None:
    model, reference = build(Uneven)
    fully_shard(model, units=["layers.*"])
    batches = float_batches(4, 8, 6)
    found = train(model, batches, sharded=True, call=call_of(model, way), clip=0.05)
    assert_same(found, train(reference, batches, sharded=False, clip=0.05))


@pytest.mark.parametrize("way", WAYS)
def test_gradient_clipping_counts_each_row_once(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(f"{HERE}:training_with_clipping", way=way)


# ---- the same order on every rank and for every hash seed ------------------------------------------------------------


@pytest.fixture(scope="module")
def seeded_pools() -> Iterator[list[RankPool]]:
    """Two pools of two ranks: in one, both ranks have one hash seed, in the other, each rank has another."""
    pools = [
        RankPool(2, environment=[{"PYTHONHASHSEED": seed} for seed in seeds]) for seeds in (("1", "1"), ("2", "3"))
    ]
    yield pools
    for pool in pools:
        pool.close()


def sent_in_training(bucket_mode: str) -> tuple[int, list[str], str]:
    model, _ = build(Uneven)
    fully_shard(model, units=["layers.*"])
    call = compiled(model, bucket_mode=bucket_mode)
    with record_compilations() as records:
        call(*my_share(float_batches(1, 8, 6)[0])).backward()
    sent = [line for phase in ("forward", "backward") for line in collectives(records[0], phase)]
    return hash("seed"), sent, "\n".join(list(graph.passes.values())[-1] for graph in records[0].graphs)


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_collectives_and_graphs_do_not_depend_on_the_hash_seed(seeded_pools: list[RankPool], bucket_mode: str) -> None:
    answers = [a for pool in seeded_pools for a in pool.run(f"{HERE}:sent_in_training", bucket_mode=bucket_mode)]
    hashes, sent, graphs = zip(*answers, strict=True)
    assert len(set(hashes)) == 3, "the hash seeds did not reach the ranks"
    assert all(other == sent[0] for other in sent)
    assert all(other == graphs[0] for other in graphs)
