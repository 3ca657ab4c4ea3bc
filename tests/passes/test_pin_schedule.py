"""pin_schedule: the scheduled graph's order survives Inductor's fusion and memory reordering."""

from __future__ import annotations

import copy
import dataclasses
import types
import unittest.mock
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes._torch_compat import scheduler_node_kind
from fsdp_passes.errors import ScheduleWarning
from fsdp_passes.passes.pin_schedule import _needs, _topological_order, pin_schedule
from fsdp_passes.pipeline import record_compilations
from tests.graphs import TinyTransformer, sharded_transformer
from tests.inductor_code import NO_CACHE, Step, generated_code, order_problems, read_code


def steps_of_transformer(**options: Any) -> tuple[list[Step], list[Step]]:
    forward, backward = generated_code(sharded_transformer(dim=64), torch.arange(512) % 10, **options)
    return read_code(forward), read_code(backward)


def not_pinned() -> Any:
    return unittest.mock.patch("fsdp_passes.pipeline.pin_schedule", side_effect=lambda snodes: snodes)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_generated_code_has_the_order_of_the_scheduled_graph() -> None:
    for steps in steps_of_transformer():
        assert order_problems(steps) == []


# ---- on scheduler nodes of its own -----------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Kernel:
    """What the pass reads of one of Inductor's scheduler nodes."""

    name: str
    place: int  # of its newest FX node; -1: it has none
    needs: tuple[str, ...] = ()

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    @property
    def unmet_dependencies(self) -> list[Any]:
        return [types.SimpleNamespace(name=need) for need in self.needs]


def pinned(kernels: list[Kernel], has_buckets: bool = True) -> list[str]:
    """The names in the order of `pin_schedule`, in a graph whose node i is at place i."""
    nodes = list(range(20))
    module = "fsdp_passes.passes.pin_schedule"
    with (
        unittest.mock.patch(f"{module}.scheduled_fx_nodes", return_value=nodes),
        unittest.mock.patch(f"{module}.bucket_of", side_effect=lambda node: has_buckets or None),
        unittest.mock.patch(f"{module}.scheduler_node_kind", side_effect=lambda k: KINDS.get(k.name, "compute")),
        unittest.mock.patch(f"{module}.origins_in_order", side_effect=lambda k, _: [k.place] if k.place >= 0 else []),
    ):
        return [kernel.name for kernel in pin_schedule(kernels)]


KINDS = {"start": "collective", "wait": "wait"}
MOVED = [Kernel("late", 9), Kernel("start", 1), Kernel("wait", 5, needs=("start",)), Kernel("compute", 3)]


def test_kernels_take_the_place_of_their_newest_node() -> None:
    assert pinned(MOVED) == ["start", "compute", "wait", "late"]


def test_pinning_again_changes_nothing() -> None:
    once = sorted(MOVED, key=lambda kernel: kernel.place)
    assert pinned(once) == [kernel.name for kernel in once]


def test_without_buckets_nothing_changes() -> None:
    assert pinned(MOVED, has_buckets=False) == [kernel.name for kernel in MOVED]
    assert pinned([]) == []


def test_what_an_early_kernel_needs_comes_early_too() -> None:
    """A norm's statistics are fused with the update of the running ones, which lies at the end of the graph."""
    kernels = [Kernel("reader", 2, needs=("fused",)), Kernel("fused", 9, needs=("maker",)), Kernel("other", 4)]
    assert pinned([*kernels, Kernel("maker", 8)]) == ["maker", "fused", "reader", "other"]


def test_a_kernel_does_not_pull_the_wait_that_it_needs_ahead_of_its_place() -> None:
    kernels = [Kernel("reader", 2, needs=("fused",)), Kernel("fused", 9, needs=("wait",)), Kernel("hides", 4)]
    assert pinned([*kernels, Kernel("start", 1), Kernel("wait", 5, needs=("start",))]) == [
        *("start", "hides", "wait", "fused", "reader"),
    ]


def test_kernels_of_one_place_keep_their_order_and_one_without_origin_stays_behind_its_predecessor() -> None:
    kernels = [Kernel("b", 6), Kernel("no origin", -1), Kernel("c", 6), Kernel("a", 2)]
    assert pinned(kernels) == ["a", "b", "no origin", "c"]


def test_a_name_that_no_kernel_makes_is_no_dependency() -> None:
    assert pinned([Kernel("b", 2, needs=("graph input",)), Kernel("a", 1, needs=("a",))]) == ["a", "b"]


def test_a_cycle_is_refused() -> None:
    with pytest.raises(AssertionError, match="the scheduler's dependencies have a cycle"):
        pinned([Kernel("a", 1, needs=("b",)), Kernel("b", 2, needs=("a",))])


class NormedLayers(nn.Sequential):
    """The updates of the running statistics come last in the graph, and fuse with what makes the statistics."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", [NormedLayers, TinyTransformer])
def test_a_kernel_fused_from_far_apart_delays_no_layer(make: type[nn.Module]) -> None:
    """The transformer's backward fused a layer's norm with the recomputed one of the next layer."""
    reference = make()
    model: nn.Module = fully_shard(
        copy.deepcopy(reference), units=["layers.*" if hasattr(reference, "layers") else "*"]
    )
    inputs = torch.arange(4) if make is TinyTransformer else torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        found = torch.compile(model, backend=overlap_fsdp, options={"inductor": NO_CACHE})(inputs)
        found.square().sum().backward()
    expected = reference(inputs)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad, rtol=0, atol=1e-4)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, reference.get_buffer(name), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("eight_fake_ranks")
def test_without_this_pass_the_order_is_lost() -> None:
    model = fully_shard(NormedLayers(), units=["*"])
    with not_pinned():
        codes = generated_code(model, torch.randn(6, 8), verify=False)
    problems = [problem for code in codes for problem in order_problems(read_code(code))]
    assert "gather1 starts behind the first product of gather0" in problems
    assert "reduce0 is awaited before reduce1 is started" in problems


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_fake_ranks")
def test_verification_warns_of_an_order_in_which_collectives_are_awaited_late() -> None:
    """Each wait where nothing else can run, as far as dependencies allow: what a broken pass would hand on."""

    def waits_last(snodes: list[Any]) -> list[Any]:
        place = [(int(scheduler_node_kind(snode) == "wait"), index) for index, snode in enumerate(snodes)]
        return [snodes[index] for index in _topological_order(_needs(snodes), place)]

    with (
        unittest.mock.patch("fsdp_passes.pipeline.pin_schedule", side_effect=waits_last),
        pytest.warns(ScheduleWarning, match="units 3, 2, 1 are unsharded at once, expected at most 2"),
    ):
        steps_of_transformer()


@pytest.mark.usefixtures("one_rank")
def test_losses_and_gradients_equal_those_of_the_unsharded_model() -> None:
    reference = TinyTransformer(dim=32, layers=2)
    model: nn.Module = fully_shard(copy.deepcopy(reference), units=["layers.*"])
    tokens = torch.arange(8)
    with record_compilations() as records:
        found = torch.compile(model, backend=overlap_fsdp, options={"inductor": NO_CACHE})(tokens)
        found.square().sum().backward()
    assert [graph.kernel_events is not None for graph in records[0].graphs] == [True, True]
    expected = reference(tokens)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad, rtol=0, atol=1e-5)
