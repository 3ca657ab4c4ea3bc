"""The models that are measured, by name of shape.

Every model takes (input, target) and returns its loss in fp32; its units are `layers.*` and the root. All first
dimensions of parameters are multiples of 8, so that no system has to pad.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MlpBlock(nn.Module):
    """Norm, up to `hidden`, GELU, down again, added to the input."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MlpBlocks(nn.Module):
    """Blocks of (tokens, dim); the loss is the mean square distance from the target."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MlpBlock(dim, 4 * dim) for _ in range(num_layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), target.float())


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, then a gated MLP, each behind an RMS norm."""

    def __init__(self, dim: int, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        h = self.attention_norm(x)
        q = self.q(h).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(h).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(h).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, dim))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x (batch, heads, length, head_dim), cos and sin (length, head_dim / 2) in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Token ids (batch, length) and targets of the same shape in, the mean cross-entropy out."""

    def __init__(
        self, vocab: int, dim: int, hidden: int, num_layers: int, num_heads: int, num_kv_heads: int, max_length: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, hidden, num_heads, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        half = dim // num_heads // 2
        angles = torch.outer(torch.arange(max_length).float(), 10000.0 ** (-torch.arange(half).float() / half))
        # One table of angles in fp32, which no system casts or shards.
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = self.angles[: tokens.shape[1]]
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and the batch of one rank.

    Attributes:
        kind: "mlp" or "llama".
        tokens: sequence length of one sample (llama), rows of the batch (mlp).
        batch: samples (llama only).
        bf16: compute in bf16 with fp32 masters; else all in fp32.
    """

    kind: str
    dim: int
    layers: int
    tokens: int
    batch: int = 1
    bf16: bool = True
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0

    def make(self, device: torch.device) -> nn.Module:
        """The model in fp32 with the same weights on every rank."""
        torch.manual_seed(0)
        with device:
            if self.kind == "mlp":
                return MlpBlocks(self.dim, self.layers)
            model = Llama(
                self.vocab, self.dim, self.hidden, self.layers, self.heads, self.kv_heads, max_length=self.tokens
            )
            # nn.Embedding starts with a deviation of 1, which a residual stream of this depth hides everything under.
            nn.init.normal_(model.embed.weight, std=0.02)
            return model

    def batch_of(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random data of this rank: zeros would make matrix products faster than they are."""
        generator = torch.Generator(device).manual_seed(1000 + rank)
        if self.kind == "mlp":
            dtype = torch.bfloat16 if self.bf16 else torch.float32
            size = (self.tokens, self.dim)
            x, y = (torch.randn(size, generator=generator, device=device) for _ in range(2))
            return x.to(dtype), y.to(dtype)
        size = (self.batch, self.tokens)
        x, y = (torch.randint(self.vocab, size, generator=generator, device=device) for _ in range(2))
        return x, y

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def text(self) -> str:
        """One line for a table's heading."""
        dtype = "bf16 with fp32 masters" if self.bf16 else "fp32"
        if self.kind == "mlp":
            return f"{self.layers} MLP blocks of d={self.dim}, {self.tokens} tokens per rank, {dtype}"
        return (
            f"Llama of {self.layers} layers, d={self.dim}, hidden {self.hidden}, {self.heads} heads "
            f"({self.kv_heads} of keys), vocabulary {self.vocab}, {self.batch} x {self.tokens} tokens per rank, {dtype}"
        )


_SMALL = {"dim": 4096, "layers": 8, "hidden": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}  # 2.0 B parameters
_LARGE = {**_SMALL, "layers": 32, "vocab": 128256}  # 8.0 B: the published sizes of Llama 3 8B

SHAPES: dict[str, Shape] = {
    "mlp_1k": Shape("mlp", dim=4096, layers=8, tokens=1024),
    "mlp_4k": Shape("mlp", dim=4096, layers=8, tokens=4096),
    "mlp_16k": Shape("mlp", dim=4096, layers=8, tokens=16384),
    "transformer": Shape(
        "llama", dim=2048, layers=8, tokens=2048, batch=2, hidden=5632, heads=16, kv_heads=8, vocab=32000
    ),
    "llama_2b": Shape("llama", tokens=4096, **_SMALL),
    "llama_2b_batch4": Shape("llama", tokens=4096, batch=4, **_SMALL),
    "llama_8b": Shape("llama", tokens=4096, **_LARGE),
    "llama_8b_batch4": Shape("llama", tokens=4096, batch=4, **_LARGE),
    # Small enough for two CPU cores.
    "two_hosts": Shape("mlp", dim=768, layers=8, tokens=512, bf16=False),
    "tiny": Shape("mlp", dim=64, layers=3, tokens=32, bf16=False),
    "tiny_bf16": Shape("mlp", dim=64, layers=3, tokens=256),
    "tiny_llama": Shape("llama", dim=64, layers=2, tokens=32, bf16=False, hidden=128, heads=4, kv_heads=2, vocab=128),
}
