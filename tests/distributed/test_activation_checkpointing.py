"""Activation checkpointing around the layers of a compiled model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, assert_trains_as_unsharded
from tests.models import Block, Checkpointed, Transformer, token_batches
from tests.ranks import RankPool

HERE = "tests.distributed.test_activation_checkpointing"

aten = torch.ops.aten


def save_matrix_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A usual user's policy: recompute everything but the expensive operations."""
    save = op in (aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def selective(layer: Callable[..., Tensor], x: Tensor) -> Tensor:
    context = functools.partial(create_selective_checkpoint_contexts, save_matrix_products)
    return checkpoint(layer, x, use_reentrant=False, context_fn=context)


class Selective(Checkpointed):
    def call_layer(self, index: int, x: Tensor) -> Tensor:
        return selective(self.layers[index], x)


class Alternating(Checkpointed):
    def call_layer(self, index: int, x: Tensor) -> Tensor:
        return self.layers[index](x) if index % 2 else super().call_layer(index, x)


MODELS = {"full": Checkpointed, "selective": Selective, "alternating": Alternating}


def checkpointed_training(kind: str, way: str) -> None:
    layers = [f"layers.{i}" for i in range(3)]
    assert_trains_as_unsharded(
        functools.partial(MODELS[kind], hidden=61),
        token_batches(3, 4, 8),
        way=way,
        shard=functools.partial(fully_shard, units=["layers.*"]),
        # One all-gather in the forward, one in the backward: recomputation and gradients share it.
        sends={"gathered": {"root": 4, **dict.fromkeys(layers, 11)}, "regathered": layers},
    )


def wrapped_training(way: str) -> None:
    """PyTorch's wrapper modules around the blocks, the units inside them."""

    def make() -> Transformer:
        model = Transformer(layers=2, hidden=61)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return model

    layers = [f"layers.{i}" for i in range(2)]
    assert_trains_as_unsharded(
        make,
        token_batches(3, 4, 8),
        way=way,
        shard=functools.partial(fully_shard, units=["layers.*"]),
        sends={"gathered": {"root": 4, **dict.fromkeys(layers, 11)}, "regathered": layers},
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_checkpointed_layers_train_as_unsharded_with_two_gathers_a_step(
    two_ranks: RankPool, kind: str, way: str
) -> None:
    two_ranks.run(f"{HERE}:checkpointed_training", kind=kind, way=way)


@pytest.mark.parametrize("way", WAYS)
def test_layers_in_checkpoint_wrappers_train_as_unsharded_with_two_gathers_a_step(
    two_ranks: RankPool, way: str
) -> None:
    two_ranks.run(f"{HERE}:wrapped_training", way=way)
