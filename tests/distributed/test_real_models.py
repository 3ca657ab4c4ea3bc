"""Models as people have them: each trains three steps as the unsharded model does, compiled and in the fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_passes import fully_shard
from tests.distributed.checks import WAYS, call_of
from tests.models import Block
from tests.ranks import RankPool
from tests.training import Batch, assert_same, build, train

HERE = "tests.distributed.test_real_models"

# ---- Hugging Face's classes, from small configurations ---------------------------------------------------------------


class LanguageModel(nn.Module):
    """The loss of a causal language model of `transformers`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        sizes: dict[str, Any] = {"vocab_size": 64, "use_cache": False, "attn_implementation": "sdpa"}
        if name == "gpt2":
            dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **dropouts, **sizes)
            self.inner = transformers.GPT2LMHeadModel(config)
        else:
            sizes |= {"hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
            sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 16}
            kind = {"llama": "Llama", "qwen": "Qwen2"}[name]
            config = getattr(transformers, f"{kind}Config")(**sizes)
            self.inner = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, labels=tokens).loss


class Translation(nn.Module):
    """The loss of T5, an encoder-decoder that ties both embeddings and the head."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
        self.inner = transformers.T5ForConditionalGeneration(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, labels=tokens).loss


# ---- written here ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 9, 3, stride=2, padding=1)
        self.layers = nn.Sequential(Residual(9), Residual(9))
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.stem(x)).mean((2, 3))), torch.arange(len(x)) % 5)


class VisionTransformer(nn.Module):
    """A class token and learned positions: parameters of the root itself, with a first dimension of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.full((1, 1, 16), 0.1))
        self.positions = nn.Parameter(torch.randn(1, 5, 16) / 10)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 37, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.positions
        for layer in self.layers:
            y = layer(y)
        return F.cross_entropy(self.head(y[:, 0]), torch.arange(len(x)) % 5)


class EncoderDecoder(nn.Module):
    """Source and target embeddings and the head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(67, 16)
        self.target = nn.Embedding(67, 16)
        self.head = nn.Linear(16, 67, bias=False)
        self.target.weight = self.head.weight = self.source.weight
        self.encoder = nn.ModuleList(Block(16, 37) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 37, 0.0, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = self.source(tokens), self.target(tokens.flip(1))
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten())


class Experts(nn.Module):
    """Each token goes to the better of three experts; every expert runs on its tokens only, and a rank may have none
    for one: its weights then take part with an empty batch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 21), nn.GELU(), nn.Linear(21, dim)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + y


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - 1).square().mean()


# ---- data and tests --------------------------------------------------------------------------------------------------


def token_ids(rows: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(1, 64, (rows, 8), generator=generator),) for _ in range(3)]


def floats(*shape: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator),) for _ in range(3)]


# Of each model: how it is made, its units, its data.
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[str], Callable[[], list[Batch]]]] = {
    "llama": (lambda: LanguageModel("llama"), ["inner.model.layers.*"], token_ids),
    "qwen": (lambda: LanguageModel("qwen"), ["inner.model.layers.*"], token_ids),
    "gpt2": (lambda: LanguageModel("gpt2"), ["inner.transformer.h.*"], token_ids),
    "t5": (Translation, ["inner.encoder.block.*", "inner.decoder.block.*"], token_ids),
    "resnet": (ResNet, ["layers.*"], lambda: floats(10, 3, 8, 8)),
    "vit": (VisionTransformer, ["layers.*"], lambda: floats(10, 3, 8, 8)),
    "encoder_decoder": (EncoderDecoder, ["encoder.*", "decoder.*"], token_ids),
    "experts": (MixtureOfExperts, ["layers.*"], lambda: floats(12, 12)),
}
FROM_TRANSFORMERS = ("llama", "qwen", "gpt2", "t5")


def trains_as_unsharded(name: str, way: str) -> None:
    """Without AdamW: gradients that are zero but for rounding (biases in front of a norm or of keys) would become full
    steps. Every rank sees the whole batch where statistics over it are part of the model."""
    make, units, data = MODELS[name]
    model, reference = build(make)
    fully_shard(model, units=units)
    how = {"optimizer": torch.optim.SGD, "lr": 0.1}
    sharded = name != "resnet"
    found = train(model, data(), sharded=sharded, call=call_of(model, way), **how)
    expected = train(reference, data(), sharded=False, **how)
    assert expected.losses[-1] != expected.losses[0]
    assert_same(found, expected)
    for (buffer, value), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-5, msg=buffer)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_model_trains_as_unsharded(two_ranks: RankPool, name: str, way: str) -> None:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the models of Hugging Face need: pip install transformers")
    two_ranks.run(f"{HERE}:trains_as_unsharded", name=name, way=way)
