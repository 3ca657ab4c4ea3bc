"""The order of collectives and products in the code that Inductor generates, read from the code itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor import metrics

from fsdp_passes import fully_shard
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import sharded_transformer
from tests.inductor_code import Step, generated_code, order, order_problems, read_code
from tests.models import Transformer, token_batches

pytestmark = pytest.mark.usefixtures("eight_fake_ranks")


def steps_of_transformer(batch: int = 4, layers: int = 3, **options: Any) -> tuple[list[Step], list[Step]]:
    forward, backward = generated_code(sharded_transformer(dim=64, layers=layers), torch.arange(batch) % 10, **options)
    return read_code(forward), read_code(backward)


@pytest.mark.parametrize("reorder_for_peak_memory", [True, False])
@pytest.mark.parametrize("batch", [2, 512])
def test_one_layer_ahead_in_forward_and_backward(batch: int, reorder_for_peak_memory: bool) -> None:
    inductor = {"reorder_for_peak_memory": reorder_for_peak_memory}
    forward, backward = steps_of_transformer(batch, inductor=inductor)
    assert order_problems(forward) == []
    assert order_problems(backward) == []
    assert_expected_inline(
        order(forward),
        """\
gather0.start gather1.start gather0.wait gather2.start gather1.wait mm(gather1) gather3.start gather2.wait
mm(gather2) gather4.start gather3.wait mm(gather3) gather4.wait mm(gather4)""",
    )
    assert_expected_inline(
        order(backward),
        """\
gather0.start gather1.start mm() mm() reduce0.start gather0.wait mm(gather0) mm() gather2.start reduce1.start
reduce0.wait gather1.wait mm(gather1) mm() reduce2.start reduce1.wait gather2.wait mm(gather2) mm()
reduce3.start reduce2.wait reduce4.start reduce3.wait reduce4.wait""",
    )


def test_two_layers_ahead() -> None:
    forward, backward = steps_of_transformer(512, prefetch=2)
    assert order_problems(forward, prefetch=2) == []
    assert order_problems(backward, prefetch=2) == []
    assert_expected_inline(
        order(forward),
        """\
gather0.start gather1.start gather2.start gather0.wait gather3.start gather1.wait mm(gather1) gather4.start
gather2.wait mm(gather2) gather3.wait mm(gather3) gather4.wait mm(gather4)""",
    )
    assert_expected_inline(
        order(backward),
        """\
gather0.start gather1.start gather2.start mm() mm() reduce0.start gather0.wait mm(gather0) mm() reduce1.start
reduce0.wait gather1.wait mm(gather1) mm() reduce2.start reduce1.wait gather2.wait mm(gather2) mm()
reduce3.start reduce2.wait reduce4.start reduce3.wait reduce4.wait""",
    )


@pytest.mark.parametrize("bucket_mode", ["coalesced", "packed"])
def test_a_transformer_with_attention_and_uneven_shards(bucket_mode: str) -> None:
    model = fully_shard(Transformer(hidden=125), units=["layers.*"])
    forward, backward = map(read_code, generated_code(model, *token_batches(1, 2, 16)[0], bucket_mode=bucket_mode))
    assert order_problems(forward) == []
    assert order_problems(backward) == []
    for steps, num_gathers, num_reductions in ((forward, 5, 0), (backward, 3, 5)):
        started = [step.name.rstrip("0123456789") for step in steps if step.kind == "start"]
        assert (started.count("gather"), started.count("reduce")) == (num_gathers, num_reductions)


def test_an_inference_graph_is_scheduled_too() -> None:
    model = sharded_transformer(dim=64)
    with torch.no_grad():
        (code,) = generated_code(model, torch.arange(4), backward=False)
    steps = read_code(code)
    assert order_problems(steps) == []
    assert [step.name for step in steps if step.kind == "start"] == [f"gather{i}" for i in range(5)]


# ---- regions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_regions_cost_no_kernel(layers: int) -> None:
    """Inductor's own count of kernels: on the CPU, its C++ functions hold several each, as many as stand together."""

    def kernels_and_orders(nvtx: bool) -> tuple[int, list[str], set[str]]:
        metrics.reset()
        graphs = steps_of_transformer(512, layers, nvtx=nvtx)
        return metrics.generated_kernel_count, [order(steps) for steps in graphs], {s.kind for g in graphs for s in g}

    num_kernels, orders, kinds = kernels_and_orders(nvtx=True)
    assert num_kernels > 10 * layers
    assert {"open", "close", "open_start", "close_start"} <= kinds
    assert kernels_and_orders(nvtx=False) == (num_kernels, orders, kinds - {"open", "close"})


def regions(steps: list[Step]) -> list[tuple[str, list[str]]]:
    """For each region in turn: its label and the products in it. Regions open and close in turn."""
    found: list[tuple[str, list[str]]] = []
    is_open = False
    for step in steps:
        if step.kind == "open":
            assert not is_open
            is_open = True
            found.append((step.name, []))
        elif step.kind == "close":
            assert is_open
            assert found[-1][0] == step.name
            is_open = False
        elif step.kind == "matmul":
            assert is_open, f"{step} lies in no region"
            found[-1][1].append(str(step))
    assert not is_open
    return found


def test_every_product_lies_in_the_region_of_its_unit() -> None:
    forward, backward = steps_of_transformer(512)
    root, first, second, third = sorted({label for label, _ in regions(forward)})
    assert regions(forward) == [
        (root, []),  # the embedding, fused with the first norm
        (first, ["mm(gather1)"]),
        (second, ["mm(gather2)"]),
        (third, ["mm(gather3)"]),
        (root, ["mm(gather4)"]),
    ]
    assert regions(backward) == [
        (root, ["mm()", "mm()"]),
        # The product for the weight's gradient comes second: GELU is computed again, in one kernel with its derivative.
        (third, ["mm(gather0)", "mm()"]),
        (second, ["mm(gather1)", "mm()"]),
        (first, ["mm(gather2)", "mm()"]),
        (root, []),
    ]


def test_the_regions_of_one_unit_are_balanced() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    forward, backward = map(read_code, generated_code(model, torch.ones(512, 64)))
    (label, products), *more = regions(forward)
    assert products == ["mm(gather0)", "mm(gather0)"]
    assert more == []
    ((backward_label, products),) = regions(backward)
    assert backward_label == label
    assert len(products) == 3
