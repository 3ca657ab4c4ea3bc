"""Mixed precision: bf16 compute with fp32 weights and reductions, and units that hold parameters of two dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from fsdp_passes import fully_shard
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import WAYS, call_of, collectives, float_batches
from tests.models import Block, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, recorded_collectives, train, whole

HERE = "tests.distributed.test_precision"

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LanguageModel(nn.Module):
    """The loss is computed in fp32, so that it is not rounded to bf16's steps of 1/64."""

    def __init__(self, vocab: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, 61) for _ in range(2))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def shard_with_fsdp2(model: nn.Module, units: list[nn.Module], policy: MixedPrecisionPolicy = POLICY) -> nn.Module:
    for unit in [*units, model]:
        fsdp2.fully_shard(unit, mp_policy=policy)
    return model


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest error of any tensor of `a`, relative to the largest value of its partner in `b`."""
    assert a.keys() == b.keys()
    return max(((a[name] - value).abs().max() / value.abs().max()).item() for name, value in b.items())


def bf16_training(way: str) -> None:
    batches = token_batches(10, 8, 16)
    model, reference = build(LanguageModel)
    twin, _ = build(LanguageModel)
    fully_shard(model, units=["layers.*"], mp_policy=POLICY)
    shard_with_fsdp2(twin, list(twin.layers))
    call = call_of(model, way)
    with record_compilations() as records:
        found = train(model, batches, sharded=True, call=call)
    expected, theirs = train(reference, batches, sharded=False), train(twin, batches, sharded=True)

    if way != "fallback":
        sent = [line.split() for phase in ("forward", "backward") for line in collectives(records[0], phase)]
        expected_dtypes = {"all_gather": "bfloat16", "reduce_scatter": "float32"}
        assert all(dtype == expected_dtypes[kind] for kind, _, dtype, _ in sent), sent
    call(*my_share(batches[0])).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())

    # bf16 keeps 8 bits: each rounding is off by up to 2^-9, and the loss is about 4.
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=4 * 2**-9)
    # Against FSDP2 the order of the roundings is the same with the same kernels; Inductor's fused ones round less.
    atol = 1e-5 if way != "inductor" else 4 * 2**-9
    torch.testing.assert_close(found.losses, theirs.losses, rtol=0, atol=atol)
    error_of_fsdp2 = largest_gap(theirs.grads, expected.grads)
    assert 1e-3 < error_of_fsdp2 < 0.2, "bf16 compute must show, and not more than that"
    assert largest_gap(found.grads, expected.grads) < 1.5 * error_of_fsdp2
    if way != "inductor":
        assert_same(found, theirs)


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "fallback"])
def test_bf16_compute_with_fp32_weights_equals_fsdp2_and_follows_the_fp32_loss(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:bf16_training", way=way)


def reduction_in_fp32(way: str) -> None:
    """Gradients 1 and 2^-10 on two ranks: their mean in bf16 would lose the smaller one."""
    weight = nn.Linear(4, 4, bias=False)
    fully_shard(weight, mp_policy=POLICY)
    x = torch.full((1, 4), 1.0 if dist.get_rank() == 0 else 2**-10, dtype=torch.bfloat16)
    call_of(weight, way)(x).float().sum().backward()
    assert torch.equal(whole(weight.weight.grad), torch.full((4, 4), (1 + 2**-10) / 2))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_summed_in_the_reduce_dtype(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:reduction_in_fp32", way=way)


# ---- dtypes of inputs and outputs ------------------------------------------------------------------------------------


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def casts_at_the_edges(way: str, output_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=output_dtype)
    model, twin = build(Regression)
    fully_shard(model, mp_policy=policy)
    shard_with_fsdp2(twin, [], policy)
    x = my_share(float_batches(1, 4, 8)[0])[0]
    found, expected = call_of(model, way)(x), twin(x)
    assert found.dtype == expected.dtype == (output_dtype or torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("output_dtype", [None, torch.float32])
def test_fp32_inputs_and_outputs_are_cast_as_fsdp2_does(
    two_ranks: RankPool, output_dtype: torch.dtype | None, way: str
) -> None:
    two_ranks.run(f"{HERE}:casts_at_the_edges", way=way, output_dtype=output_dtype)


# ---- two dtypes in one unit ------------------------------------------------------------------------------------------


class HalfBlock(nn.Module):
    """fp32 norm, bf16 linears."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 21, dtype=torch.bfloat16)
        self.down = nn.Linear(21, dim, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x).bfloat16()))).float()


class HalfModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(HalfBlock(), HalfBlock())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def two_dtypes(way: str, reduce_dtype: torch.dtype | None) -> None:
    model, reference = build(HalfModel)
    fully_shard(model, units=["layers.*"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    call = call_of(model, way)
    # Every rank sees the same rows, so that the mean over the ranks is exact and even bf16 must agree to the bit.
    # No clipping: the norm is summed in another order over shards.
    batches = float_batches(3, 4, 16)
    how = {"sharded": False, "clip": None, "optimizer": torch.optim.SGD}
    with record_compilations() as records:
        found = train(model, batches, call=call, **how)
    assert_same(found, train(reference, batches, **how), atol=0)
    assert {name: grad.dtype for name, grad in found.grads.items()} == {n: p.dtype for n, p in found.params.items()}

    if way == "fallback":
        return
    assert sorted(collectives(records[0], "forward")) == [
        "all_gather layers.0 bfloat16 4",
        "all_gather layers.0 float32 2",
        "all_gather layers.1 bfloat16 4",
        "all_gather layers.1 float32 2",
    ]
    reductions = sorted(s for s in collectives(records[0], "backward") if s.startswith("reduce_scatter"))
    assert reductions == (
        ["reduce_scatter layers.0 float32 6", "reduce_scatter layers.1 float32 6"]
        if reduce_dtype
        else [
            "reduce_scatter layers.0 bfloat16 4",
            "reduce_scatter layers.0 float32 2",
            "reduce_scatter layers.1 bfloat16 4",
            "reduce_scatter layers.1 float32 2",
        ]
    )
    with recorded_collectives() as seen:
        call(*batches[0]).backward()
    assert len(seen) == sum(len(collectives(records[0], phase)) for phase in ("forward", "backward"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_two_dtypes_in_one_unit_travel_in_a_bucket_each(
    two_ranks: RankPool, reduce_dtype: torch.dtype | None, way: str
) -> None:
    two_ranks.run(f"{HERE}:two_dtypes", way=way, reduce_dtype=reduce_dtype)


# ---- fp16 ------------------------------------------------------------------------------------------------------------

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


def fp16_sums(way: str, accumulated: bool) -> None:
    """60000 on both ranks: their sum is beyond fp16's 65504, their mean is not."""
    model = nn.Linear(3, 5, bias=False)
    fully_shard(model, mp_policy=FP16)
    call = call_of(model, way)
    for value in [20000.0, 40000.0] if accumulated else [60000.0]:
        model.set_requires_gradient_sync(not accumulated or value == 40000.0)
        call(torch.full((1, 3), value)).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    torch.testing.assert_close(whole(model.weight.grad), torch.full((5, 3), 60000.0), rtol=2**-10, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulated", [False, True])
def test_fp16_gradients_are_divided_before_their_sum_can_overflow(
    two_ranks: RankPool, accumulated: bool, way: str
) -> None:
    two_ranks.run(f"{HERE}:fp16_sums", way=way, accumulated=accumulated)


def fp16_training(way: str) -> None:
    model, twin = build(Regression)
    fully_shard(model, mp_policy=FP16)
    shard_with_fsdp2(twin, [], FP16)
    call = call_of(model, way)
    for batch in float_batches(2, 4, 8):
        call(*my_share(batch)).float().square().sum().backward()
        twin(*my_share(batch)).float().square().sum().backward()
        for (name, param), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            torch.testing.assert_close(whole(param.grad), whole(other[1].grad), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_fp16_gradients_equal_those_of_fsdp2(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:fp16_training", way=way)


# ---- inputs that are not cast, and buffers ---------------------------------------------------------------------------


class Rotary(nn.Module):
    """The positions need fp32; the buffer keeps its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.arange(1, 9) / 7)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions * self.frequencies
        return self.proj(x.to(self.proj.weight.dtype)) * angles.cos().to(x.dtype), angles


def inputs_not_cast(way: str, cast: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=cast)
    model, twin = build(Rotary)
    fully_shard(model, mp_policy=policy)
    shard_with_fsdp2(twin, [], policy)
    x = my_share(float_batches(1, 4, 8)[0])[0]
    positions = torch.full((1, 1), 257.0)  # in bf16: 256
    results = [call(x, positions) for call in (call_of(model, way), twin)]
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert results[0][1][0, 6].item() == (256.0 if cast else 257.0)
    assert model.frequencies.dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cast", [True, False])
def test_inputs_are_cast_unless_the_policy_says_no_and_buffers_never(two_ranks: RankPool, cast: bool, way: str) -> None:
    two_ranks.run(f"{HERE}:inputs_not_cast", way=way, cast=cast)
