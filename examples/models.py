"""Models for `python -m fsdp_passes`: each function gives a sharded model and the arguments of one training step.

    python -m fsdp_passes explain examples.models:llama3_8b --world-size 64

That is all a TARGET has to do. It is called without arguments, once a process group exists: a fake one of
`--world-size` ranks, so that nothing is communicated. On the meta device no memory is needed either.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from fsdp_passes import fully_shard

sys.path.append(str(Path(__file__).parent))
from gpt import GPT

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LlamaBlock(nn.Module):
    """Pre-norm attention with grouped keys and values and rotary positions, and a gated MLP.

    (batch, length, dim) in and out.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q = rotate(self.split(self.q(h), self.heads), cos, sin)
        k = rotate(self.split(self.k(h), self.kv_heads), cos, sin)
        v = self.split(self.v(h), self.kv_heads)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def split(self, x: Tensor, heads: int) -> Tensor:
        """(batch, length, heads * head_dim) -> (batch, heads, length, head_dim)"""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair of a head's two halves is turned by its angle; tables (length, head_dim)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """Token ids and the ids that follow in, both (batch, length) int64; the mean cross-entropy out.

    Args:
        dim, layers, heads, kv_heads, hidden, vocab: sizes as in the Llama 3 family.
        context: longest sequence.
    """

    def __init__(self, dim: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        rates = 500_000.0 ** (-torch.arange(0, dim // heads, 2).float() / (dim // heads))
        angles = torch.outer(torch.arange(context).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _tokens(batch: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def llama3_8b(layers: int = 32, batch: int = 1, length: int = 8192) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Llama 3 8B on the meta device in bf16, each layer a unit, one sequence of 8192 tokens per rank."""
    with torch.device("meta"):
        model = Llama(4096, layers, 32, 8, 14336, 128256, 8192)
        args = _tokens(batch, length, 128256)
    fully_shard(model, units=["layers.*"], mp_policy=BF16)
    return model, args


def gpt_small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The GPT of the other examples: four layers of width 128, four sequences of 64 bytes."""
    model = GPT(128, 4, 64)
    fully_shard(model, units=["layers.*"])
    return model, _tokens(4, 64, 256)
