"""The all-gather and the reduce-scatter of a unit: one grouped collective, or on gloo an exchange between two ranks.

gloo flattens what it gathers as a group and copies it apart again, and it reduces by an all-reduce, which sends twice
the bytes. Two ranks need neither: each sends the other its part, straight out of and into the tensors. That is what a
ring of two ranks does, so nothing is lost on any network. Among more ranks an exchange sends more over the links
between hosts than gloo's rings do where a host has several of them, so there the collectives are gloo's own.
"""

from __future__ import annotations

import collections
import datetime
import functools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._torch_compat import (
    all_gather_coalesced,
    as_real,
    foreach_add,
    foreach_copy,
    group_timeout_s,
    reduce_scatter_coalesced,
)

# Tags of a collective's sends: a bit that a user's own sends over the group do not have, one for the kind, and the
# collective's number. A rank that leaves one out, or starts another one in its place, meets none of the other rank's
# and waits until the timeout, instead of taking what belongs elsewhere.
_OURS, _GATHER, _REDUCE, _NUM_NUMBERS = 1 << 30, 0, 1 << 29, 1 << 29
_CALL = operator.methodcaller("__call__")

# The number of each group's next exchange. By the group itself and weakly: a second one may have the name of one that
# was destroyed.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, collections.deque[int]] = weakref.WeakKeyDictionary()


class Transfers(dist.Work):
    """Collectives, or sends and receives, that are waited for as one, and what is left to do behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.works: collections.deque[dist.Work] = collections.deque()
        self.timeout_of_each: datetime.timedelta | None = None  # `timeout` is a property of 2.14's works
        self.finish: Callable[[], None] | None = None
        self.memory: Sequence[Tensor] = ()
        self.failure: RuntimeError | None = None  # of the start

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for all. What raises stays, and raises again the next time.

        `timeout`: not looked at; each collective has its group's.
        """
        if self.failure is not None:
            raise self.failure
        timeouts = () if self.timeout_of_each is None else (self.timeout_of_each,)
        steps: list[Callable[[], object]] = []
        for work in self.works:
            steps += [functools.partial(work.wait, *timeouts), self.works.popleft]
        # In one call of C code, which Ctrl-C does not interrupt: gloo gives the end of a send or a receive to one wait
        # only, and a second one stands still until the timeout.
        collections.deque(map(_CALL, steps), maxlen=0)
        self.memory = ()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        return True


def all_gather(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup, transfers: Transfers | None = None
) -> dist.Work:
    """Gather each input into its output; returns the work to wait for.

    Args:
        outputs: contiguous, shape (ranks * rows, *rest).
        inputs: contiguous, shape (rows, *rest), one for each output; not to be written before the wait.
        transfers: takes each collective as it starts, for a caller who must know of all that is on its way even if this
            is interrupted.
    """
    if not _exchanges(inputs, group):
        work = all_gather_coalesced(outputs, inputs, group)
        if transfers is None:
            return work
        transfers.works.append(work)
        return transfers
    transfers = transfers or Transfers()
    rank = group.rank()
    parts = [output.chunk(2) for output in outputs]
    _exchange(transfers, _GATHER, [pair[1 - rank] for pair in parts], inputs, group)
    with torch.no_grad():
        foreach_copy([pair[rank] for pair in parts], inputs)
    return transfers


def reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup, *, average: bool
) -> dist.Work:
    """Reduce each input over the ranks, and keep this rank's rows in its output; returns the work to wait for.

    Args:
        outputs: contiguous, shape (rows, *rest).
        inputs: contiguous, shape (ranks * rows, *rest), one for each output; not to be written before the wait.
        average: the mean instead of the sum, where the backend can.
    """
    if average or not _exchanges(inputs, group):
        return reduce_scatter_coalesced(outputs, inputs, group, average=average)
    rank = group.rank()
    parts = [value.chunk(2) for value in inputs]
    transfers = Transfers()

    @torch.no_grad()
    def add_own() -> None:
        foreach_add(outputs, [pair[rank] for pair in parts])

    transfers.finish = add_own
    _exchange(transfers, _REDUCE, outputs, [pair[1 - rank] for pair in parts], group)
    return transfers


def _exchanges(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> bool:
    """Whether these are two ranks on gloo."""
    if inputs[0].device.type != "cpu" or group.size() != 2:
        return False
    return "cpu:gloo" in dist.get_backend_config(group).split(",")


def _exchange(
    transfers: Transfers, kind: int, received: Sequence[Tensor], sent: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Send a tensor and receive one of the same shape, for each of them.

    Raises nothing that gloo raises: an error of a collective is its wait's, which knows the unit.
    """
    other = 1 - group.rank()
    # Sends and receives know only of the timeout that the group was made with, not of one that was set later.
    transfers.timeout_of_each = datetime.timedelta(seconds=group_timeout_s(group, received[0].device))
    transfers.memory = [*received, *sent]  # gloo knows their addresses alone
    number = _numbers.setdefault(group, collections.deque([0], maxlen=1))
    tag = _OURS | kind | number[0]
    count = functools.partial(number.append, (number[0] + 1) % _NUM_NUMBERS)
    # gloo sends nothing that the other rank has not asked for: receives start first.
    starts = [functools.partial(group.recv, [as_real(into)], other, tag) for into in received if into.numel()]
    starts += [functools.partial(group.send, [as_real(value)], other, tag) for value in sent if value.numel()]
    try:
        # In one call of C code, which Ctrl-C does not interrupt: all of it is started and counted, or nothing.
        transfers.works.extend(filter(None, map(_CALL, [count, *starts])))
    except RuntimeError as error:
        transfers.failure = error
