"""Random models for `tools/fuzz.py`: a description that prints as Python, the model that it stands for, and checks.

Every block maps (rows, dim) to (rows, dim), so that any tree of blocks is a model. Nothing in it depends on other rows,
so that ranks with a share of the rows each compute what one process computes with all.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import ScheduleWarning
from fsdp_passes.pipeline import CompilationRecord, record_compilations
from fsdp_passes.schedule import gathered_outputs
from tests.training import assert_same, build, train

LEAVES = (
    *("linear", "mlp", "norm", "scale", "table", "views", "twice", "inplace", "unused", "conv"),
    *("dropout", "double", "scalar"),
)
ROWS = 8


@dataclasses.dataclass(frozen=True)
class Spec:
    """One block.

    Attributes:
        kind: one of LEAVES, or "sequence", "residual", "branches", "checkpointed" with `children`; or "shared": the
            module of an earlier leaf once more, counted by `size`; or "tied": a product with that leaf's first weight.
        size: rows of the inner weight; they need not be divisible by the number of ranks.
        frozen: whether the block's parameters require no gradient.
        is_unit: whether `fully_shard` is called on it.
        reshard: what is passed as `reshard_after_forward`.
    """

    kind: str
    size: int = 3
    frozen: bool = False
    is_unit: bool = False
    reshard: bool | None = None
    children: tuple[Spec, ...] = ()

    @property
    def num_leaves(self) -> int:
        return sum(child.num_leaves for child in self.children) or 1


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A root with blocks, and how it is compiled.

    Attributes:
        half: whether parameters are gathered in bfloat16; for the invariants only, since it rounds.
        inner: the compiler; Inductor takes seconds for what the others do in tenths.
    """

    blocks: tuple[Spec, ...]
    dim: int = 4
    head: bool = False
    reshard: bool | None = None
    prefetch: int = 1
    bucket_mode: str = "coalesced"
    unify_communication_stream: bool = True
    half: bool = False
    inner: str = "aot_eager"

    @property
    def options(self) -> dict[str, Any]:
        names = ("prefetch", "bucket_mode", "unify_communication_stream")
        return {name: getattr(self, name) for name in names}

    @property
    def num_leaves(self) -> int:
        return sum(block.num_leaves for block in self.blocks)


_reshards = st.sampled_from((None, None, True, False))
_leaves = st.builds(
    Spec,
    kind=st.sampled_from((*LEAVES, "shared", "tied")),
    size=st.integers(1, 9),
    frozen=st.sampled_from((False, False, False, True)),
    is_unit=st.booleans(),
    reshard=_reshards,
)
_blocks = st.recursive(
    _leaves,
    lambda inner: st.builds(
        Spec,
        kind=st.sampled_from(("sequence", "residual", "branches", "checkpointed")),
        is_unit=st.booleans(),
        reshard=_reshards,
        children=st.lists(inner, min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=6,
)
model_specs = st.builds(
    ModelSpec,
    blocks=st.lists(_blocks, min_size=1, max_size=4).map(tuple),
    dim=st.integers(2, 7),
    head=st.booleans(),
    reshard=_reshards,
    prefetch=st.integers(1, 3),
    bucket_mode=st.sampled_from(("coalesced", "packed")),
    unify_communication_stream=st.sampled_from((True, True, False)),
    half=st.sampled_from((False, False, True)),
    inner=st.sampled_from(("aot_eager",) * 29 + ("inductor",)),
)


class Block(nn.Module):
    """The module of one `Spec`. `leaves` are those before it."""

    def __init__(self, spec: Spec, dim: int, leaves: list[Block]) -> None:
        super().__init__()
        self.kind, self.dim, size = spec.kind, dim, spec.size
        if spec.kind in ("shared", "tied") and not leaves:
            self.kind = "linear"
        if self.kind in ("linear", "twice", "views", "inplace", "unused", "dropout", "double", "scalar"):
            self.inner = nn.Linear(dim, dim, dtype=torch.float64 if self.kind == "double" else None)
        if self.kind == "dropout":
            self.drop = nn.Dropout(0.5)
        if self.kind == "scalar":
            self.temperature = nn.Parameter(torch.tensor(0.7))
        if self.kind == "unused":
            self.extra = nn.Parameter(torch.ones(size, 2))
        if self.kind == "mlp":
            self.up, self.down = nn.Linear(dim, size), nn.Linear(size, dim, bias=size % 2 == 0)
        if self.kind == "norm":
            self.inner = nn.LayerNorm(dim)
        if self.kind == "scale":
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        if self.kind == "table":
            self.inner = nn.Embedding(size, dim)
        if self.kind == "conv":
            self.inner = nn.Conv1d(1, size, 1)
        if self.kind == "shared":
            self.inner = leaves[spec.size % len(leaves)]
        if self.kind == "tied":
            source = leaves[spec.size % len(leaves)]
            self.weight = next((p for p in source.parameters() if p.shape == (dim, dim)), nn.Parameter(torch.eye(dim)))
        if spec.frozen and self.kind not in ("shared", "tied"):
            self.requires_grad_(False)
        self.children_ = nn.ModuleList()
        for child in spec.children:
            self.children_.append(Block(child, dim, leaves))
        if not spec.children and self.kind not in ("shared", "tied"):
            leaves.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.kind)(x)

    def linear(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    unused = norm = shared = linear

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def scale(self, x: Tensor) -> Tensor:
        return x * self.weight

    def table(self, x: Tensor) -> Tensor:
        return x + self.inner(torch.arange(x.shape[1], device=x.device) % self.inner.num_embeddings).sum(0)

    def conv(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x[:, None]).mean(1))

    def views(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.t().reshape(-1).view(self.dim, self.dim)
        return torch.tanh(x @ weight[:, :1] @ weight[:1] + self.inner.bias[0])

    def twice(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))

    def inplace(self, x: Tensor) -> Tensor:
        return self.inner(x).mul_(0.5).add_(self.inner.bias).sigmoid_()

    def dropout(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.inner(x)))

    def double(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.to(self.inner.weight.dtype))).to(x.dtype)

    def scalar(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.temperature)

    def tied(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.to(x.dtype))  # of another leaf, which may have another dtype

    def sequence(self, x: Tensor) -> Tensor:
        for child in self.children_:
            x = child(x)
        return x

    def residual(self, x: Tensor) -> Tensor:
        return x + self.sequence(x)

    def branches(self, x: Tensor) -> Tensor:
        return torch.stack([child(x) for child in self.children_]).mean(0)

    def checkpointed(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.sequence, x, use_reentrant=False)
        return result


class Model(nn.Module):
    """The module of a `ModelSpec`; returns the loss of (rows, dim)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        leaves: list[Block] = []
        self.blocks = nn.ModuleList(Block(block, spec.dim, leaves) for block in spec.blocks)
        self.head = nn.Linear(spec.dim, 3) if spec.head else None
        trained = [p for p in self.parameters() if p.requires_grad]
        if not trained:
            self.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x if self.head is None else self.head(x)).square().mean()


def shard(model: Model, spec: ModelSpec, *, mesh: DeviceMesh | None = None, may_round: bool = False) -> Model:
    """Call `fully_shard` as the description says, children first."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if may_round and spec.half else None)

    def visit(block: Block, described: Spec) -> None:
        for child, inner in zip(block.children_, described.children, strict=True):
            visit(child, inner)
        if described.is_unit:
            fully_shard(block, mesh=mesh, reshard_after_forward=described.reshard, mp_policy=policy)

    for block, described in zip(model.blocks, spec.blocks, strict=True):
        visit(block, described)
    fully_shard(model, mesh=mesh, reshard_after_forward=spec.reshard, mp_policy=policy)
    return model


def batches(spec: ModelSpec, steps: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(ROWS, spec.dim, generator=generator),) for _ in range(steps)]


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_invariants(spec: ModelSpec, mesh: DeviceMesh | None = None) -> list[CompilationRecord]:
    """Compile forward and backward; nothing may be wrong with the schedule. The group may be a fake one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = shard(Model(spec), spec, mesh=mesh, may_round=True)
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager", **spec.options})
    with record_compilations() as records, warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        call(*batches(spec, 1)[0]).backward()
    for record in records:
        for graph in record.graphs:
            _check_once_per_parameter(record, graph.phase)
            if graph.phase == "forward":
                kept = [bucket.label for bucket in gathered_outputs(graph.snapshots["scheduled"]) if bucket.reshard]
                assert not kept, f"the backward gets what a unit gathered that reshards: {kept}"
    return records


def _check_once_per_parameter(record: CompilationRecord, phase: str) -> None:
    """No all-gather or reduce-scatter of a unit twice within a run of a graph (invariant 5)."""
    for graph in record.graphs:
        if graph.phase != phase:
            continue
        starts = [event.bucket for event in graph.events if event.kind == "start" and event.bucket is not None]
        assert len(starts) == len({(b.kind, b.index) for b in starts}), f"{phase}: a collective is started twice"


def check_values(spec: ModelSpec, ways: tuple[str, ...] = ("compiled", "fallback")) -> str:
    """On real ranks: losses, gradients and parameters of three steps equal the unsharded model's, in each way.

    In float64, since a norm of two nearly equal numbers makes large what float32 rounds. Returns what is different; it
    does not raise for that, so that the ranks stay together.
    """
    _, reference = build(lambda: Model(spec).double())
    for module in reference.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ranks that share the rows draw other masks than one process
    models = {way: copy.deepcopy(reference) for way in ways}

    def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr)

    how: dict[str, Any] = {"optimizer": sgd, "lr": 0.1, "clip": None}
    data = [(x.double(),) for (x,) in batches(spec, 3)]
    expected = train(reference, data, sharded=False, **how)
    found = {}
    for way, model in models.items():
        call: Any = shard(model, spec)
        if way == "compiled":
            call = torch.compile(model, backend=overlap_fsdp, options={"inner": spec.inner, **spec.options})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScheduleWarning)
            found[way] = train(model, data, sharded=True, call=call, **how)
    largest = max(*expected.losses, *(float(grad.abs().max()) for grad in expected.grads.values()))
    for way, result in found.items():
        try:
            assert_same(result, expected, atol=2e-6 * max(1.0, largest))  # losses are compared as float32
        except AssertionError as error:
            return f"{way}: {error}"
    return ""
