"""A model that runs as several graphs: the first gather of each is started while the one before it computes."""

from __future__ import annotations

import contextlib
import itertools
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from fsdp_passes import fully_shard, overlap_fsdp, reduction, regions
from fsdp_passes.unit import FsdpUnit, unit_of
from tests.distributed.checks import recorded_regions
from tests.models import Block, Transformer, token_batches
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, recorded_all_gathers, train, whole

HERE = "tests.distributed.test_overlap_across_graphs"


class _BreaksBehindIt(Block):
    """The graph ends behind this layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x


def _make(kind: str) -> Transformer:
    model = Transformer(layers=4, hidden=61)
    if kind == "graph breaks":
        for layer in model.layers:
            layer.__class__ = _BreaksBehindIt
    return model


def _compiled(model: Transformer, kind: str, options: dict[str, Any]) -> Any:
    if kind == "graph breaks":
        return torch.compile(model, backend=overlap_fsdp, options=options)
    for index, layer in enumerate(model.layers):
        if kind == "each layer" or index % 2 == 0:
            layer.compile(backend=overlap_fsdp, options=options)
    return model


def train_in_parts(kind: str, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Train; the regions of a later step, forward and backward."""
    model, reference = build(lambda: _make(kind))
    fully_shard(model, units=["layers.*"])
    call = _compiled(model, kind, options)
    batches = token_batches(4, 4, 8)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))
    share = my_share(batches[0])
    with recorded_all_gathers("") as sent:
        call(*share).backward()
    assert len(sent) == 9, sent  # each layer twice, and the root, which keeps its weights for the backward
    with recorded_regions() as forward:
        loss = call(*share)
    with recorded_regions() as backward:
        loss.backward()
    root = unit_of(model)
    assert root is not None
    assert not root.context.lookahead.started, "a gather was started and nobody took it"
    with torch.no_grad():
        torch.testing.assert_close(call(*batches[0]), reference(*batches[0]), rtol=0, atol=1e-5)
    return forward, backward


def a_write_between_two_forwards(way: str, through_data: bool) -> None:
    """A forward whose backward never comes, a write, and another forward: the written values count."""
    model, reference = build(lambda: _make("each layer"))
    fully_shard(model, units=["layers.*"])
    call: Any = model
    if way == "each layer":
        call = _compiled(model, way, {"inner": "aot_eager"})
    elif way == "whole":
        call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    (batch,) = token_batches(1, 4, 8)
    for factor in (1.0, 0.5, 0.9):
        with torch.no_grad():
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                (one.data if through_data else one).mul_(factor)
                other.mul_(factor)
        torch.testing.assert_close(call(*batch), reference(*batch), rtol=0, atol=1e-5)


class _ChunkedLoss(Transformer):
    """Reads the head's weight outside of the head's forward, once for each chunk."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x).flatten(0, 1)
        chunks = zip(x.chunk(4), targets.flatten().chunk(4), strict=True)
        losses = [F.cross_entropy(part @ self.head.weight.t(), wanted, reduction="sum") for part, wanted in chunks]
        return torch.stack(losses).sum() / targets.numel()


def a_chunked_loss(way: str) -> int:
    """Train; the number of all-gathers of the head in a forward."""
    model, reference = build(lambda: _ChunkedLoss(hidden=61))
    fully_shard(model, units=["layers.*", "head"])
    call: Any = model
    if way == "whole":
        call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    elif way == "each layer":
        call = _compiled(model, way, {"inner": "aot_eager"})
    batches = token_batches(3, 4, 8)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))
    with recorded_regions() as regions, torch.no_grad():
        call(*my_share(batches[0]))
    return regions.count("FSDP:head:all_gather")


def no_gather_is_left_behind() -> None:
    """An order that changes, a forward without its backward, and an optimizer that steps where nobody expects it."""
    model, reference = build(lambda: _make("each layer"))
    fully_shard(model, units=["layers.*"])
    _compiled(model, "each layer", {"inner": "aot_eager"})
    batches = token_batches(3, 4, 8)
    train(model, batches, sharded=True)
    train(reference, batches, sharded=False)
    model(*my_share(batches[0]))  # and no backward: what was started for it waits
    with torch.no_grad():
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            one.mul_(0.9)
            other.mul_(0.9)
    for module in (model, reference):
        module.layers[2], module.layers[3] = module.layers[3], module.layers[2]
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


@contextlib.contextmanager
def recorded_reductions() -> Iterator[list[str]]:
    """Compute regions, and starts and waits of reductions between graphs, in order."""
    names: list[str] = []
    push_region, await_named = regions.push_region, reduction.await_named

    def note_region(name: str, *, is_shown: bool = True) -> None:
        if not name.endswith(":all_gather"):
            names.append(name.removeprefix("FSDP:"))
        push_region(name, is_shown=is_shown)

    def note_wait(unit: FsdpUnit, kind: str, *rest: Any) -> None:
        names.append(f"{unit.display_name}:wait")
        await_named(unit, kind, *rest)

    with (
        unittest.mock.patch("fsdp_passes.ops.push_region", note_region),
        unittest.mock.patch("fsdp_passes.starts.push_region", note_region),
        unittest.mock.patch("fsdp_passes.reduction.await_named", note_wait),
    ):
        yield names


def reductions_in_a_backward(inner: str, two_streams: bool) -> list[str]:
    model, reference = build(lambda: _make("each layer"))
    fully_shard(model, units=["layers.*"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    options = {"inner": inner, "unify_communication_stream": not two_streams}
    call = _compiled(model, "each layer", options)
    batches = token_batches(2, 4, 8)
    assert_same(train(model, batches, sharded=True, call=call), train(reference, batches, sharded=False))
    loss = call(*my_share(batches[0]))
    with recorded_reductions() as names:
        loss.backward()
    return names


def gradients_that_are_returned() -> None:
    """`torch.autograd.grad`, `backward(inputs=...)`, and hooks that come and go."""
    model, reference = build(lambda: _make("each layer"))
    fully_shard(model, units=["layers.*"])
    _compiled(model, "each layer", {"inner": "aot_eager"})
    (batch,) = token_batches(1, 4, 8)
    names = [name for name, _ in reference.named_parameters() if name.startswith("layers.")]
    params, expected_params = ([one.get_parameter(name) for name in names] for one in (model, reference))
    expected = torch.autograd.grad(reference(*batch), expected_params)
    found = torch.autograd.grad(model(*my_share(batch)), params)
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert all(param.grad is None for param in params)

    model(*my_share(batch)).backward(inputs=params[:3])
    assert [param.grad is not None for param in params[:4]] == [True, True, True, False]
    for name, param, other in zip(names[:3], params, expected, strict=False):
        torch.testing.assert_close(whole(param.grad), other, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    model.zero_grad()

    seen: list[float] = []
    loss = model(*my_share(batch))
    hook = params[0].register_post_accumulate_grad_hook(lambda param: seen.append(float(whole(param.grad).sum())))
    loss.backward()
    hook.remove()
    model(*my_share(batch)).backward()
    torch.testing.assert_close(seen, [float(expected[0].sum())], rtol=0, atol=1e-5)
    for name, param, other in zip(names, params, expected, strict=True):
        torch.testing.assert_close(whole(param.grad), 2 * other, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# ---- tests -----------------------------------------------------------------------------------------------------------


def _assert_ahead(regions: list[str], order: list[str], phase: str) -> None:
    for before, unit in itertools.pairwise(order):
        start, compute = f"FSDP:{unit}:all_gather", f"FSDP:{before}:{phase}_compute"
        assert regions.index(start) < regions.index(compute), f"{start} comes behind {compute}: {regions}"


LAYERS = [f"layers.{index}" for index in range(4)]


@pytest.mark.parametrize("kind", ["each layer", "graph breaks", "layers in turn"])
def test_each_layer_is_gathered_while_the_one_before_it_computes(two_ranks: RankPool, kind: str) -> None:
    for forward, backward in two_ranks.run(f"{HERE}:train_in_parts", kind=kind, options={"inner": "aot_eager"}):
        _assert_ahead(forward, LAYERS, "forward")
        _assert_ahead(backward, LAYERS[::-1], "backward")


def test_generated_code_starts_the_next_graph_too(two_ranks: RankPool) -> None:
    options = {"inductor": {"fx_graph_cache": False}}
    for forward, backward in two_ranks.run(f"{HERE}:train_in_parts", kind="each layer", options=options):
        _assert_ahead(forward, LAYERS, "forward")
        _assert_ahead(backward, LAYERS[::-1], "backward")


@pytest.mark.parametrize(("inner", "two_streams"), [("aot_eager", False), ("inductor", False), ("aot_eager", True)])
def test_each_layer_s_gradients_are_reduced_while_the_next_one_computes(
    two_ranks: RankPool, inner: str, two_streams: bool
) -> None:
    for names in two_ranks.run(f"{HERE}:reductions_in_a_backward", inner=inner, two_streams=two_streams):
        begin = names.index("layers.3:reduce_scatter")
        assert names[begin:-2] == [
            "layers.3:reduce_scatter",
            *("layers.2:backward_compute", "layers.2:reduce_scatter", "layers.3:wait"),
            *("layers.1:backward_compute", "layers.1:reduce_scatter", "layers.2:wait"),
            *("layers.0:backward_compute", "layers.0:reduce_scatter", "layers.1:wait"),
            "root:reduce_scatter",
        ]
        assert {*names[-2:]} == {"layers.0:wait", "root:wait"}


def test_gradients_reach_those_who_ask_for_them(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:gradients_that_are_returned")


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("way", ["uncompiled", "each layer", "whole"])
def test_a_write_between_two_forwards_is_seen(two_ranks: RankPool, way: str, through_data: bool) -> None:
    two_ranks.run(f"{HERE}:a_write_between_two_forwards", way=way, through_data=through_data)


@pytest.mark.parametrize("way", ["uncompiled", "each layer", "whole"])
def test_a_weight_that_is_read_outside_its_module_is_gathered_once_for_all_reads(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(f"{HERE}:a_chunked_loss", way=way) == [1, 1]


def without_the_pass() -> tuple[list[str], list[str]]:
    with unittest.mock.patch("fsdp_passes.pipeline.prefetch_across_graphs", return_value=False):
        return train_in_parts("each layer", {"inner": "aot_eager"})


def test_without_the_pass_each_graph_gathers_for_itself(two_ranks: RankPool) -> None:
    for forward, _ in two_ranks.run(f"{HERE}:without_the_pass"):
        assert forward.index("FSDP:layers.0:forward_compute") < forward.index("FSDP:layers.1:all_gather")


def test_a_start_that_nobody_takes_is_dropped_and_old_values_are_never_used(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:no_gather_is_left_behind")
