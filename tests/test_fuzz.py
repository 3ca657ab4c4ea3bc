"""Random models on a fake group; `tools/fuzz.py` runs more. Failures that it found are tests of their own."""

from __future__ import annotations

import pytest

import fuzz
from fuzz import search, search_invariants
from fuzz_models import LEAVES, ModelSpec, Spec, check_invariants
from tests.graphs import eight_fake_ranks as eight_fake_ranks


def test_the_schedules_of_250_random_models_keep_the_invariants() -> None:
    count, failure = search_invariants(250, seed_=7, max_leaves=4)
    assert (count, failure) == (250, None), failure


def test_a_failure_is_shrunk_and_printed_as_a_description_that_can_be_evaluated() -> None:
    def check(spec: ModelSpec) -> None:
        assert not spec.head, "found one with a head"

    count, failure = search(check, 50, seed_=0)
    assert count > 1
    assert failure is not None
    description, *_ = failure.splitlines()
    assert "AssertionError: found one with a head" in failure
    smallest = eval(description, {"ModelSpec": ModelSpec, "Spec": Spec})
    assert smallest.head
    assert len(smallest.blocks) == 1


def test_a_failure_is_told_at_once_and_made_smaller_for_a_limited_time_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "_LONGEST_SHRINKING_S", 0.0)
    checked = []

    def check(spec: ModelSpec) -> None:
        checked.append(spec)
        assert not spec.head, "found one with a head"

    count, failure = search(check, 50, seed_=0)
    assert len(checked) == count  # none after the one that failed
    assert failure is not None
    assert failure.startswith(repr(checked[-1]))
    assert failure in capsys.readouterr().err


@pytest.mark.usefixtures("eight_fake_ranks")
def test_every_kind_of_block_compiles_forward_and_backward() -> None:
    leaves = tuple(Spec(kind, is_unit=index % 2 == 0) for index, kind in enumerate((*LEAVES, "shared", "tied")))
    nested = tuple(Spec(kind, children=leaves[:2]) for kind in ("sequence", "residual", "branches", "checkpointed"))
    (record,) = check_invariants(ModelSpec((*leaves, *nested), head=True))
    assert [graph.phase for graph in record.graphs] == ["forward", "backward"]
