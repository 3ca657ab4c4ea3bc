"""Sharded, compiled training gives the losses, gradients and parameters of one unsharded process, and of FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp as fsdp2

from fsdp_passes import fully_shard, overlap_fsdp
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train


def ten_steps(inner: str, bucket_mode: str, prefetch: int, unify: bool) -> None:
    model, reference = build(lambda: Transformer(hidden=125))
    twin, _ = build(lambda: Transformer(hidden=125))
    batches = token_batches(10, 8, 16)
    fully_shard(model, units=["layers.*"])
    options = {
        "inner": inner,
        "bucket_mode": bucket_mode,
        "prefetch": prefetch,
        "unify_communication_stream": unify,
    }
    found = train(model, batches, sharded=True, call=torch.compile(model, backend=overlap_fsdp, options=options))
    assert_same(found, train(reference, batches, sharded=False))
    for layer in twin.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(twin)
    assert_same(found, train(twin, batches, sharded=True))


@pytest.mark.parametrize(
    ("inner", "bucket_mode", "prefetch", "unify"),
    [
        ("aot_eager", "coalesced", 1, True),
        ("aot_eager", "packed", 2, True),
        ("aot_eager", "coalesced", 1, False),
        ("inductor", "coalesced", 1, True),
        ("inductor", "packed", 1, True),
    ],
)
def test_two_ranks_equal_the_reference_and_fsdp2(
    two_ranks: RankPool, inner: str, bucket_mode: str, prefetch: int, unify: bool
) -> None:
    two_ranks.run(
        "tests.distributed.test_training:ten_steps",
        inner=inner,
        bucket_mode=bucket_mode,
        prefetch=prefetch,
        unify=unify,
    )


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_four_ranks_equal_the_reference_and_fsdp2(four_ranks: RankPool, inner: str) -> None:
    four_ranks.run(
        "tests.distributed.test_training:ten_steps", inner=inner, bucket_mode="coalesced", prefetch=1, unify=True
    )
