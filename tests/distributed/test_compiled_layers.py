"""Each layer compiled on its own, in a root that runs uncompiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.pipeline import CompilationRecord, record_compilations
from tests.distributed.checks import collectives, float_batches, recorded_regions
from tests.models import Block, Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, recorded_all_gathers, train

HERE = "tests.distributed.test_compiled_layers"

BLOCK = "all_gather layers.0 float32 11"


def compile_in_place(layer: nn.Module, inner: str) -> None:
    options = {"inner": inner, "inductor": {"fx_graph_cache": False}} if inner == "inductor" else {"inner": inner}
    layer.compile(backend=overlap_fsdp, options=options)


def graphs(record: CompilationRecord) -> list[list[str]]:
    return [collectives(record, "forward"), [s for s in collectives(record, "backward") if s.startswith("reduce")]]


def layers_in_an_eager_root(inner: str, units: list[str]) -> None:
    """Embedding and head are gathered by the fallback, the blocks by their graph; one graph serves all blocks."""
    model, reference = build(lambda: Transformer(layers=4, hidden=61))
    fully_shard(model, units=units)
    for layer in model.layers:
        compile_in_place(layer, inner)
    batches = token_batches(4, 4, 8)
    with record_compilations() as records:
        found = train(model, batches, sharded=True)
    assert_same(found, train(reference, batches, sharded=False))
    assert len(records) == 1, len(records)
    assert graphs(records[0]) == [[BLOCK], []]  # the gradients are reduced behind the graph

    with recorded_regions() as regions:
        model(*my_share(batches[0])).backward()
    for index in range(4):
        for phase in ("forward", "backward"):
            assert f"FSDP:layers.{index}:{phase}_compute" in regions, "the shared graph names the unit that it runs for"
        assert regions.count(f"FSDP:layers.{index}:reduce_scatter") == 1
    with recorded_all_gathers("layers.") as gathers:
        model(*my_share(batches[0])).backward()
    assert len(gathers) == 2 * 4


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_layers_compiled_on_their_own_share_one_compilation_and_train_as_unsharded(
    two_ranks: RankPool, inner: str
) -> None:
    two_ranks.run(f"{HERE}:layers_in_an_eager_root", inner=inner, units=["layers.*"])


def test_layers_compiled_on_their_own_may_stand_between_units_of_the_fallback(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:layers_in_an_eager_root", inner="aot_eager", units=["embed", "layers.*", "head"])


def half_compiled() -> None:
    """Compiled and uncompiled layers take turns."""
    model, reference = build(lambda: Transformer(layers=4, hidden=61))
    fully_shard(model, units=["layers.*"])
    for layer in model.layers[::2]:
        compile_in_place(layer, "aot_eager")
    batches = token_batches(4, 4, 8)
    found = train(model, batches, sharded=True)
    assert_same(found, train(reference, batches, sharded=False))


def test_compiled_and_uncompiled_layers_take_turns(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:half_compiled")


def switched_between_steps() -> None:
    """The same model runs compiled, then as it is, then compiled."""
    model, reference = build(lambda: Transformer(layers=2, hidden=61))
    fully_shard(model, units=["layers.*"])
    whole_model = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    batches = token_batches(6, 4, 8)
    calls = iter([whole_model, model, whole_model, model, model, whole_model])
    found = train(model, batches, sharded=True, call=lambda *batch: next(calls)(*batch))
    assert_same(found, train(reference, batches, sharded=False))


def test_a_model_may_switch_between_compiled_and_uncompiled_steps(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:switched_between_steps")


# ---- graph breaks ----------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Dynamo breaks the graph in the middle of a layer, between two reads of the layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
            x = x + x @ layer.weight
        return x.square().mean()


def graph_breaks() -> None:
    model, reference = build(Broken)
    fully_shard(model, units=["layers.*"])
    batches = float_batches(4, 8, 12)
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(reference, batches, sharded=False))


def test_a_graph_break_between_two_reads_of_a_weight_trains_as_unsharded(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:graph_breaks")


class PartlyDisabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16, 21) for _ in range(3))
        self.run_disabled = torch.compiler.disable(lambda x: self.layers[1](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x[None])
        x = self.run_disabled(x)
        return self.layers[2](x).square().mean()


def disabled_layer() -> None:
    """The disabled layer runs through the fallback, in the middle of compiled code."""
    torch.manual_seed(0)
    model = PartlyDisabled()
    torch.manual_seed(0)
    reference = PartlyDisabled()
    fully_shard(model, units=["layers.*"])
    batches = [(x.expand(4, -1),) for (x,) in float_batches(3, 1, 16)]
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(reference, batches, sharded=False))


def test_a_layer_that_the_compiler_must_not_see_runs_through_the_fallback(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:disabled_layer")
