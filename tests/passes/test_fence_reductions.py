"""fence_reductions: no kernel holds gradients of one unit and of the next, so that a reduction is not a layer late."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import unittest.mock
from collections.abc import Iterator

import pytest
import torch

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.passes.fence_reductions import fence_reductions
from fsdp_passes.schedule import ALL_GATHER, REDUCE_SCATTER, Bucket
from tests.graphs import TinyTransformer, sharded_transformer
from tests.inductor_code import NO_CACHE, Step, generated_code, order_problems, read_code


@contextlib.contextmanager
def not_fenced() -> Iterator[None]:
    with unittest.mock.patch("fsdp_passes.backend.fence_reductions", lambda snodes: snodes):
        yield


def backward_of_transformer() -> list[Step]:
    model = sharded_transformer(dim=64)
    return read_code(generated_code(model, torch.arange(512) % 10, verify=False)[1])


@pytest.mark.usefixtures("eight_fake_ranks")
def test_each_reduction_starts_before_the_next_units_last_product() -> None:
    assert order_problems(backward_of_transformer()) == []


@pytest.mark.usefixtures("eight_fake_ranks")
def test_without_this_pass_a_reduction_is_a_layer_late() -> None:
    with not_fenced():
        problems = order_problems(backward_of_transformer())
    assert problems == ["reduce1 is awaited before reduce2 is started"]


# ---- on scheduler nodes of its own -----------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Kernel:
    """What the pass reads of one of Inductor's scheduler nodes. place: of its newest FX node; -1: it has none."""

    name: str
    place: int
    kind: str = "compute"
    bucket: Bucket | None = None
    ancestors: set[str] = dataclasses.field(default_factory=set)

    def get_name(self) -> str:
        return self.name


def gather(name: str, place: int) -> Kernel:
    return Kernel(name, place, "collective", Bucket(ALL_GATHER, 0, 0, 1, 4, torch.float32))


def reduction(name: str, place: int) -> Kernel:
    return Kernel(name, place, "collective", Bucket(REDUCE_SCATTER, 0, 0, 1, 4, torch.float32))


def fenced(kernels: list[Kernel]) -> list[tuple[str, str]]:
    """The dependencies (kernel, start that it now runs behind) that the pass adds; the kernels stay as they are.

    As in Inductor, a dependency that is there already is not added again."""
    added: list[tuple[str, str]] = []
    by_place = {kernel.place: kernel for kernel in kernels}

    by_name = {kernel.name: kernel for kernel in kernels}

    def add(kernel: Kernel, earlier: Kernel) -> None:
        if earlier.name not in kernel.ancestors:
            added.append((kernel.name, earlier.name))

    def refresh(_: object) -> None:
        for _ in kernels:  # as often as a chain can be long
            for kernel, earlier in added:
                start = by_name[earlier]
                by_name[kernel].ancestors |= {start.name, *start.ancestors}

    with contextlib.ExitStack() as stack:
        for name, replacement in {
            "scheduled_fx_nodes": lambda: list(range(20)),
            "origins_in_order": lambda kernel, _: [kernel.place] if kernel.place >= 0 else [],
            "bucket_of": lambda place: by_place[place].bucket,
            "scheduler_node_kind": lambda kernel: kernel.kind,
            "add_order_dependency": add,
            "refresh_ancestors": refresh,
        }.items():
            stack.enter_context(unittest.mock.patch(f"fsdp_passes.passes.fence_reductions.{name}", replacement))
        assert fence_reductions(kernels) == kernels
    return added


def test_golden_every_kernel_behind_a_start_depends_on_the_last_start_before_it() -> None:
    kernels = [
        Kernel("norm_grad_2", 1),
        reduction("reduce_2", 2),
        Kernel("mm_1", 4),
        Kernel("norm_grad_1", 5),
        reduction("reduce_1", 6),
        Kernel("mm_0", 8),
    ]
    assert fenced(kernels) == [
        *[("reduce_1", "reduce_2"), ("mm_1", "reduce_2"), ("norm_grad_1", "reduce_2"), ("mm_0", "reduce_1")]
    ]


def test_without_reductions_nothing_changes() -> None:
    assert fenced([Kernel("a", 1), gather("gather", 2), Kernel("b", 3)]) == []
    assert fenced([]) == []


def test_fencing_again_changes_nothing() -> None:
    kernels = [Kernel("a", 1), reduction("reduce", 2), Kernel("b", 3)]
    assert fenced(kernels) == [("b", "reduce")]
    assert fenced(kernels) == []


def test_a_kernel_that_the_start_itself_needs_is_not_fenced() -> None:
    """Its newest node may lie behind the start, where another output of the kernel is first used."""
    start = reduction("reduce", 2)
    start.ancestors.add("makes the gradient")
    assert fenced([start, Kernel("makes the gradient", 3), Kernel("other", 4)]) == [("other", "reduce")]


def test_a_kernel_that_an_earlier_start_needs_is_not_put_behind_a_later_one() -> None:
    first, second = reduction("first", 2), reduction("second", 4)
    first.ancestors.add("makes the gradient")
    assert fenced([first, second, Kernel("makes the gradient", 5)]) == [("second", "first")]


def test_only_compute_is_fenced() -> None:
    wait = Kernel("wait", 4, "wait")
    assert fenced([reduction("reduce", 2), gather("gather", 3), wait, Kernel("region", 5, "region")]) == []


def test_a_kernel_without_origins_is_not_fenced() -> None:
    assert fenced([reduction("reduce", 2), Kernel("constant", -1)]) == []


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fenced", [True, False])
@pytest.mark.usefixtures("one_rank")
def test_gradients_equal_those_of_the_unsharded_model_fenced_or_not(is_fenced: bool) -> None:
    reference = TinyTransformer(dim=32)
    model = fully_shard(copy.deepcopy(reference), units=["layers.*"])
    tokens = torch.arange(8)
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inductor": NO_CACHE})
    with contextlib.nullcontext() if is_fenced else not_fenced():
        compiled(tokens).square().sum().backward()
    reference(tokens).square().sum().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad, rtol=0, atol=1e-5)
