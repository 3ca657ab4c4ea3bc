"""Collectives that cannot even be started on this rank say which one it was, and of which unit.

The backend refuses them, or there is no memory for what they gather. Nothing was sent then, and the group is still of
use: where all ranks meet it together (a batch that is too large), they may catch it and go on. So the exception keeps
its type, `torch.OutOfMemoryError` above all, and the name is added to it: as a note (Python 3.11 and newer) and in the
log. A wait that fails is another matter, see `watchdog.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from fsdp_passes.errors import FsdpError
from fsdp_passes.regions import (
    ALL_GATHER_REGION,
    ALL_REDUCE_REGION,
    REDUCE_SCATTER_REGION,
    HasDisplayName,
    innermost_region,
    pop_region,
    push_region,
    region_name,
)

log = logging.getLogger(__name__)

_STARTS = tuple(f":{kind}" for kind in (ALL_GATHER_REGION, REDUCE_SCATTER_REGION, ALL_REDUCE_REGION))


@contextlib.contextmanager
def starting(unit: HasDisplayName, kind: str, *, is_shown: bool = True) -> Iterator[None]:
    """A region around the start of a collective of `unit`, in eager code; what is raised inside names both.

    `is_shown`: without, no profiler sees it.
    """
    name = region_name(unit.display_name, kind)
    push_region(name, is_shown=is_shown)
    try:
        yield
    except Exception as error:
        _say(name, error)
        raise
    finally:
        pop_region()


def name_failed_start(error: BaseException) -> None:
    """`error` came out of a compiled graph, which opens a region around each start: if that is still open, the start
    has raised. Closes it."""
    name = innermost_region()
    if name.endswith(_STARTS):
        pop_region()
        _say(name, error)


def _say(region: str, error: BaseException) -> None:
    if isinstance(error, FsdpError):
        return  # it says more
    _, _, rest = region.partition(":")
    unit, _, kind = rest.rpartition(":")
    text = (
        f"unit {unit!r}: expected to start its {kind}, found that it cannot be started on this rank. Unless all ranks "
        "raise here, those that started it wait for this one until their timeout: end this process."
    )
    log.error(f"{text} {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if hasattr(error, "add_note"):
        error.add_note(text)
