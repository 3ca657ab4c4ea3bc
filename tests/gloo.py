"""gloo with one worker thread, for tests.

The two threads that a gloo group has by default both note the name of the collective that ended last in one
`std::string` of the group (`lastCompletedWorkName`) and take no lock. From time to time that corrupts a rank's heap
("malloc(): unaligned tcache chunk"). Found with plain PyTorch 2.13: a loop of grouped gathers and reductions, under an
allocator that looks for writes into freed memory; the block had been freed in `ProcessGroupGloo::runLoop` and held
"ALLREDUCE". `init_process_group` has no way to ask for one thread, so this replaces the class that it calls; the
library does nothing of the kind.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

_Gloo = dist.ProcessGroupGloo


class OneThreadGloo(_Gloo):  # type: ignore[misc, valid-type]
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **_: Any) -> None:
        options: Any = _Gloo._Options()
        options._threads = 1
        options._timeout = timeout
        options._devices = [_Gloo.create_default_device()]
        super().__init__(store, rank, size, options)


def use_one_thread() -> None:
    """Let every gloo group that this process makes from now on have one worker thread."""
    dist.distributed_c10d.ProcessGroupGloo = OneThreadGloo
