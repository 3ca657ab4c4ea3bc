"""Mixed precision where it is easily forgotten: running statistics of a BatchNorm, and a weight that is read outside
of its module's forward. Each against FSDP2 with the same policy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of, float_batches
from tests.distributed.test_odd_models import DIM, Buffers, ChunkedHead
from tests.ranks import RankPool
from tests.training import build, my_share, recorded_all_gathers, whole

HERE = "tests.distributed.test_mixed_precision_reads"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def grads_equal(model: nn.Module, twin: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert param.grad.dtype == other.grad.dtype == torch.float32, name
        scale = whole(other.grad).abs().max().item()
        # bf16 has 8 bits: compilers keep some intermediate results in more.
        torch.testing.assert_close(whole(param.grad), whole(other.grad), rtol=0, atol=0.03 * scale + 1e-6, msg=name)


def statistics(way: str) -> None:
    """Running statistics stay in float32 and follow bf16 activations as FSDP2's do. The norm is a unit of its own whose
    parameters stay in float32: PyTorch's kernels take no bf16 weight beside float32 statistics."""
    model, twin = build(Buffers)
    for shard, each in ((fully_shard, model), (fsdp2.fully_shard, twin)):
        shard(each.proj, mp_policy=POLICY)
        shard(each.norm, mp_policy=MixedPrecisionPolicy())
        shard(each, mp_policy=POLICY)
    call = call_of(model, way)
    for batch in float_batches(3, 8, DIM):
        for module, run in ((model, call), (twin, twin)):
            module.zero_grad()
            run(*my_share(batch)).backward()
        grads_equal(model, twin)
    for name, value in twin.named_buffers():
        found = model.get_buffer(name)
        assert found.dtype == value.dtype != torch.bfloat16, name
        torch.testing.assert_close(found, value, rtol=1e-2, atol=1e-2, msg=name)
    assert model.norm.num_batches_tracked == 3


def chunks(way: str) -> None:
    """The head's weight comes in bf16 to a loss that reads it itself, and is gathered once for all chunks."""
    model, twin = build(ChunkedHead)
    seen: list[torch.dtype] = []
    fully_shard(model, units=["layers.*"], mp_policy=POLICY)
    for module in (*twin.layers, twin):
        fsdp2.fully_shard(module, mp_policy=POLICY)
    call = call_of(model, way)
    for step, batch in enumerate(float_batches(2, 8, DIM)):
        for module, run in ((model, call), (twin, twin)):
            module.zero_grad()
            with recorded_all_gathers("root") as gathers:
                loss = run(*my_share(batch))
                loss.backward()
            seen.append(loss.dtype)
            if module is model:
                assert len(gathers) == 1, f"step {step}: {gathers}"
        grads_equal(model, twin)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["statistics", "chunks"])
def test_buffers_and_outside_reads_in_mixed_precision_equal_fsdp2(two_ranks: RankPool, case: str, way: str) -> None:
    two_ranks.run(f"{HERE}:{case}", way=way)
