"""OverlapOptions: what is accepted, what each mistake says, and what the caches' keys see."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fsdp_passes import OverlapOptions, fully_shard, overlap_fsdp
from fsdp_passes.errors import OptionValueError, UnknownOptionError
from fsdp_passes.options import BUCKET_MODES, INNER_COMPILERS, RESERVED_INDUCTOR_OPTIONS
from fsdp_passes.pipeline import record_compilations
from tests.graphs import Layer, compile_step, folded, sharded_transformer, transformer_record
from tests.graphs import eight_fake_ranks as eight_fake_ranks

OTHER_VALUES: dict[str, Any] = {
    "prefetch": 2,
    "inner": "aot_eager",
    "bucket_mode": "packed",
    "unify_communication_stream": False,
    "recompute_elementwise": False,
    "nvtx": False,
    "verify": False,
    "agreement_timeout_s": 20,
    "collective_timeout_s": 20,
    "inductor": {"reorder_for_peak_memory": False},
}


def message(**options: Any) -> str:
    with pytest.raises(OptionValueError) as raised:
        OverlapOptions.from_dict(options)
    return str(raised.value)


def test_the_defaults() -> None:
    assert_expected_inline(
        folded(str(OverlapOptions())),
        """\
OverlapOptions(prefetch=1, inner='inductor', bucket_mode='coalesced', unify_communication_stream=True,
        recompute_elementwise=True, nvtx=True, verify=True, agreement_timeout_s=600.0, collective_timeout_s=None,
        inductor={})""",
    )
    assert OverlapOptions.from_dict(None) == OverlapOptions.from_dict({}) == OverlapOptions()


def test_every_option_can_be_set() -> None:
    assert OTHER_VALUES.keys() == {field.name for field in dataclasses.fields(OverlapOptions)}
    options = OverlapOptions.from_dict(OTHER_VALUES)
    for name, value in OTHER_VALUES.items():
        assert getattr(options, name) == value != getattr(OverlapOptions(), name)


def test_options_are_frozen_and_the_users_dict_is_left_alone() -> None:
    given = {"prefetch": 2}
    options = OverlapOptions.from_dict(given)
    assert given == {"prefetch": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.prefetch = 3  # type: ignore[misc]


def test_an_unknown_option_lists_the_valid_ones_and_the_closest() -> None:
    with pytest.raises(UnknownOptionError) as raised:
        OverlapOptions.from_dict({"prefetch": 1, "prefech": 2})
    assert_expected_inline(
        folded(str(raised.value)),
        """\
prefech: expected one of the options agreement_timeout_s, bucket_mode, collective_timeout_s, inductor, inner, nvtx,
        prefetch, recompute_elementwise, unify_communication_stream, verify, found 'prefech'. Did you mean
        'prefetch'?""",
    )


def test_an_unknown_option_that_is_like_no_other_has_no_suggestion() -> None:
    with pytest.raises(UnknownOptionError, match=r"found 'zzz'\.$"):
        OverlapOptions.from_dict({"zzz": 1})


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None])
def test_prefetch_must_be_a_positive_integer(value: Any) -> None:
    assert message(prefetch=value) == f"prefetch: expected an integer of at least 1, found {value!r}."


@pytest.mark.parametrize("value", ["Inductor", "", None, 1, ["inductor"]])
def test_inner_must_be_a_known_compiler(value: Any) -> None:
    assert message(inner=value) == f"inner: expected one of inductor, aot_eager, eager, found {value!r}."


@pytest.mark.parametrize("value", ["pack", None, True])
def test_bucket_mode_must_be_known(value: Any) -> None:
    assert message(bucket_mode=value) == f"bucket_mode: expected one of coalesced, packed, found {value!r}."


@pytest.mark.parametrize("name", ["unify_communication_stream", "nvtx", "verify"])
@pytest.mark.parametrize("value", [0, 1, "True", None])
def test_switches_must_be_true_or_false(name: str, value: Any) -> None:
    assert message(**{name: value}) == f"{name}: expected True or False, found {value!r}."


@pytest.mark.parametrize("value", [-1, True, None, "10", math.inf, math.nan])
def test_a_timeout_must_be_finite_and_not_negative(value: Any) -> None:
    found = message(agreement_timeout_s=value)
    assert found == f"agreement_timeout_s: expected a finite number of seconds, 0 for never, found {value!r}."


@pytest.mark.parametrize("value", [-1, True, "10", math.inf, math.nan])
def test_a_collectives_timeout_may_be_none_too(value: Any) -> None:
    found = message(collective_timeout_s=value)
    expected = "a finite number of seconds, 0 for unwatched, or None for the process group's own"
    assert found == f"collective_timeout_s: expected {expected}, found {value!r}."


@pytest.mark.parametrize("value", [None, [], "max-autotune"])
def test_inductor_must_be_a_dict(value: Any) -> None:
    assert message(inductor=value) == f"inductor: expected a dict of Inductor options, found {value!r}."


@pytest.mark.parametrize("name", RESERVED_INDUCTOR_OPTIONS)
def test_inductor_options_that_the_passes_need_are_refused(name: str) -> None:
    text = message(inductor={"reorder_for_peak_memory": False, name: None})
    assert text.startswith("inductor: expected options other than joint_custom_post_pass, ")
    assert text.endswith(f" (set by us), found '{name}'.")


@pytest.mark.parametrize("inner", INNER_COMPILERS)
@pytest.mark.parametrize("bucket_mode", BUCKET_MODES)
def test_every_documented_value_is_accepted(inner: str, bucket_mode: str) -> None:
    assert OverlapOptions(inner=inner, bucket_mode=bucket_mode).inner == inner


# ---- the caches' key -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_the_fingerprint_differs_when_an_option_does(name: str) -> None:
    changed = dataclasses.replace(OverlapOptions(), **{name: OTHER_VALUES[name]})
    assert changed.fingerprint() != OverlapOptions().fingerprint()
    assert changed.fingerprint() == dataclasses.replace(changed).fingerprint()


def test_the_fingerprint_does_not_depend_on_the_order_of_inductor_options() -> None:
    forth, back = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert OverlapOptions(inductor=forth).fingerprint() == OverlapOptions(inductor=back).fingerprint()
    assert OverlapOptions(inductor=forth).fingerprint() != OverlapOptions(inductor={"a": 2, "b": 1}).fingerprint()


# ---- through torch.compile -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"prefetch": 0}, "prefetch: expected an integer"), ({"bucketing": "packed"}, "bucketing: expected one of")],
)
@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_mistake_reaches_the_user_before_anything_is_compiled(options: dict[str, Any], expected: str) -> None:
    layer = fully_shard(Layer(8))
    with pytest.raises(BackendCompilerFailed, match=expected) as raised, record_compilations() as records:
        torch.compile(layer, backend=overlap_fsdp, options=options)(torch.ones(4, 8))
    assert isinstance(raised.value.inner_exception, OptionValueError | UnknownOptionError)
    assert records == []


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_record_holds_the_options_that_were_given() -> None:
    assert transformer_record(prefetch=2, nvtx=False).options == OverlapOptions(
        prefetch=2, nvtx=False, inner="aot_eager"
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_packed_buckets_are_single_collectives() -> None:
    for graph in transformer_record(bucket_mode="packed").graphs:
        text = graph.passes["annotate_regions"]
        assert "_coalesced" not in text
        gathers = re.findall(r"^all_gather_\d+ = .*", text, re.MULTILINE)
        assert len(gathers) == (5 if graph.phase == "forward" else 3)
        assert all(", True" in line for line in gathers)  # packed


@pytest.mark.usefixtures("eight_fake_ranks")
def test_two_communication_streams_reduce_over_a_group_of_their_own() -> None:
    _, backward = compile_step(sharded_transformer(), torch.arange(4), unify_communication_stream=False).graphs
    text = backward.passes["annotate_regions"]
    starts = re.findall(r"^(all_gather|reduce_scatter)_\d+ = .*?'(0[:\w]*)'", text, re.MULTILINE)
    assert sorted(starts) == [("all_gather", "0")] * 3 + [("reduce_scatter", "0:reduce")] * 5


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


@pytest.mark.parametrize(("recompute", "num_saved"), [(True, 2), (False, 3)])
@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_product_of_a_gated_mlp_is_computed_again(recompute: bool, num_saved: int) -> None:
    """The two factors are saved either way; their product is read by the product for the gradient of `down.weight`."""
    forward, backward = compile_step(fully_shard(GatedMlp()), torch.ones(4, 8), recompute_elementwise=recompute).graphs
    text = backward.passes["annotate_regions"]
    inputs = re.findall(r"^\w+: float32\[4, 32\] = input$", text, re.MULTILINE)
    assert len(inputs) == num_saved, text
    products = r"aten\.(?:addmm|mm)\b"
    counts = [len(re.findall(products, graph.passes["annotate_regions"])) for graph in (forward, backward)]
    assert counts == [3, 4]  # no product is computed again; the input needs no gradient
