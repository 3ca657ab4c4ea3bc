"""What a watch sees and says, without real collectives: a store in this process, and a clock that the test turns."""

from __future__ import annotations

import datetime
import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from fsdp_passes import fully_shard
from fsdp_passes._torch_compat import group_timeout_s
from fsdp_passes.errors import CollectiveError, OptionValueError
from fsdp_passes.marks import FAILED, IDLE, WAITS, Board, Mark, Sighting, within
from fsdp_passes.watchdog import Watch, _Watchman, watch_of
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import folded
from tests.graphs import one_rank as one_rank


class Unit:
    def __init__(self, name: str) -> None:
        self.display_name = name


HEAD, LAYER = Unit("head"), Unit("layers.0")


def watches(num_ranks: int, timeout_s: float = 0.8) -> list[Watch]:
    """One for each rank of a group, as if each were a process."""
    store, group = dist.HashStore(), dist.group.WORLD
    assert group is not None
    made = [Watch(group, Board("test", rank, [*range(num_ranks)], store)) for rank in range(num_ranks)]
    for watch in made:
        watch.set_timeout(timeout_s)
    return made


class Standing:
    """Watches of other ranks that are looked at again and again."""

    def __init__(self, *others: Watch) -> None:
        self.others, self.is_over = others, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        now_s = 0.0
        while not self.is_over.wait(0.02):
            now_s += 0.1
            for watch in self.others:
                watch.look(now_s)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()


def fail() -> None:
    raise RuntimeError("Connection closed by peer\nmore lines")


@pytest.mark.usefixtures("one_rank")
def test_a_failed_wait_says_what_every_other_rank_does() -> None:
    mine, same, other, idle, new, failed, _dead = watches(7)
    for watch in (mine, same, other, idle):
        watch.run(HEAD, "reduce_scatter", lambda: None)
    same.waiting, other.waiting = (LAYER, "all_gather", 0.0), (HEAD, "all_gather", 0.0)
    failed.board.publish(Mark(FAILED, "all_gather", "layers.0", 1, 0.0))
    with Standing(same, other, idle, new), pytest.raises(CollectiveError) as raised:
        mine.run(LAYER, "all_gather", fail)
    error = raised.value
    assert (error.unit, error.collective, error.missing_ranks) == ("layers.0", "all_gather", (3, 4, 6))
    assert isinstance(error.__cause__, RuntimeError)
    text = str(error)
    at = text.index("alive and waits for none: its last")
    text = text[:at] + text[at:].replace(text[at:].split("'head', ")[1].split(" s ago")[0], "<n>", 1)
    assert_expected_inline(
        folded(text),
        """\
unit 'layers.0': expected every rank to take part in its all_gather, waited 0.0 s and found: rank 6 gives no sign of
        life; it has probably ended; rank 5 failed in the all_gather of unit 'layers.0'; rank 1 waits for it too;
        rank 2 waits for the all_gather of unit 'head' instead; rank 3 is alive and waits for none: its last was the
        reduce_scatter of unit 'head', <n> s ago; rank 4 is alive and has not come to its first collective. See that
        rank's log; all ranks must run as many steps, in an evaluation too. options={'collective_timeout_s': ...} or
        model.set_collective_timeout(...) waits longer. The process group says: Connection closed by peer""",
    )


@pytest.mark.usefixtures("one_rank")
def test_a_group_that_failed_is_not_tried_again() -> None:
    mine, _ = watches(2, 0.08)
    with pytest.raises(CollectiveError) as first:
        mine.run(LAYER, "all_gather", fail)
    with pytest.raises(CollectiveError) as second:
        mine.run(HEAD, "all_gather", lambda: None)
    assert second.value is first.value


@pytest.mark.usefixtures("one_rank")
def test_a_store_that_gives_no_answer_holds_nobody_up() -> None:
    class Gone:
        def set(self, *_: object) -> None:
            time.sleep(60)

    mine, _ = watches(2, 0.4)
    mine.board._store = Gone()  # type: ignore[assignment]
    begin_s = time.monotonic()
    with pytest.raises(CollectiveError, match="no answer from rank 1, nor from the store") as raised:
        mine.run(LAYER, "all_gather", fail)
    assert time.monotonic() - begin_s < 5
    assert raised.value.missing_ranks == (1,)


@pytest.mark.usefixtures("one_rank")
def test_the_end_of_a_process_waits_for_a_look_that_is_on_its_way() -> None:
    is_looking, answers = threading.Event(), threading.Event()

    class Slow:
        def delete_key(self, *_: object) -> None:
            pass

        def set(self, *_: object) -> None:
            is_looking.set()
            time.sleep(1.5)
            answers.set()

    mine, _ = watches(2, 0.08)
    mine.board._store = Slow()  # type: ignore[assignment]
    watchman = _Watchman()
    watchman.watches.append(mine)
    watchman.start()
    assert is_looking.wait(10)
    watchman.stop()
    assert answers.is_set()
    assert not watchman.is_alive()


def test_a_store_that_refuses_is_lost() -> None:
    def refuse() -> Sighting:
        raise ConnectionError

    assert within(10.0, refuse) == Sighting(is_store_lost=True)
    assert within(0.01, lambda: time.sleep(0.5) or Sighting()) == Sighting(is_store_lost=True)


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_written_while_collectives_are_completed_and_a_mark_is_taken_back() -> None:
    (watch, _other) = watches(2)
    store = watch.board._store
    assert store is not None
    for now_s in range(5):
        watch.run(LAYER, "all_gather", lambda: None)
        watch.look(float(now_s))
        assert store.num_keys() == 0
    for now_s in (5, 6):
        watch.look(float(now_s))
        assert store.num_keys() == 1
    watch.run(LAYER, "all_gather", lambda: None)
    watch.look(7.0)
    assert store.num_keys() == 0
    watch.look(8.0)
    assert store.num_keys() == 1
    watch.board.withdraw()
    watch.look(7.0 + 2 * watch.timeout_s + 61)
    assert store.num_keys() == 0, "somebody who stopped training must not go on for ever"


@pytest.mark.usefixtures("one_rank")
def test_a_mark_that_is_not_renewed_is_no_sign_of_life() -> None:
    mine, other = watches(2)
    other.board.publish(Mark(IDLE, "all_gather", "head", 3, 1.0, beat=7))
    assert mine.board.look(0.01, 0.1) == Sighting({}, [1])
    other.board.publish(Mark(FAILED, "all_gather", "head", 3, 1.0, beat=7))
    assert mine.board.look(0.01, 0.1).silent == []


@pytest.mark.usefixtures("one_rank")
def test_a_long_wait_is_logged_once_before_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    mine, other = watches(2, 4.0)
    mine.waiting = (LAYER, "all_gather", 0.0)
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 0.5, 2.5):
            mine.look(now_s)
        assert mine.warning is None
        with Standing(other):
            time.sleep(0.1)
            mine.look(3.125)
            assert mine.warning is not None
            mine.warning.join()
        mine.look(3.5)
        mine.warning.join()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text == (
        "unit 'layers.0': its all_gather has been waiting for 3.1 s, and the process group's timeout is 4 s: rank 1 "
        "is alive and has not come to its first collective."
    )


@pytest.mark.usefixtures("one_rank")
def test_on_a_gpu_the_oldest_event_that_has_not_happened_is_what_is_waited_for() -> None:
    class Event:
        def __init__(self, has_happened: bool) -> None:
            self.query = lambda: has_happened

    watch, _ = watches(2)
    watch.count, watch.last = 3, (HEAD, "reduce_scatter")
    watch.events.extend([(HEAD, "all_gather", Event(True)), (LAYER, "all_gather", Event(False))])  # type: ignore[list-item]
    watch.events.append((HEAD, "reduce_scatter", Event(False)))  # type: ignore[arg-type]
    watch.look(0.0)
    watch.look(0.1)
    assert watch.board._store is not None
    mark = Board("test", 1, [0, 1], watch.board._store).read()[0]
    assert (mark.state, mark.collective, mark.unit) == (WAITS, "all_gather", "layers.0")
    watch.is_capturing = True
    watch.board.withdraw()
    watch.look(0.2)
    assert watch.board._store.num_keys() == 0, "an event must not be asked while a CUDA graph is captured"


@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_process_is_not_watched() -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    assert watch_of("0") is None
    before = group_timeout_s(dist.group.WORLD)
    model.set_collective_timeout(7.0)
    assert group_timeout_s(dist.group.WORLD) == before


def test_the_timeout_of_a_group_is_read_from_it() -> None:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=77)
    )
    try:
        assert group_timeout_s(dist.group.WORLD) == 77.0
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_must_be_finite_and_above_zero(value: float) -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    with pytest.raises(OptionValueError, match="set_collective_timeout: expected a finite number of seconds above 0"):
        model.set_collective_timeout(value)
