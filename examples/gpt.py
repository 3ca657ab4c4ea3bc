"""A small GPT over bytes, written without a word about sharding or compilation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 256  # one token per byte
HEAD_DIM = 32


class Block(nn.Module):
    """Pre-norm attention and MLP: (batch, length, dim) in and out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        # No biases: the gradient of the keys' bias is nothing but rounding, which Adam scales up to a full step.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, dim // HEAD_DIM, HEAD_DIM)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Byte ids and the bytes that follow in, the mean cross-entropy in nats out.

    Args:
        dim: width, a multiple of HEAD_DIM.
        layers: number of blocks.
        context: longest sequence.
    """

    def __init__(self, dim: int, layers: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.positions = nn.Parameter(torch.empty(context, dim))
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # The branches' last layers are scaled down as in GPT-2, so that the depth leaves the variance alone.
                is_branch_end = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if is_branch_end else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both (batch, length) int64 -> a scalar in float32."""
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
