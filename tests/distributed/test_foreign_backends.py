"""`torch.compile` with another backend than ours on a sharded model: its hooks communicate, the backend compiles what
lies between them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import ForeignBackendWarning
from fsdp_passes.foreign import gathers_parameters, is_foreign
from fsdp_passes.pipeline import record_compilations
from tests.distributed.checks import float_batches
from tests.graphs import one_rank as one_rank
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, train

HERE = "tests.distributed.test_foreign_backends"
QUIET = pytest.mark.filterwarnings("ignore::fsdp_passes.errors.ForeignBackendWarning")


class Reads(nn.Module):
    """Reads a weight of one unit in the forward of another, returns a parameter's values, and has a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=False) * self.scale
        return F.linear(x, self.embed.weight).square().mean()


def trains(how: str, backend: str) -> int:
    """Train a transformer and compare it with the unsharded one; the number of graphs."""
    torch._dynamo.reset()
    model, reference = build(lambda: Transformer(dim=16, layers=3))
    fully_shard(model, units=["layers.*"])
    counter = CompileCounterWithBackend(backend)
    call: Callable[..., Any] = model
    if how == "each layer":
        for layer in model.layers:
            layer.compile(backend=counter)
    else:
        call = torch.compile(model, backend=counter)
    batches = token_batches(3, 4, 8)
    found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(reference, batches, sharded=False))
    placeholders = [param.placeholder for unit in model.__dict__["_fsdp_unit"].context.units for param in unit.params]
    assert all(placeholder.untyped_storage().size() == 0 for placeholder in placeholders)
    return counter.frame_count


@QUIET
@pytest.mark.parametrize("how", ["each layer", "model"])
def test_a_model_compiled_by_another_backend_trains_as_unsharded(two_ranks: RankPool, how: str) -> None:
    for graphs in two_ranks.run(f"{HERE}:trains", how=how, backend="aot_eager"):
        assert graphs >= 1


@QUIET
@pytest.mark.usefixtures("one_rank")
class TestOnOneRank:
    def test_equal_layers_share_one_graph(self) -> None:
        assert trains("each layer", "eager") == 1

    def test_inductor_which_is_the_default(self) -> None:
        model, reference = build(lambda: Transformer(dim=8, layers=1))
        fully_shard(model, units=["layers.*"])
        batches = token_batches(2, 2, 4)
        found = train(model, batches, sharded=True, call=torch.compile(model))
        assert_same(found, train(reference, batches, sharded=False))

    @pytest.mark.parametrize("reshard_after_forward", [None, False])
    def test_weights_read_outside_of_their_unit_checkpoints_and_scalars(
        self, reshard_after_forward: bool | None
    ) -> None:
        model, reference = build(Reads)
        fully_shard(model, units=["embed", "layers.*"], reshard_after_forward=reshard_after_forward)
        step = torch.compile(model, backend="aot_eager")
        batches = float_batches(2, 4, 8)
        assert_same(train(model, batches, sharded=True, call=step), train(reference, batches, sharded=False))
        with torch.no_grad():
            torch.testing.assert_close(step(*batches[0]), reference(*batches[0]))
        with torch.inference_mode():
            torch.testing.assert_close(step(*batches[0]), reference(*batches[0]))

    def test_mixed_precision_as_without_a_compiler(self) -> None:
        model, same = build(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        for each in (model, same):
            fully_shard(each, units=["*"], mp_policy=policy)
        (x,) = float_batches(1, 4, 8)[0]
        found, expected = torch.compile(model, backend="aot_eager")(x), same(x)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        assert found.dtype == torch.float32

    def test_one_graph_is_refused_with_the_reason(self) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=["*"])
        with pytest.raises(Unsupported, match=r"Use torch\.compile\(model, backend=overlap_fsdp\)"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 4))

    def test_a_backend_around_ours_is_as_good_as_ours(self) -> None:
        seen = []

        @functools.wraps(overlap_fsdp)
        def backend(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
            seen.append(gm)
            return overlap_fsdp(gm, inputs, options={"inner": "aot_eager"})

        model, reference = build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        fully_shard(model, units=["*"])
        with record_compilations() as records:
            found = torch.compile(model, backend=backend)(torch.ones(2, 4))
        torch.testing.assert_close(found, reference(torch.ones(2, 4)))
        assert len(seen) == len(records) == 1
        assert records[0].unit_names == ["0", "1"]

    def test_one_that_does_not_say_so_computes_the_same(self) -> None:
        """It sees gathered parameters, which its graphs gather once more."""
        model, reference = build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        fully_shard(model, units=["*"])

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            return overlap_fsdp(gm, inputs, options={"inner": "aot_eager"})

        batches = float_batches(2, 4, 4)
        call = torch.compile(model, backend=backend)
        found = train(model, batches, sharded=True, call=lambda x: call(x).mean())
        assert_same(found, train(reference, batches, sharded=False, call=lambda x: reference(x).mean()))


def warnings_of_other_backends() -> list[str]:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=["*"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 4)).sum().backward()
        torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})(torch.ones(2, 4))
        before = [w for w in caught if issubclass(w.category, ForeignBackendWarning)]
        for backend in ("aot_eager", "eager"):
            torch.compile(model, backend=backend)(torch.ones(2, 4))
    assert not before
    return [str(w.message) for w in caught if issubclass(w.category, ForeignBackendWarning)]


def test_one_warning_says_what_to_use_instead() -> None:
    """In a process of its own, since it is to be shown once."""
    pool = RankPool(1)
    (found,) = pool.run(f"{HERE}:warnings_of_other_backends")
    pool.close()
    assert len(found) == 1, found
    assert "use torch.compile(model, backend=overlap_fsdp)" in found[0]


def test_which_backends_gather() -> None:
    assert not is_foreign(overlap_fsdp)
    assert not is_foreign(None)
    assert not is_foreign(functools.partial(overlap_fsdp, options={"prefetch": 2}))
    assert not is_foreign(torch._TorchCompileWrapper(overlap_fsdp, None, {"prefetch": 2}, None))
    assert not is_foreign(gathers_parameters(lambda gm, inputs: gm))
    assert is_foreign(torch._TorchCompileInductorWrapper(None, None, None))
    assert is_foreign(lambda gm, inputs: overlap_fsdp(gm, inputs))
