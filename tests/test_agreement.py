"""How ranks compare schedules over a store, without any process group: threads play the ranks."""

from __future__ import annotations

import concurrent.futures
import json
import random
import time

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import fx

from fsdp_passes.agreement import AGREE_ON_SCHEDULE, Collective, Round, decode, encode, first_difference
from fsdp_passes.errors import ScheduleDisagreementError
from fsdp_passes.passes.agree_on_schedule import agree_on_schedule
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import folded, label_named, trace, transformer_record, unshard

Said = list[tuple[str, str]]

GATHERS: Said = [("all_gather (float32)", "layers.0"), ("all_gather (float32)", "layers.1")]
SWAPPED: Said = GATHERS[::-1]


def meet(
    store: dist.Store, rank: int, world_size: int, schedule: Said, *, delay_s: float = 0.0, timeout_s: float = 20.0
) -> str | None:
    """One rank's part in a round; the error's text, None when all agreed."""
    time.sleep(delay_s)
    round_ = Round(store, "test/1", rank, list(range(world_size)), "0")
    mine = {"phase": "forward", "collectives": schedule}
    try:
        round_.meet(json.dumps(mine), str(schedule), timeout_s)
    except ScheduleDisagreementError as error:
        return str(error)
    return None


def all_meet(schedules: dict[int, Said], *, world_size: int | None = None, **how: float) -> list[str | None]:
    store = dist.HashStore()
    size = world_size or len(schedules)
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(meet, store, rank, size, schedule, **how) for rank, schedule in schedules.items()]
        return [future.result() for future in futures]


def test_ranks_with_one_schedule_agree_in_200_tries_however_late_each_of_them_is() -> None:
    delays = random.Random(0)
    for _ in range(200):
        store = dist.HashStore()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            late = [delays.choice((0.0, 0.0, 0.001, 0.01)) for _ in range(4)]
            futures = [pool.submit(meet, store, rank, 4, GATHERS, delay_s=late[rank]) for rank in range(4)]
            assert [future.result() for future in futures] == [None] * 4


@pytest.mark.parametrize("odd", range(3))
def test_all_ranks_raise_when_one_differs_whichever_it_is(odd: int) -> None:
    for _ in range(20):
        found = all_meet({rank: SWAPPED if rank == odd else GATHERS for rank in range(3)})
        others = ", ".join(str(rank) for rank in range(3) if rank != odd)
        for text in found:
            assert text is not None
            assert "collective 0 differs" in text
            # A rank that came late is not in the text of those that raised before.
            assert f"of unit 'layers.1' on rank {odd}" in text
            assert any(
                f"of unit 'layers.0' on rank{end}" in text for end in (f"s {others}", *map(" {}".format, others))
            )


def test_the_text_of_a_difference_names_collective_unit_and_sides() -> None:
    (text, _) = all_meet({0: GATHERS, 1: GATHERS[:1]}, timeout_s=20)
    assert_expected_inline(
        folded(str(text)),
        """\
forward graph on group '0': expected every rank to start the same collectives in the same order, found that
        collective 1 differs: all_gather (float32) of unit 'layers.1' on rank 0; no further collective on rank 1.
        Compile the same model with the same options and releases on every rank, and let no rank take a branch of
        its own.""",
    )


def test_a_rank_that_does_not_come_is_named_within_the_limit() -> None:
    begin_s = time.monotonic()
    (text,) = all_meet({0: GATHERS}, world_size=3, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begin_s < 2
    assert_expected_inline(
        folded(str(text)),
        """\
forward graph on group '0': expected every rank to be about to run it, found no answer from ranks 1, 2 within 0.3 s;
        the first collective would be the all_gather (float32) of unit 'layers.0'. Such a rank has ended, has left
        the loop, runs other code, or is still compiling: see its log. options={'agreement_timeout_s': ...} waits
        longer.""",
    )


def test_a_difference_is_told_at_once_though_another_rank_is_missing() -> None:
    begin_s = time.monotonic()
    found = all_meet({0: GATHERS, 1: SWAPPED}, world_size=3, timeout_s=60)
    assert all("collective 0 differs" in str(text) for text in found)
    assert time.monotonic() - begin_s < 10


def test_what_a_group_has_agreed_on_is_deleted_from_the_store() -> None:
    store = dist.HashStore()
    rounds = [Round(store, "test/1", rank, [0, 1], "0") for rank in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.meet("{}", "same", 20.0), rounds))
    assert store.num_keys() == 5
    for one in rounds:
        one.forget()
    assert store.num_keys() == 0


def test_first_difference() -> None:
    assert first_difference({0: GATHERS, 1: GATHERS}) == (None, [])
    assert first_difference({}) == (None, [])
    assert first_difference({0: GATHERS, 1: GATHERS[:1], 2: GATHERS}) == (1, [(GATHERS[1], [0, 2]), (None, [1])])


def test_schedules_survive_the_way_through_a_graph() -> None:
    schedule = [Collective("all_gather (float32, 3 parameters, 12 bytes)", 0), Collective("all_reduce (float32)", -1)]
    assert decode(encode(schedule)) == schedule
    assert decode(encode([])) == []


# ---- the pass --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_units() -> fx.Graph:
    shards = torch.ones(2, 4), torch.ones(2, 4)
    labels = label_named("a"), label_named("b")

    def function(x: torch.Tensor, s0: torch.Tensor, s1: torch.Tensor, l0: torch.Tensor, l1: torch.Tensor) -> object:
        y = x @ unshard(s0, 0, label=l0).t()
        y = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(y, "sum", "0"))
        return y @ unshard(s1, 1, label=l1)

    graph = trace(function, torch.ones(3, 4), *shards, *labels).graph
    bucket_all_gathers(graph, bucket_mode="coalesced")
    return graph


def place_of_labels(graph: fx.Graph) -> dict[int, fx.Node]:
    return dict(enumerate([node for node in graph.nodes if node.op == "placeholder"][-2:]))


@pytest.mark.usefixtures("eight_fake_ranks")
def test_golden_of_the_pass(two_units: fx.Graph) -> None:
    assert agree_on_schedule(two_units, labels=place_of_labels(two_units), is_backward=False, timeout_s=5.0) == 1
    node = next(node for node in two_units.nodes if node.op != "placeholder")
    assert node.target is AGREE_ON_SCHEDULE
    two_units.lint()
    _, labels, phase, group, fingerprint, schedule, timeout_s = node.args
    assert (phase, group, timeout_s, len(labels), len(fingerprint)) == ("forward", "0", 5.0, 2, 16)
    assert_expected_inline(
        schedule.replace(";", "\n"),
        """\
all_gather (float32, 1 parameters, 256 bytes)@0
all_reduce (float32)@-1
all_gather (float32, 1 parameters, 256 bytes)@1""",
    )


@pytest.mark.usefixtures("eight_fake_ranks")
def test_the_pass_is_idempotent_and_does_nothing_without_labels(two_units: fx.Graph) -> None:
    labels = place_of_labels(two_units)
    assert agree_on_schedule(two_units, labels={}, is_backward=False, timeout_s=5.0) == 0
    assert agree_on_schedule(two_units, labels=labels, is_backward=False, timeout_s=5.0) == 1
    assert agree_on_schedule(two_units, labels=labels, is_backward=False, timeout_s=5.0) == 0


@pytest.mark.usefixtures("eight_fake_ranks")
def test_a_group_without_other_processes_is_not_asked() -> None:
    assert all("agree_on_schedule" not in graph.passes for graph in transformer_record().graphs)
