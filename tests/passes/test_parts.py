"""Which parameters of a unit travel together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fsdp_passes.passes import _parts
from fsdp_passes.passes._parts import Part, split_in_halves, split_runs
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.passes.schedule_one_layer_ahead import schedule_one_layer_ahead
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import reduce_grad, steps, trace, unshard


def nodes_of(text: str) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(f"{word}_{index}") for index, word in enumerate(text.split())]


def runs(text: str) -> str:
    """The run of each node of units a, b, c in order."""
    nodes = nodes_of(text)
    parts = split_runs(nodes, unit_of=lambda node: ord(node.name[0]))
    return " ".join(f"{node.name[0]}{parts[node].run}" for node in nodes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a a b b a", "a0 a0 b0 b0 a1"),
        ("a b c a", "a0 b0 c0 a1"),
        ("a b a b", "a0 b0 a0 b0"),  # neighbours that mix stay whole
        ("a b b a b c", "a0 b0 b0 a0 b0 c0"),
        ("a b a c a", "a0 b0 a1 c0 a2"),
        ("a a a", "a0 a0 a0"),
    ],
)
def test_a_unit_is_split_where_the_whole_of_another_lies_between(text: str, expected: str) -> None:
    assert runs(text) == expected


@pytest.mark.parametrize(
    ("sizes", "small_end", "expected"),
    [
        ([10, 10, 60, 60], "first", [0, 0, 1, 1]),
        ([60, 60, 10, 10], "last", [0, 0, 1, 1]),
        ([60, 60], "first", [0, 1]),
        ([100, 1, 1], "first", [0, 1, 1]),  # the first alone may be more than half
        ([1, 1, 100], "last", [0, 0, 1]),
        ([100], "first", [0]),
        ([1, 1, 1], "first", [0, 0, 0]),  # too small to be worth two collectives
    ],
)
def test_halves(monkeypatch: pytest.MonkeyPatch, sizes: list[int], small_end: str, expected: list[int]) -> None:
    monkeypatch.setattr(_parts, "MIN_SPLIT_BYTES", 50)
    nodes = nodes_of(" ".join("a" for _ in sizes))
    size = dict(zip(nodes, sizes, strict=True))
    halves = split_in_halves(nodes, size.__getitem__, small_end=small_end)
    assert [halves[node] for node in nodes] == expected


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_unit_that_reshards_is_gathered_once(reshard: bool) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(a, 0, reshard=reshard) @ unshard(b, 1) @ unshard(c, 0, reshard=reshard)

    graph = trace(function, *[torch.ones(1, 8)] * 3, torch.ones(4, 8)).graph
    buckets = bucket_all_gathers(graph, bucket_mode="coalesced")
    assert [(bucket.unit, bucket.num_params) for bucket in buckets] == (
        [(0, 2), (1, 1)] if reshard else [(0, 1), (1, 1), (0, 1)]
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_what_nothing_hides_is_gathered_in_halves_and_the_first_half_is_awaited_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_parts, "MIN_SPLIT_BYTES", 1)

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor) -> Tensor:
        return x @ unshard(a, 0) @ unshard(b, 0) @ unshard(c, 1) @ unshard(d, 1)

    graph = trace(function, *[torch.ones(1, 8)] * 4, torch.ones(4, 8)).graph
    buckets = bucket_all_gathers(graph, bucket_mode="coalesced")
    assert [(bucket.unit, bucket.half, bucket.num_params) for bucket in buckets] == [(0, 0, 1), (0, 1, 1), (1, 0, 2)]
    schedule_one_layer_ahead(graph, prefetch=1)
    expected = "all_gather_0.start all_gather_1.start all_gather_2.start all_gather_0.wait mm all_gather_1.wait mm_1"
    assert steps(graph).split() == [*expected.split(), "all_gather_2.wait", "mm_2", "mm_3"]


@pytest.mark.usefixtures("eight_fake_ranks")
def test_what_nothing_hides_is_reduced_in_halves_and_the_first_half_starts_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_parts, "MIN_SPLIT_BYTES", 1)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        grads = [x.t() @ x, x.t() @ y, y.t() @ x, y.t() @ y]
        return tuple(reduce_grad(grad, unit) for grad, unit in zip(grads, (1, 1, 0, 0), strict=True))

    graph = trace(function, torch.ones(4, 8), torch.ones(4, 8)).graph
    for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.fsdp_passes.reduce_grad.default)):
        node.args[0].append(node)
    buckets = bucket_reduce_scatters(graph, bucket_mode="coalesced")
    assert [Part(bucket.run, bucket.half) for bucket in buckets] == [Part(), Part(0, 0), Part(0, 1)]
    schedule_one_layer_ahead(graph, prefetch=1)
    words = [word for word in steps(graph).split() if not word.endswith(".wait")]
    assert words == [
        "mm",
        "mm_1",
        "reduce_scatter_0.start",
        "mm_2",
        "reduce_scatter_1.start",
        "mm_3",
        "reduce_scatter_2.start",
    ]
