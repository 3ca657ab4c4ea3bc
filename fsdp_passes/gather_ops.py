"""The all-gather of compiled graphs as operators, and its start ahead of the graph that needs it.

`all_gather` casts the shards and starts one collective; `await_collective` waits for it. `all_gather_ahead` is the same
for the first unit of a graph: the graph before it, or an eager unit, may have started it already.
`start_next_graph` is where it does so.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsdp_passes._torch_compat import is_in_backward, register_work, tree_leaves
from fsdp_passes.errors import CollectiveError
from fsdp_passes.gather_start import Transfer, start, start_unregistered
from fsdp_passes.lookahead import Entry
from fsdp_passes.ops import c10d, library
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.regions import (
    ALL_GATHER_REGION,
    close_regions_above,
    is_innermost_region_shown,
    label_owner,
    num_open_regions,
)
from fsdp_passes.starts import name_failed_start, starting
from fsdp_passes.unit import FsdpUnit
from fsdp_passes.watchdog import await_named

if TYPE_CHECKING:
    from fsdp_passes.context import FsdpContext


class GatherRequest(NamedTuple):
    """One collective of a unit: which parameters, and how they travel."""

    params: tuple[FsdpParameter, ...]
    transfer: Transfer


class StartedGather(NamedTuple):
    """A collective on its way that no graph has taken yet.

    Its work is ours, not PyTorch's registry's of results to wait for: a process may end, or a forward stay without its
    backward, and nobody needs these.
    """

    versions: list[Any]
    gathered: list[Tensor]
    work: Any


def await_left_behind(error: BaseException, values: Iterable[Any] = ()) -> None:
    """`error` left a graph half-way: wait for the collectives whose results are in `values` or in the frames that it
    came through. PyTorch would keep them, and the memory that they read and write, for ever. What could not be started
    is named."""
    name_failed_start(error)
    if isinstance(error, CollectiveError):
        return  # behind one, no other collective would end
    frames = [list(frame.f_locals.values()) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for value in tree_leaves([*frames, *values]):
        if type(value) is Tensor:
            with contextlib.suppress(RuntimeError):  # a rank has ended: `error` says more
                c10d.wait_tensor(value)


@contextlib.contextmanager
def leaving_nothing_behind(values: Callable[[], Iterable[Any]] = tuple) -> Iterator[None]:
    """Around a graph that autograd calls, as a context or a decorator. When it raises, its collectives are awaited and
    its regions closed here: nobody else of ours sees that, and the caller may never come back.

    `values`: further values with collectives' results in them (see `await_left_behind`).
    """
    depth = num_open_regions()
    try:
        yield
    except BaseException as error:
        await_left_behind(error, values())
        close_regions_above(depth)
        raise


def _all_gather(
    shards: list[Tensor],
    label: Tensor | None,
    world_size: int,
    group_name: str,
    dtype: torch.dtype,
    packed: bool,
    device: torch.device | None = None,
) -> list[Tensor]:
    unit = None if label is None else _unit_that_sends(label)
    transfer = Transfer(world_size, group_name, dtype, packed, device)
    return start(shards, transfer, None if unit is None else unit.context)


def _all_gather_ahead(
    shards: list[Tensor],
    label: Tensor,
    world_size: int,
    group_name: str,
    dtype: torch.dtype,
    packed: bool,
    is_backward: bool,
    device: torch.device | None = None,
) -> list[Tensor]:
    unit = _unit_that_sends(label)
    transfer = Transfer(world_size, group_name, dtype, packed, device)
    params = _params_of(unit, shards) if unit is not None else ()
    if unit is None or not params:
        return start(shards, transfer, None if unit is None else unit.context)
    request = GatherRequest(params, transfer)
    _enter(unit, request, is_backward)
    copies = None if packed else _copies_of_gathered(unit, params)
    if copies is not None:
        return copies
    started = unit.context.lookahead.started
    found = started.pop(request, None)
    drop_started(unit.context, keep=unit)
    if found is not None:
        if found.versions == [param.values_version for param in params]:
            register_work(found.gathered[0], found.work)  # from here on, the graph waits for it
            return found.gathered
        _drop(request, found)  # an optimizer stepped in between
    return start(shards, transfer, unit.context)


def _unit_that_sends(label: Tensor) -> FsdpUnit | None:
    unit = _unit_of(label)
    if unit is not None:
        unit.check_group()  # a backward may come too late
    return unit


def _unit_of(label: Tensor) -> FsdpUnit | None:
    owner = label_owner(label)
    return owner if isinstance(owner, FsdpUnit) else None


def _params_of(unit: FsdpUnit, shards: list[Tensor]) -> tuple[FsdpParameter, ...]:
    """The unit's parameters behind the shards; () when one of them is no longer a parameter's."""
    by_address = {param.padded_local.data_ptr(): param for param in unit.params}
    found = [by_address.get(shard.data_ptr()) for shard in shards]
    return tuple(param for param in found if param is not None) if None not in found else ()


def _copies_of_gathered(unit: FsdpUnit, params: tuple[FsdpParameter, ...]) -> list[Tensor] | None:
    """The values that the eager fallback has gathered, if it has: a graph inside an eager unit needs no second gather.

    Copies, since a compiled graph may reuse the memory of its own tensors.
    """
    if not unit.is_unsharded or unit.gathered_versions != [param.values_version for param in unit.params]:
        return None
    return [param.gathered_copy() for param in params]


def _enter(unit: FsdpUnit, request: GatherRequest, is_backward: bool) -> None:
    """Tell the context that a graph has begun. A unit with two dtypes calls this twice."""
    context = unit.context
    lookahead = context.lookahead
    if lookahead.open_requests is not None:
        lookahead.open_requests.append(request)
        return
    requests = lookahead.open_requests = [request]
    in_backward = is_in_backward()
    is_grad_enabled = in_backward or context.is_grad_enabled
    entry = Entry(request, True, is_backward, in_backward, is_grad_enabled)
    # This runs inside of the graph's own region around the start, which its options show or hide. So it is next time.
    start = functools.partial(_start_ahead, unit, requests, is_shown=is_innermost_region_shown())
    if lookahead.enter(entry, start):
        drop_started(context)


def _start_ahead(unit: FsdpUnit, requests: list[GatherRequest], *, is_shown: bool) -> None:
    drop_started(unit.context)
    with starting(unit, ALL_GATHER_REGION, is_shown=is_shown):
        for request in requests:
            shards = [param.shard() for param in request.params]
            versions = [param.values_version for param in request.params]
            gathered, work = start_unregistered(shards, request.transfer, unit.context)
            unit.context.lookahead.started[request] = StartedGather(versions, gathered, work)


def drop_started(context: FsdpContext, keep: FsdpUnit | None = None) -> None:
    """Wait for gathers that were started ahead and that nothing needs after all, and drop their results."""
    started = context.lookahead.started
    for request in [request for request in started if request.params[0].unit is not keep]:
        _drop(request, started.pop(request))


def _drop(request: GatherRequest, started: StartedGather) -> None:
    await_named(request.params[0].unit, ALL_GATHER_REGION, request.transfer.group_name, started.work.wait)


def _start_next_graph(label: Tensor) -> None:
    unit = _unit_of(label)
    if unit is not None:
        unit.context.lookahead.open_requests = None
        unit.context.lookahead.start_next()


_SHARED = "Tensor[] shards, Tensor? label, int world_size, str group_name, ScalarType dtype, bool packed"
# `device`: where to gather shards that live on the CPU.
library.define(f"all_gather({_SHARED}, Device? device=None) -> Tensor[]")
library.define(f"all_gather_ahead({_SHARED}, bool is_backward, Device? device=None) -> Tensor[]")
# Declared to write the label, like a region, so that no compiler removes it.
library.define("start_next_graph(Tensor(a!) label) -> ()")
library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
library.impl("all_gather_ahead", _all_gather_ahead, "CompositeExplicitAutograd")
library.impl("start_next_graph", _start_next_graph, "CompositeExplicitAutograd")


def _fake(
    shards: list[Tensor],
    label: Tensor | None,
    world_size: int,
    group_name: str,
    dtype: torch.dtype,
    packed: bool,
    device: torch.device | None = None,
) -> list[Tensor]:
    shapes = [(shard.shape[0] * world_size, *shard.shape[1:]) for shard in shards]
    if packed:
        shapes = [(world_size * sum(shard.numel() for shard in shards),)]
    return [shards[0].new_empty(shape, dtype=dtype, device=device or shards[0].device) for shape in shapes]


torch.library.register_fake("fsdp_passes::all_gather", _fake, lib=library)
torch.library.register_fake(
    "fsdp_passes::all_gather_ahead",
    lambda shards, label, world_size, group_name, dtype, packed, is_backward, device=None: _fake(
        shards, label, world_size, group_name, dtype, packed, device
    ),
    lib=library,
)
torch.library.register_fake("fsdp_passes::start_next_graph", lambda label: None, lib=library)

ALL_GATHER_OP = torch.ops.fsdp_passes.all_gather.default
ALL_GATHER_AHEAD_OP = torch.ops.fsdp_passes.all_gather_ahead.default
START_NEXT_GRAPH = torch.ops.fsdp_passes.start_next_graph.default
torch.fx.node.has_side_effect(START_NEXT_GRAPH)
