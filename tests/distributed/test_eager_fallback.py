"""The eager fallback, and models that are compiled only in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.context import Phase
from fsdp_passes.errors import (
    DeviceError,
    NotAUnitError,
    PhaseError,
    PrefetchError,
    StaleParametersError,
    UnitInUseError,
)
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.unit import unit_of
from tests.graphs import one_rank as one_rank
from tests.models import Block, Transformer, token_batches
from tests.profiles import cpu_profile
from tests.ranks import RankPool
from tests.training import assert_same, build, train, whole

AOT = {"inner": "aot_eager"}


class _BreaksInTheMiddle(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.norm1(x))
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def _breaking_transformer() -> Transformer:
    model = Transformer(hidden=125)
    for layer in model.layers:
        layer.__class__ = _BreaksInTheMiddle
        del layer.qkv
    return model


def _unsharded_units(model: nn.Module) -> list[str]:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return [unit.display_name for unit in units if any(p.placeholder.untyped_storage().size() for p in unit.params)]


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def eager_training(reshard: bool | None) -> None:
    model, reference = build(lambda: Transformer(hidden=125))
    twin, _ = build(lambda: Transformer(hidden=125))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    batches = token_batches(5, 8, 16)
    found = train(model, batches, sharded=True)
    assert _unsharded_units(model) == []
    assert_same(found, train(reference, batches, sharded=False))
    for layer in twin.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(twin)
    assert_same(found, train(twin, batches, sharded=True))


def partly_compiled(kind: str) -> list[list[str]]:
    """Train partly compiled, compare with the reference; the units of each compilation."""
    model, reference = build(_breaking_transformer if kind == "graph break" else lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    call: Any = model
    with record_compilations() as records:
        if kind == "each layer":
            for layer in model.layers:
                layer.compile(backend=overlap_fsdp, options=AOT)
        else:
            if kind == "disabled layer":
                model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)
            if kind == "disabled child":
                model.layers[1].up.forward = torch.compiler.disable(model.layers[1].up.forward)
            call = torch.compile(model, backend=overlap_fsdp, options=AOT)
        batches = token_batches(4, 8, 16)
        found = train(model, batches, sharded=True, call=call)
    assert_same(found, train(reference, batches, sharded=False))
    with torch.no_grad():
        torch.testing.assert_close(call(*batches[0]), reference(*batches[0]), rtol=0, atol=1e-5)
    return [record.unit_names for record in records]


def an_exception_in_the_middle(where: str) -> None:
    model, reference = build(lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    batches = token_batches(4, 8, 16)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    train(model, batches[:2], sharded=True)
    if where == "forward":
        handle = model.layers[1].up.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            model(*batches[0])
        assert _unsharded_units(model) == []
    else:
        handle = model.layers[1].up.register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            model(*batches[0]).backward()
    handle.remove()
    for param in model.parameters():
        param.grad = None
    found = train(model, batches[2:], sharded=True)
    train(reference, batches[:2], sharded=False)
    assert_same(found, train(reference, batches[2:], sharded=False))
    assert _unsharded_units(model) == []


def the_next_unit_is_gathered_first() -> list[str]:
    """The eager fallback's gathers, waits and compute of the second step, in order."""
    model, _ = build(lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    batch = token_batches(1, 4, 16)[0]
    model(*batch).backward()

    def mark(name: str) -> None:
        with torch.profiler.record_function(name):
            pass

    for layer in model.layers:
        unit = unit_of(layer)
        assert unit is not None
        layer.up.register_forward_pre_hook(lambda *_, name=unit.name: mark(f"compute {name}"))
        layer.up.register_full_backward_hook(lambda *_, name=unit.name: mark(f"backward {name}"))
    with cpu_profile() as profiler:
        model(*batch).backward()
    names = [e.name for e in sorted(profiler.events(), key=lambda event: event.time_range.start)]
    return [name for name in names if name.startswith(("FSDP:", "compute", "backward"))]


def unshard_and_reshard() -> None:
    model, reference = build(lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    layer, whole = model.layers[1], reference.layers[1]
    sharded = layer.up.weight
    handle = layer.unshard(async_op=True)
    handle.wait()
    torch.testing.assert_close(layer.up.weight, whole.up.weight, rtol=0, atol=0)
    assert _unsharded_units(model) == ["layers.1"]
    layer.reshard()
    assert layer.up.weight is sharded
    assert _unsharded_units(model) == []
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
    batches = token_batches(2, 8, 16)
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def writes_between_forward_and_backward(compiled: bool) -> None:
    model, reference = build(lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    call = torch.compile(model, backend=overlap_fsdp, options=AOT) if compiled else model
    batch = token_batches(1, 8, 16)[0]
    loss = call(*batch)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0)
    with pytest.raises(StaleParametersError, match="written since"):
        loss.backward()
    for param in model.parameters():
        param.grad = None
    batches = token_batches(2, 8, 16)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))


def backward_twice() -> None:
    """With the graph retained, gradients add up as they do unsharded."""
    model, reference = build(lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    batch = token_batches(1, 8, 16)[0]
    for module in (model, reference):
        loss = module(*batch)
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=1e-5, msg=name)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def resharding_in_use() -> None:
    model, _ = build(lambda: Transformer(hidden=125))
    fully_shard(model, units=["layers.*"])
    handle = model.layers[1].up.register_forward_hook(lambda *_: model.layers[1].reshard())
    batch = token_batches(1, 8, 16)[0]
    with pytest.raises(UnitInUseError, match=r"layers\.1.*forward running"):
        model(*batch)
    handle.remove()
    model(*batch).backward()
    with pytest.raises(NotAUnitError):
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.norm])
    unit, other = unit_of(model.layers[0]), unit_of(model.layers[1])
    assert unit is not None
    assert other is not None
    unit.context.enter(unit, Phase.BACKWARD)
    with pytest.raises(PhaseError, match=r"layers\.0.*'backward'.*'forward'"):
        unit.context.enter(unit, Phase.FORWARD)
    unit.context.enter(unit, Phase.RESTING)
    with pytest.raises(DeviceError, match=r"layers\.1.*on cpu.*on meta"):
        unit.context.check_device(other, torch.device("meta"))


def at_most_two_units_are_whole() -> int:
    """Most nested units whose storage is allocated at once during two steps."""
    model, _ = build(lambda: Transformer(hidden=125, layers=5))
    fully_shard(model, units=["layers.*"])
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(name != "root" for name in _unsharded_units(model)))

    for layer in model.layers:
        layer.up.register_forward_hook(count)
        layer.up.register_full_backward_hook(count)
    for batch in token_batches(2, 4, 16):
        model(*batch).backward()
    return most


# ---- tests -----------------------------------------------------------------------------------------------------------

HERE = "tests.distributed.test_eager_fallback"


@pytest.mark.parametrize("reshard", [None, True, False])
def test_eager_training_equals_the_reference_and_fsdp2(two_ranks: RankPool, reshard: bool | None) -> None:
    two_ranks.run(f"{HERE}:eager_training", reshard=reshard)


def test_eager_training_on_four_ranks(four_ranks: RankPool) -> None:
    four_ranks.run(f"{HERE}:eager_training", reshard=None)


@pytest.mark.parametrize("kind", ["graph break", "disabled layer", "disabled child"])
def test_a_model_with_graph_breaks_trains(two_ranks: RankPool, kind: str) -> None:
    # A disabled layer leaves a loop that cannot be resumed: Dynamo compiles the other layers, with one artifact.
    num_graphs = len(two_ranks.run(f"{HERE}:partly_compiled", kind=kind)[0])
    assert num_graphs == 1 if kind == "disabled layer" else num_graphs > 1


def test_layers_compiled_on_their_own_share_one_artifact(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:partly_compiled", kind="each layer")[0] == [["layers.0"]]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(two_ranks: RankPool, where: str) -> None:
    two_ranks.run(f"{HERE}:an_exception_in_the_middle", where=where)


def test_the_next_unit_is_gathered_while_one_computes(two_ranks: RankPool) -> None:
    events = two_ranks.run(f"{HERE}:the_next_unit_is_gathered_first")[0]
    forward = events[: events.index("backward layers.2")]
    backward = events[events.index("backward layers.2") :]
    for index in (0, 1):
        assert forward.index(f"FSDP:layers.{index + 1}:all_gather") < forward.index(f"compute layers.{index}")
    # layers.1 was gathered before layers.2's backward; layers.0 while layers.1 computes, ahead of layers.2's reduction.
    gathers = [i for i, name in enumerate(events) if name == "FSDP:layers.1:all_gather"]
    assert len(gathers) == 2
    assert gathers[1] < events.index("backward layers.2")
    assert backward.index("FSDP:layers.0:all_gather") < backward.index("FSDP:layers.2:reduce_scatter")
    assert backward.index("FSDP:layers.2:reduce_scatter") < backward.index("backward layers.1")
    assert "FSDP:layers.1:backward_compute" in events


def test_unshard_and_reshard_by_hand(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:unshard_and_reshard")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_write_between_forward_and_backward_is_refused(two_ranks: RankPool, compiled: bool) -> None:
    two_ranks.run(f"{HERE}:writes_between_forward_and_backward", compiled=compiled)


def test_two_backwards_of_one_forward_add_up(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:backward_twice")


def test_wrong_uses_are_refused_by_name(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:resharding_in_use")


def test_at_most_two_units_are_whole_at_once(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:at_most_two_units_are_whole") == [2, 2]


@pytest.mark.usefixtures("one_rank")
def test_what_is_gathered_ahead_is_a_list_of_units_of_one_model() -> None:
    model, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for layer in (*model, *other):
        fully_shard(layer)
    model[0].set_modules_to_forward_prefetch([model[1]])  # whose root is not sharded yet
    model[1].set_modules_to_backward_prefetch(nn.ModuleList([model[0]]))
    for module in (model, other):
        fully_shard(module)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    for single in (model[1], model, None):
        with pytest.raises(PrefetchError, match=r"^unit '0': expected a list of modules.* found a single .*\[module\]"):
            model[0].set_modules_to_forward_prefetch(single)
    model[0].set_modules_to_forward_prefetch([other[1]])
    with pytest.raises(PrefetchError, match=r"^unit '0': expected units of its own model.* found unit '1' of another"):
        model(x)
    model[0].set_modules_to_forward_prefetch([])
    model[1].set_modules_to_backward_prefetch([other[0]])
    loss = model(x).sum()
    with pytest.raises(PrefetchError, match=r"^unit '1': expected units of its own model.* found unit '0' of another"):
        loss.backward()
    model[1].set_modules_to_backward_prefetch([model[0]])
    model(x).sum().backward()
    assert unit_of(other[0]).gathered_versions is unit_of(other[1]).gathered_versions is None  # type: ignore[union-attr]
