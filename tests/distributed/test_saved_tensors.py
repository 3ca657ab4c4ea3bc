"""What a compiled forward keeps for its backward holds no gathered weight, nor a view, a cast or a piece of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_passes import fully_shard
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import assert_sends, compiled, float_batches
from tests.models import Checkpointed, Transformer, token_batches
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_saved_tensors"


def saved_tensors(loss: Tensor) -> list[Tensor]:
    """Everything that the compiled graphs behind `loss` keep alive for their backward."""
    found: list[Tensor] = []
    pending, seen = [loss.grad_fn], set()
    num_graphs = 0
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            num_graphs += 1
            found += [t for t in node.saved_tensors if isinstance(t, Tensor)]
            found += [t for t in getattr(node, "_tensors_no_vc_check", None) or () if isinstance(t, Tensor)]
        pending += [following for following, _ in node.next_functions]
    assert num_graphs > 0, "no compiled graph made this loss"
    return found


def is_made_of(saved: Tensor, weight: Tensor) -> bool:
    """Whether `saved` holds all values of `weight` in any order and dtype, or in its dtype nothing else but them."""
    if not saved.is_floating_point() or saved.numel() < 2:
        return False
    if saved.numel() == weight.numel():
        return torch.equal(
            saved.flatten().sort().values.float(), weight.to(saved.dtype).flatten().sort().values.float()
        )
    return saved.dtype == weight.dtype and bool(torch.isin(saved, weight).all())


def weights_kept(model: nn.Module, loss: Tensor) -> set[str]:
    """Names of the parameters that the backward's saved tensors hold, this rank's own shards aside."""
    shards = {param.to_local().untyped_storage().data_ptr() for param in model.parameters()}
    saved = [t for t in saved_tensors(loss) if t.untyped_storage().data_ptr() not in shards]
    assert saved
    return {
        name
        for name, param in model.named_parameters()
        for value in [whole(param)]
        if any(is_made_of(tensor, value) for tensor in saved)
    }


def randomized(model: nn.Module) -> nn.Module:
    """No two parameters, and no two elements of one, are equal: a saved tensor tells where it comes from."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) / param.shape[-1] ** 0.5 + (param.dim() == 1))
    return model


# ---- plain training --------------------------------------------------------------------------------------------------


def transformer_keeps(inner: str, reshard: bool | None, autocast: bool) -> None:
    model, reference = build(lambda: randomized(Transformer(hidden=61)))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    batch = my_share(token_batches(1, 4, 8)[0])
    with record_compilations() as records, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = compiled(model, inner)(*batch)
        expected = reference(*batch)
    torch.testing.assert_close(loss, expected, rtol=0, atol=5e-2 if autocast else 1e-5)
    kept = weights_kept(model, loss)
    in_layers = {name for name in kept if name.startswith("layers.")}
    if reshard is False:
        # Shows that the search finds weights where there are some.
        assert {name.split(".", 2)[2] for name in in_layers} >= {"qkv.weight", "proj.weight", "up.weight"}, in_layers
    else:
        assert not in_layers, in_layers
    assert "head.weight" in kept, "the root stays gathered"
    layers = [f"layers.{i}" for i in range(3)]
    loss.backward()
    regathered = [] if reshard is False else layers
    assert_sends(records[0], {"root": 4, **dict.fromkeys(layers, 11)}, regathered=regathered)


@pytest.mark.parametrize(
    ("inner", "reshard", "autocast"),
    [
        ("aot_eager", None, False),
        ("aot_eager", None, True),
        ("aot_eager", False, False),
        ("inductor", None, False),
    ],
)
def test_a_transformer_keeps_no_weight_of_a_unit_that_reshards(
    two_ranks: RankPool, inner: str, reshard: bool | None, autocast: bool
) -> None:
    two_ranks.run(f"{HERE}:transformer_keeps", inner=inner, reshard=reshard, autocast=autocast)


# ---- transposed, cast, cut -------------------------------------------------------------------------------------------


class Transformed(nn.Module):
    """Weights reach their matrix products through views, copies and casts."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(dim, dim))
        self.copied = nn.Parameter(torch.empty(dim, dim))
        self.cast = nn.Parameter(torch.empty(dim, dim))
        self.twice = nn.Parameter(torch.empty(dim, dim))
        self.heads = nn.Parameter(torch.empty(3 * dim, dim))
        self.flat = nn.Parameter(torch.empty(dim * dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.transposed.t())
        x = torch.tanh(x @ self.copied.t().contiguous())
        x = torch.tanh((x.bfloat16() @ self.cast.bfloat16()).float())
        x = torch.tanh(x.double() @ self.twice.double().t().clone()).float()
        q, k, v = self.heads.chunk(3)
        x = torch.tanh(torch.einsum("bi,oi->bo", x, q) * (x @ k.t()) + F.linear(x, v, self.bias))
        return torch.tanh(x @ self.flat.view(x.shape[-1], -1))


class TransformedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Transformed(), Transformed())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def transformed_keeps(autocast: bool) -> None:
    model, reference = build(lambda: randomized(TransformedModel()))
    fully_shard(model, units=["layers.*"])
    (x,) = float_batches(1, 8, 12)[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = compiled(model)(*my_share((x,)))
        expected = reference(x)
    assert weights_kept(model, loss) == set()
    loss.backward()
    expected.backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Products in bf16 round other rows together here than there.
        atol = 2**-7 * other.grad.abs().max().item()
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("autocast", [False, True])
def test_transposed_copied_cast_and_cut_weights_are_not_kept(two_ranks: RankPool, autocast: bool) -> None:
    two_ranks.run(f"{HERE}:transformed_keeps", autocast=autocast)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


def checkpointed_keeps() -> None:
    model, _ = build(lambda: randomized(Checkpointed(hidden=61)))
    fully_shard(model, units=["layers.*"])
    loss = compiled(model)(*my_share(token_batches(1, 4, 8)[0]))
    assert not {name for name in weights_kept(model, loss) if name.startswith("layers.")}


def test_checkpointed_layers_keep_no_weight(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:checkpointed_keeps")
