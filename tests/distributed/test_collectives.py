"""The collectives of a unit on real ranks: two on gloo exchange, and give what gloo's own collectives give."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_passes import fully_shard
from fsdp_passes._torch_compat import all_gather_coalesced, reduce_scatter_coalesced
from fsdp_passes.collectives import all_gather, reduce_scatter
from fsdp_passes.errors import CollectiveError
from fsdp_passes.inspect.trace import trace_report
from tests.distributed.checks import call_of, float_batches
from tests.profiles import cpu_profile
from tests.ranks import RankPool
from tests.training import my_share

HERE = "tests.distributed.test_collectives"
# Rows first: a matrix, nothing at all, a vector, a scalar's row, and one above the size that gloo sends at once.
SHAPES = [(3, 5), (0, 4), (7,), (1,), (300, 700)]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8,
]  # fmt: skip


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 100, shape, dtype=dtype)


def _whole(part: Tensor) -> Tensor:
    return part.new_full((part.shape[0] * dist.get_world_size(), *part.shape[1:]), 9)


def equal_to_the_backend_s(dtype: torch.dtype) -> None:
    """Bit for bit, twice in a row without a wait in between; waiting again changes nothing."""
    group = dist.distributed_c10d._get_default_group()
    torch.manual_seed(dist.get_rank())
    rounds = []
    for _ in range(2):
        parts = [_random(shape, dtype) for shape in SHAPES]
        gathered, expected = [[_whole(part) for part in parts] for _ in range(2)]
        grads = [_random(tuple(whole.shape), dtype) for whole in gathered]
        reduced, sums = [[torch.full_like(part, 9) for part in parts] for _ in range(2)]
        works = [all_gather(gathered, parts, group), reduce_scatter(reduced, grads, group, average=False)]
        rounds.append((works, parts, gathered, expected, grads, reduced, sums))
    for works, parts, gathered, expected, grads, reduced, sums in reversed(rounds):
        for work in (*works, *works):
            work.wait()
        all_gather_coalesced(expected, parts, group).wait()
        reduce_scatter_coalesced(sums, grads, group, average=False).wait()
        for found, right in zip([*gathered, *reduced], [*expected, *sums], strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_values_are_those_of_the_backend(pool: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(pool).run(f"{HERE}:equal_to_the_backend_s", dtype=dtype)


def types_that_gloo_cannot_gather() -> list[bool]:
    """8-bit floating point numbers, which no collective of gloo knows."""
    group = dist.distributed_c10d._get_default_group()
    part = torch.full((2, 3), dist.get_rank() + 1.0).to(torch.float8_e4m3fn)
    whole = part.new_empty(4, 3)
    all_gather([whole], [part], group).wait()
    return [bool((rows == rank + 1).all()) for rank, rows in enumerate(whole.float().chunk(2))]


def test_two_ranks_gather_types_that_gloo_does_not_know(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:types_that_gloo_cannot_gather") == [[True, True]] * 2


def memory_is_held_until_the_wait() -> list[tuple[bool, bool]]:
    """Of what is received and of what is sent."""
    group = dist.distributed_c10d._get_default_group()
    found = []
    for start in (all_gather, functools.partial(reduce_scatter, average=False)):
        part, whole = torch.randn(3), torch.empty(6)
        source, target = (part, whole) if start is all_gather else (whole, part)
        storages = [weakref.ref(value.untyped_storage()) for value in (source, target)]
        work = start([target], [source], group)
        del part, whole, source, target
        gc.collect()
        is_held = all(storage() is not None for storage in storages)
        work.wait()
        gc.collect()
        found.append((is_held, all(storage() is None for storage in storages)))
    return found


def test_memory_that_is_sent_or_written_is_held_until_the_wait(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:memory_is_held_until_the_wait") == [[(True, True), (True, True)]] * 2


def interrupted_wait(kind: str) -> tuple[bool, bool]:
    """Rank 1 comes late, and rank 0 is interrupted while it waits, and waits again."""
    group = dist.distributed_c10d._get_default_group()
    ones = [torch.ones(2, 2), torch.ones(4, 2)]
    dist.barrier()
    time.sleep(1.0 * group.rank())
    if kind == "all_gather":
        outputs, works = [torch.empty(2 * len(one), 2) for one in ones], []
        for output, one in zip(outputs, ones, strict=True):  # a unit's dtypes are waited for one after another
            works.append(all_gather([output], [one], group))
        expected = 1
    else:
        outputs = [torch.empty(len(one) // 2, 2) for one in ones]
        works = [reduce_scatter(outputs, ones, group, average=False)]
        expected = 2
    is_interrupted = False
    if group.rank() == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of the background
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            works[0].wait()
        except KeyboardInterrupt:
            is_interrupted = True
        signal.signal(signal.SIGINT, before)
    for work in works:
        work.wait()
    return is_interrupted, all(bool((output == expected).all()) for output in outputs)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_wait_that_was_interrupted_may_be_waited_again(kind: str) -> None:
    """gloo gives the end of a send to one wait: a second one stood still until the timeout."""
    pool = RankPool(2, timeout_s=60)  # of its own: with the wait that stood still it is of no use
    try:
        assert pool.run(f"{HERE}:interrupted_wait", kind=kind) == [(True, True), (False, True)]
    finally:
        pool.close()


def _start(kind: str) -> tuple[dist.Work, Tensor]:
    """A collective whose parts are of the same size in both kinds, and what it writes."""
    group = dist.distributed_c10d._get_default_group()
    part, whole = torch.zeros(2, 3), torch.zeros(4, 3)
    if kind == "gather":
        return all_gather([whole], [part], group), whole
    return reduce_scatter([part], [whole], group, average=False), part


def _raises(work: dist.Work) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return True
    return False


def disagree(orders: tuple[tuple[str, ...], tuple[str, ...]], num_common: int) -> tuple[list[bool], list[bool]]:
    """Whether the wait for each collective raises; and, twice, that for one which starts afterwards."""
    dist.distributed_c10d._get_default_group().set_timeout(datetime.timedelta(seconds=2))
    works = [_start(kind)[0] for kind in orders[dist.get_rank()]]
    found = [_raises(work) for work in works[: num_common + 1]]  # what follows the first failure is of no interest
    late, _ = _start("gather")  # a start never raises: the wait knows of which unit it is
    return found, [_raises(late), _raises(late)]


@pytest.mark.parametrize(
    ("orders", "num_common"),
    [((("gather",), ("reduce",)), 0), ((("gather", "gather", "reduce"), ("gather", "reduce")), 1)],
    ids=["another kind", "one left out"],
)
def test_ranks_that_disagree_take_nothing_from_each_other(
    orders: tuple[tuple[str, ...], tuple[str, ...]], num_common: int
) -> None:
    pool = RankPool(2, timeout_s=60)  # of its own: a group that failed stays so
    try:
        found = pool.run(f"{HERE}:disagree", orders=orders, num_common=num_common)
    finally:
        pool.close()
    assert found == [([False] * num_common + [True], [True, True])] * 2


def exchange_on_two_groups() -> bool:
    """Each group counts for itself: here rank 0 alternates, and rank 1 finishes one group before the other."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    order = [0, 1, 0, 1, 0, 1] if dist.get_rank() == 0 else [0, 0, 0, 1, 1, 1]
    numbers = [0, 0]
    started = []
    for place in order:
        numbers[place] += 1
        value = 100.0 * place + 10.0 * numbers[place]
        whole = torch.empty(4)
        started.append((all_gather([whole], [torch.full((2,), value + dist.get_rank())], groups[place]), whole, value))
    for work, whole, value in started:
        work.wait()
        if whole.tolist() != [value, value, value + 1, value + 1]:
            return False
    return True


def test_groups_count_for_themselves(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:exchange_on_two_groups") == [True, True]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def sends_of_a_step(way: str, folder: str) -> tuple[list[str], Counter[str]]:
    """What gloo says that it ran in the second of two steps, and the collectives that the trace report finds in it."""
    model = fully_shard(Model(), units=["layers.*"])
    call = call_of(model, way)
    (batch,) = float_batches(1, 8, 6)
    call(*my_share(batch)).backward()
    with cpu_profile() as profiler, record_function("ProfilerStep#1"):
        call(*my_share(batch)).backward()
    path = f"{folder}/{dist.get_rank()}.json"
    profiler.export_chrome_trace(path)
    report = trace_report([path])
    ran = sorted({event.name for event in profiler.events() if event.name.startswith("gloo:")})
    return ran, Counter(f"{one.unit} {one.kind}" for one in report.collectives)


@pytest.mark.parametrize("way", ["fallback", "inductor"])
def test_two_ranks_exchange_and_the_trace_report_finds_their_collectives(
    two_ranks: RankPool, way: str, tmp_path: Path
) -> None:
    for ran, found in two_ranks.run(f"{HERE}:sends_of_a_step", way=way, folder=str(tmp_path)):
        assert ran == ["gloo:recv", "gloo:send"]
        # A gradient for the input of layers.0 is not needed: a graph does not gather its weights again.
        again = 1 if way == "inductor" else 2
        gathers = {"layers.0 all_gather": again, "layers.1 all_gather": 2}
        assert found == {**gathers, "layers.0 reduce_scatter": 1, "layers.1 reduce_scatter": 1}


@pytest.mark.parametrize("way", ["fallback", "inductor"])
def test_four_ranks_use_the_collectives_of_the_backend(four_ranks: RankPool, way: str, tmp_path: Path) -> None:
    for ran, found in four_ranks.run(f"{HERE}:sends_of_a_step", way=way, folder=str(tmp_path)):
        assert ran == ["gloo:all_gather", "gloo:all_reduce"]
        assert found["layers.1 all_gather"] == 2


def waits_at_most(timeout_s: float) -> tuple[str, float]:
    """Rank 1 does not take part; the timeout is set behind the group's making."""
    model = fully_shard(Model(), units=["layers.*"])
    model.set_collective_timeout(timeout_s)
    if dist.get_rank() == 1:
        time.sleep(timeout_s + 1.0)
        return "", 0.0
    begin = time.monotonic()
    try:
        model(*my_share(float_batches(1, 8, 6)[0]))
    except CollectiveError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


def test_a_timeout_that_is_set_later_holds_for_an_exchange() -> None:
    pool = RankPool(2, timeout_s=60)  # of its own: a group that failed stays so
    try:
        message, waited_s = pool.run(f"{HERE}:waits_at_most", timeout_s=2.0)[0]
    finally:
        pool.close()
    assert "layers.0" in message
    assert "all_gather" in message
    assert 1.9 < waited_s < 20
