"""`offload_policy=CPUOffloadPolicy()`: shards and gradients at home on the CPU. On a mesh of CPUs the copies are nothing,
and all else is as with a device: what is gathered, sent home, waited for and written, and when."""

from __future__ import annotations

import copy
import warnings
from typing import Any

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
from tests.distributed.checks import call_of, compiled
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
