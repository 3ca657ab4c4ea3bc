"""Small models that the tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard, overlap_fsdp


class Block(nn.Module):
    """A pre-norm transformer block with causal attention; dim must be a multiple of 4."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        # No bias: the gradient of the keys' bias is zero but for rounding, which Adam scales up to a full step.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden or 4 * dim)
        self.down = nn.Linear(hidden or 4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, dim // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids and targets in, the loss out."""

    def __init__(
        self, vocab: int = 64, dim: int = 32, layers: int = 3, hidden: int | None = None, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def sharded_call(model: Transformer, system: str, *, inner: str = "inductor") -> Callable[..., Tensor]:
    """Shard the model, and what to call it by: "fsdp2", "compiled" by this library, or any other name for its fallback.

    `inner` compiles "compiled".
    """
    if system == "fsdp2":
        for layer in model.layers:
            fsdp2.fully_shard(layer)
        fsdp2.fully_shard(model)
    else:
        fully_shard(model, units=["layers.*"])
    return torch.compile(model, backend=overlap_fsdp, options={"inner": inner}) if system == "compiled" else model


class Checkpointed(Transformer):
    """Every layer is recomputed in the backward."""

    use_reentrant = False

    def call_layer(self, index: int, x: Tensor) -> Tensor:
        return checkpoint(self.layers[index], x, use_reentrant=self.use_reentrant)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in range(len(self.layers)):
            x = self.call_layer(index, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def token_batches(
    steps: int, batch: int, length: int, *, vocab: int = 64, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """The same global batches on every rank: (tokens, targets), each (batch, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, vocab, (batch, length), generator=generator),
            torch.randint(0, vocab, (batch, length), generator=generator),
        )
        for _ in range(steps)
    ]
