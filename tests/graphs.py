"""What the tests of the passes share: process groups in this process, a small transformer, graphs written by hand, and
short ways to write a graph down."""

from __future__ import annotations

import contextlib
import difflib
import re
import textwrap
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.foreign import gathers_parameters
from fsdp_passes.passes.unwrap_reads import unwrap_reads
from fsdp_passes.pipeline import CompilationRecord, graph_text, record_compilations
from fsdp_passes.regions import new_label

# ---- process groups --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(backend: str, store: dist.Store, world_size: int) -> Iterator[None]:
    """This process as rank 0; nothing of torch.compile or of the group is left behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


@pytest.fixture
def eight_fake_ranks() -> Iterator[None]:
    """Rank 0 of 8 in a group that moves no data: shapes and orders are real, values are not."""
    with process_group("fake", FakeStore(), 8):
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone: a gather is a copy, so values are those of the unsharded model."""
    with process_group("gloo", dist.HashStore(), 1):
        yield


# ---- a model that is small enough to read its graphs -----------------------------------------------------------------


class Layer(nn.Module):
    """A residual layer with one matrix product."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, bias=False)
        self.mlp = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.mlp(self.norm(x)))


class TinyTransformer(nn.Module):
    """Token ids of shape (length,) in, logits of shape (length, vocab) out.

    The vocabulary is not divisible by 8, so that the embedding and the head are padded on 8 ranks.
    """

    def __init__(self, dim: int = 8, layers: int = 3, vocab: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded_transformer(**sizes: int) -> TinyTransformer:
    """A `TinyTransformer` with every layer a unit, and the root."""
    model = TinyTransformer(**sizes)
    fully_shard(model, units=["layers.*"])
    return model


def compile_step(model: nn.Module, *inputs: Any, backward: bool = True, **options: Any) -> CompilationRecord:
    """Compile `model` (with "aot_eager" unless told) by running one step; what the passes did to its one graph."""
    with record_compilations() as records:
        output = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager", **options})(*inputs)
        if backward:
            output.sum().backward()
    assert len(records) == 1
    return records[0]


def transformer_record(**options: Any) -> CompilationRecord:
    """The passes' record of the sharded `TinyTransformer` on 4 tokens."""
    return compile_step(sharded_transformer(), torch.arange(4), **options)


@contextlib.contextmanager
def switched_off(target: str, result: Any = 0) -> Iterator[None]:
    """Replace the pass that `target` ("module.name") refers to by one that does nothing and returns `result`."""
    with unittest.mock.patch(target, return_value=result):
        yield


def dynamo_graph(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """As `graph_as_traced`, with its parameters read as the passes expect it."""
    gm, example_inputs = graph_as_traced(function, *inputs)
    unwrap_reads(gm)
    return gm, example_inputs


def graph_as_traced(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that Dynamo hands to a backend for `function(*inputs)`, and its example inputs; nothing runs."""
    seen: list[tuple[fx.GraphModule, list[Any]]] = []

    @gathers_parameters
    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append((gm, list(example_inputs)))
        raise NotImplementedError

    with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(function, backend=backend)(*inputs)
    return seen[0]


# ---- labels ----------------------------------------------------------------------------------------------------------


class Named:
    """Stands for a unit where only its name matters."""

    def __init__(self, display_name: str) -> None:
        self.display_name = display_name


_kept: list[Named] = []  # a label keeps nothing alive


def label_named(name: str) -> Tensor:
    """A label of something with this name."""
    _kept.append(Named(name))
    return new_label(_kept[-1])


# ---- graphs written by hand ------------------------------------------------------------------------------------------


def trace(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The ATen graph of `function`, with fake values; `unshard` and `reduce_grad` stay as they are."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def unshard(
    shard: Tensor,
    unit: int,
    *,
    rows: int | None = None,
    world_size: int = 8,
    dtype: torch.dtype | None = None,
    reshard: bool = True,
    label: Tensor | None = None,
) -> Tensor:
    """`fsdp_passes::unshard` on the default group; by default without padding and in the shard's dtype."""
    dtype = dtype or shard.dtype
    rows = shard.shape[0] * world_size if rows is None else rows
    return torch.ops.fsdp_passes.unshard(shard, label, unit, rows, world_size, "0", "0", dtype, dtype, reshard)


def reduce_grad(
    grad: Tensor, unit: int, *, world_size: int = 8, dtype: torch.dtype | None = None, out: torch.dtype | None = None
) -> Tensor:
    """`fsdp_passes::reduce_grad` on the default group; by default in the gradient's dtype throughout."""
    dtype = dtype or grad.dtype
    return torch.ops.fsdp_passes.reduce_grad(grad, None, unit, world_size, "0", dtype, out or dtype)


def assert_keeps_values(gm: fx.GraphModule, inputs: Sequence[Tensor], transform: Callable[[fx.Graph], Any]) -> None:
    """Execute `gm`, transform its graph, and execute it again: equal up to the order of a sum over the ranks."""
    expected = gm(*inputs)
    transform(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=1e-6)


# ---- writing graphs down ---------------------------------------------------------------------------------------------


def folded(text: str) -> str:
    """Long lines folded, so that goldens keep the line length of the project."""
    lines = [
        textwrap.fill(line, 116, subsequent_indent="        ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def short(text: str) -> str:
    """A graph's text for a golden: without namespaces, folded."""
    for word in ("torch.", "_c10d_functional.", "fsdp_passes.", ".default"):
        text = text.replace(word, "")
    return folded(text)


def changes(before: str, after: str) -> str:
    """The lines that a pass removed (-) and inserted (+), in order."""
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    return short("\n".join(line for line in diff if not line.startswith("@@")))


_LINE = re.compile(r"(\w+)(?:: [^=]*)? = ([\w.]+)\((.*)\)$")
_QUIET = {"t", "view", "getitem", "detach", "alias", "_unsafe_view", "slice", "mul", "constant_pad_nd", "expand"}


def steps(graph: fx.Graph | str, only: tuple[str, ...] = ()) -> str:
    """The order of a graph (or of its text): `all_gather_0.start`, `all_gather_0.wait`, `open(label)`, `close(label)`,
    and by name what computes.

    Neighbouring waits of one collective are written once. Views and what prepares or finishes a collective are left
    out, and the regions around starts; with `only`, all but these operators are.
    """
    text = graph if isinstance(graph, str) else graph_text(graph)
    collective: dict[str, str] = {}  # node -> the collective that it is a result of
    is_compute: list[bool] = []  # of the open regions
    words: list[str] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, target, arguments = match.groups()
        operator = re.sub(r"^(_c10d_functional|aten|fsdp_passes)\.", "", target).split(".")[0]
        first = re.match(r"\[?(\w*)", arguments)[1]  # type: ignore[index]
        if operator in ("wait_tensor", "await_collective"):
            word = f"{collective[first]}.wait"
            if words[-1] != word:
                words.append(word)
        elif "_c10d_functional" in target or operator.startswith(("all_gather", "reduce_scatter")):
            collective[name] = name
            words.append(f"{name}.start")
        elif operator == "getitem" and first in collective:
            collective[name] = collective[first]
        elif operator == "region_begin":
            is_compute.append(arguments.endswith("_compute'"))
            if is_compute[-1]:
                words.append(f"open({first})")
        elif operator == "region_end":
            if is_compute.pop():
                words.append(f"close({first})")
        elif operator == "start_next_graph":
            words.append("start_next")
        elif operator in only if only else operator not in _QUIET:
            words.append(name)
    return "\n".join(textwrap.wrap(" ".join(words), 110))
