"""Regions: names that travel as data, ranges that are balanced, also when something raises."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.regions import (
    close_regions_above,
    label_owner,
    label_text,
    new_label,
    num_open_regions,
    pop_region,
    push_region,
    region_name,
)
from fsdp_passes.unit import unit_of
from tests.graphs import Layer, Named, TinyTransformer
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import one_rank as one_rank
from tests.inductor_code import NO_CACHE, kernels_that_do_nothing


@pytest.fixture(autouse=True)
def _balanced() -> Iterator[None]:
    yield
    left = num_open_regions()
    close_regions_above(0)  # or the next test would start with them
    assert left == 0


def regions_of(run: Callable[[], object]) -> list[str]:
    """The names of the regions that the profiler saw, in the order in which they opened."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("FSDP:")]


def compute_regions(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith("_compute")]


def communication_regions(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith("_compute")]


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_a_label_is_the_identity_of_its_owner() -> None:
    owner = Named("layers.0")
    label = new_label(owner)
    assert (label.dtype, label.shape, label.device.type) == (torch.int64, (1,), "cpu")
    assert label_owner(label) is owner
    assert label_owner(label.clone()) is owner
    assert label_text(label) == "layers.0"
    owner.display_name = "encoder.blöcke.3" * 50
    assert label_text(label) == owner.display_name


def test_a_label_keeps_nothing_alive_and_no_number_comes_again() -> None:
    first = new_label(Named("gone"))
    gc.collect()
    assert label_owner(first) is None
    assert label_text(first) == "?"
    assert not torch.equal(new_label(Named("new")), first)


def test_a_copy_of_a_unit_has_a_label_of_its_own(one_rank: None) -> None:
    unit = unit_of(fully_shard(nn.Linear(2, 2)))
    assert unit is not None
    other = copy.deepcopy(unit)
    assert label_owner(unit.label) is unit
    assert label_owner(other.label) is other


def test_the_format_of_a_name() -> None:
    assert region_name("layers.0", "forward_compute") == "FSDP:layers.0:forward_compute"


# ---- ranges ----------------------------------------------------------------------------------------------------------


def test_ranges_are_counted_and_closed_down_to_a_depth() -> None:
    for depth in range(3):
        assert num_open_regions() == depth
        push_region("r")
    pop_region()
    assert num_open_regions() == 2
    close_regions_above(1)
    assert num_open_regions() == 1
    close_regions_above(5)
    assert num_open_regions() == 1
    close_regions_above(0)


def test_closing_when_none_is_open_does_nothing() -> None:
    pop_region()
    assert num_open_regions() == 0


def test_each_thread_has_ranges_of_its_own() -> None:
    push_region("main")
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(num_open_regions()))
    thread.start()
    thread.join()
    assert seen == [0]
    pop_region()


def test_ranges_reach_the_profiler_also_when_it_starts_or_ends_within_one() -> None:
    push_region("FSDP:before:x")

    def run() -> None:
        pop_region()
        push_region("FSDP:inside:x")
        torch.ones(1).add(1)
        pop_region()
        push_region("FSDP:across:x")

    assert "FSDP:inside:x" in regions_of(run)
    pop_region()


# ---- in compiled models ----------------------------------------------------------------------------------------------


# The start of a unit's gather lies before the compute that hides it, that of its reduction behind its own compute or
# within the next unit's.
FORWARD = [f"FSDP:{unit}:forward_compute" for unit in ("root", "layers.0", "layers.1", "layers.2", "root")]
BACKWARD = [f"FSDP:{unit}:backward_compute" for unit in ("root", "layers.2", "layers.1", "layers.0", "root")]


@pytest.mark.parametrize("inner", ["inductor", "aot_eager", "eager"])
@pytest.mark.usefixtures("one_rank")
def test_the_profiler_sees_every_unit_in_forward_and_backward(inner: str) -> None:
    model = fully_shard(TinyTransformer(dim=32), units=["layers.*"])
    options = {"inner": inner, "inductor": NO_CACHE}
    compiled = torch.compile(model, backend=overlap_fsdp, options=options)
    tokens = torch.arange(4)
    with kernels_that_do_nothing():
        compiled(tokens).sum().backward()
    output: list[Tensor] = []
    forward = regions_of(lambda: output.append(compiled(tokens)))
    backward = regions_of(lambda: output[0].sum().backward())
    assert compute_regions(forward) == FORWARD
    assert compute_regions(backward) == BACKWARD
    units = ["root", "layers.0", "layers.1", "layers.2"]
    # The root is gathered twice, for the embedding and for the head. The last is the first unit of the backward, whose
    # gather the forward starts ahead.
    assert communication_regions(forward) == [f"FSDP:{unit}:all_gather" for unit in [*units, "root", "layers.2"]]
    assert sorted(communication_regions(backward)) == sorted(
        [f"FSDP:{unit}:all_gather" for unit in units[1:]] + [f"FSDP:{unit}:reduce_scatter" for unit in ["root", *units]]
    )
    with torch.no_grad(), kernels_that_do_nothing():
        compiled(tokens)
        found = regions_of(lambda: compiled(tokens))
    assert compute_regions(found) == FORWARD
    assert communication_regions(found) == [f"FSDP:{unit}:all_gather" for unit in [*units, "root"]]


@pytest.mark.usefixtures("one_rank")
def test_layers_that_share_one_artifact_have_their_own_names() -> None:
    model = nn.Sequential(Layer(8), Layer(8))
    for layer in model:
        fully_shard(layer)
        layer.compile(backend=overlap_fsdp, options={"inner": "aot_eager"})
    fully_shard(model)
    x = torch.ones(4, 8, requires_grad=True)  # as what the first layer hands to the second
    with record_compilations() as records:
        model(x)
    assert len(records) == 1
    seen = regions_of(lambda: model(x))
    assert compute_regions([name for name in seen if "root" not in name]) == [
        "FSDP:0:forward_compute",
        "FSDP:1:forward_compute",
    ]


@pytest.mark.usefixtures("one_rank")
def test_nvtx_false_opens_no_region() -> None:
    model = fully_shard(nn.Sequential(Layer(8), Layer(8)), units=["*"])
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager", "nvtx": False})
    for _ in range(2):  # the second forward starts the backward's first gather, ahead of that graph
        assert regions_of(lambda: compiled(torch.ones(4, 8)).sum().backward()) == []


@pytest.mark.usefixtures("one_rank")
def test_a_gather_that_is_started_ahead_is_shown_as_the_graph_that_it_is_for_shows_its_own() -> None:
    model = fully_shard(nn.Sequential(Layer(8), Layer(8), Layer(8)), units=["*"])
    model[1].compile(backend=overlap_fsdp, options={"inner": "aot_eager", "nvtx": False})
    model[2].compile(backend=overlap_fsdp, options={"inner": "aot_eager", "nvtx": True})
    x = torch.ones(4, 8)
    for _ in range(2):
        seen = communication_regions(regions_of(lambda: model(x).sum().backward()))
    # Once in the forward and once in the backward; graphs have a region of their own where they take what was started.
    assert [seen.count(f"FSDP:{unit}:all_gather") for unit in range(3)] == [2, 0, 4]


# ---- exceptions ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fsdp_passes_test::raise_if", mutates_args=())
def raise_if(x: Tensor, flag: Tensor) -> Tensor:
    """A copy of `x`; raises when `flag` is not zero."""
    if flag.item():
        raise RuntimeError("the operator failed")
    return x.clone()


@raise_if.register_fake
def _(x: Tensor, flag: Tensor) -> Tensor:
    return torch.empty_like(x)


raise_if.register_autograd(lambda ctx, grad: (grad, None))


class Fails(nn.Module):
    """A unit whose forward, or whose backward, fails on demand, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, in_forward: Tensor, in_backward: Tensor) -> Tensor:
        return self.second(FailInBackward.apply(raise_if(self.first(x), in_forward), in_backward))


class FailInBackward(torch.autograd.Function):
    """The identity; its backward raises when the flag is not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: Tensor) -> Tensor:
        ctx.save_for_backward(flag)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (flag,) = ctx.saved_tensors
        return raise_if(grad, flag), None


NO, YES = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.int64)


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.usefixtures("one_rank")
def test_an_exception_in_the_forward_leaves_no_region_open_and_the_next_step_runs(inner: str) -> None:
    torch.manual_seed(0)
    reference, model = Fails(), Fails()
    model.load_state_dict(reference.state_dict())
    compiled = torch.compile(fully_shard(model), backend=overlap_fsdp, options={"inner": inner, "inductor": NO_CACHE})
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="the operator failed"):
        compiled(x, YES, NO)
    assert num_open_regions() == 0
    found = compiled(x, NO, NO)
    torch.testing.assert_close(found, reference(x, NO, NO), rtol=0, atol=1e-5)
    found.sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.usefixtures("one_rank")
def test_an_exception_in_the_backward_leaves_no_region_open_and_the_next_step_runs(inner: str) -> None:
    model = fully_shard(Fails())
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": inner, "inductor": NO_CACHE})
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="the operator failed"):
        compiled(x, NO, YES).sum().backward()
    assert num_open_regions() == 0
    compiled(x, NO, NO).sum().backward()
    assert num_open_regions() == 0
    assert model.first.weight.grad is not None
