"""The fallback and the compiled model start the same collectives in the same order and compute the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp
from tests.distributed.checks import recorded_regions
from tests.graphs import Layer
from tests.models import Transformer, token_batches
from tests.ranks import RankPool
from tests.training import build, train

HERE = "tests.distributed.test_both_ways_agree"


def _three_layers() -> nn.Module:
    return nn.Sequential(Layer(8), Layer(8), Layer(8))


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})


def order_of_collectives(way: str) -> list[str]:
    """The starts of the third step, as the profiler saw them.

    The input needs a gradient: else the compiled backward knows that nobody reads the first layer's weights, and the
    fallback does not.
    """
    model = fully_shard(_three_layers(), units=["*"])
    call = _compiled(model) if way == "compiled" else model
    x = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        call(x).square().mean().backward()
    with recorded_regions() as regions:
        call(x).square().mean().backward()
    names = [name.removeprefix("FSDP:") for name in regions if not name.endswith("_compute")]
    # A graph opens a region, too, where it takes a gather that was started ahead of it.
    return [name for name, _ in itertools.groupby(names)]


def same_bits() -> None:
    results = []
    for way in ("compiled", "fallback"):
        model, _ = build(lambda: Transformer(hidden=125))
        fully_shard(model, units=["layers.*"])
        call = _compiled(model) if way == "compiled" else model
        results.append(train(model, token_batches(3, 4, 16), sharded=True, call=call))
    assert results[0].losses == results[1].losses
    for name, value in results[0].grads.items():
        assert torch.equal(value, results[1].grads[name]), name


def test_the_sequence_of_collectives_is_the_same(two_ranks: RankPool) -> None:
    compiled, fallback = (two_ranks.run(f"{HERE}:order_of_collectives", way=way)[0] for way in ("compiled", "fallback"))
    assert compiled == fallback
    assert_expected_inline(
        "\n".join(fallback),
        """\
0:all_gather
1:all_gather
2:all_gather
1:all_gather
0:all_gather
2:reduce_scatter
1:reduce_scatter
0:reduce_scatter""",
    )


def test_losses_and_gradients_are_equal_bit_by_bit(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:same_bits")
