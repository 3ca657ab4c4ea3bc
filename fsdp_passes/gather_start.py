"""How an all-gather of compiled code starts: what is done to the shards first, on which stream, and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_passes._torch_compat import foreach_copy, group_of, register_work
from fsdp_passes.collectives import all_gather
from fsdp_passes.offload import fetch

if TYPE_CHECKING:
    from fsdp_passes.context import FsdpContext


class Transfer(NamedTuple):
    """How the shards of one collective travel.

    Attributes:
        world_size: number of ranks in the group.
        group_name: the group to gather over.
        dtype: on the wire, and of the results.
        packed: whether they travel as one flat tensor.
        device: where to gather shards that live on the CPU; None: where they are.
    """

    world_size: int
    group_name: str
    dtype: torch.dtype
    packed: bool
    device: torch.device | None


def start(shards: list[Tensor], transfer: Transfer, context: FsdpContext | None) -> list[Tensor]:
    """Start the collective. The results are undefined until `await_collective` was called with them: the work is
    registered for the first of them.

    The casts belong to this function and not to the graph: all of them are one kernel, and a compiler that owned the
    cast shards could give their memory away while the collective still reads it. So do copies to the device.

    `context`: None where the shards' unit is not known.
    """
    if context is not None:
        gathered, work = start_unregistered(shards, transfer, context)
    else:
        if transfer.device is not None:
            # Nobody could be told that copies read the shards: they are made before this returns.
            shards = [shard.to(transfer.device) for shard in shards]
        gathered, work = _gather(_to_send(shards, transfer), transfer)
    register_work(gathered[0], work)
    return gathered


def start_unregistered(
    shards: list[Tensor], transfer: Transfer, context: FsdpContext
) -> tuple[list[Tensor], dist.Work]:
    """Start the collective outside of PyTorch's registry. Returns the results, which belong to the current stream, and
    the work to wait for.

    What has to be done to the shards first runs beside the compute, on a stream that is not the compute's:

    - Casts, on a stream of their own: memory traffic that goes on beside the matrix products of the unit ahead. Not on
      the communication stream: that waits for each gather of the fallback, and the next cast would wait with it. They
      wait for the compute that was queued before this start: for the optimizer, which wrote the shards, and for the
      gathers that read earlier casts. Those are dropped when the compute stream has been told to wait for their gather,
      and the stream of the casts may reuse their memory.
    - Copies from the CPU, with the casts behind them, on the communication stream. They wait for the gather before
      them, and with it for the compute that this one waited for; for no later compute, since the host wrote the shards
      before it came here.

    The gather itself waits for the compute that was queued before it, as every start does, which may still read the
    memory that it is given.
    """
    device = transfer.device or shards[0].device
    is_fetched = transfer.device is not None
    if not is_fetched and not _is_cast_on_gpu(shards, transfer.dtype):
        return _gather(_to_send(shards, transfer), transfer)
    on_side_stream = context.on_communication_stream if is_fetched else context.on_cast_stream
    computed = context.record_compute(device)
    with on_side_stream(device):
        if is_fetched:
            inputs = _to_send(fetch(shards, device), transfer)
            context.offloading.note_reads(device)
        else:
            _wait_for(computed, device)
            inputs = _to_send(shards, transfer)
    gathered = _room_for(inputs, transfer.world_size)
    with on_side_stream(device):
        _wait_for(computed, device)
        work = all_gather(gathered, inputs, group_of(transfer.group_name))
        if is_fetched and computed is not None:
            # NCCL gathers on a stream of its own. The memory of `inputs` belongs to this one, which must not copy the
            # next shards into it before they are sent.
            work.wait()
    return gathered, work


def _gather(inputs: list[Tensor], transfer: Transfer) -> tuple[list[Tensor], dist.Work]:
    gathered = _room_for(inputs, transfer.world_size)
    return gathered, all_gather(gathered, inputs, group_of(transfer.group_name))


def _wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Let the current stream wait."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _is_cast_on_gpu(shards: list[Tensor], dtype: torch.dtype) -> bool:
    return shards[0].is_cuda and any(shard.dtype != dtype for shard in shards)


def _room_for(inputs: list[Tensor], world_size: int) -> list[Tensor]:
    return [one.new_empty((one.shape[0] * world_size, *one.shape[1:])) for one in inputs]


def _to_send(shards: list[Tensor], transfer: Transfer) -> list[Tensor]:
    dtype = transfer.dtype
    if transfer.packed:
        sizes = [shard.numel() for shard in shards]
        flat = shards[0].new_empty(sum(sizes), dtype=dtype)
        parts = [part.view(shard.shape) for part, shard in zip(flat.split(sizes), shards, strict=True)]
        foreach_copy(parts, shards)
        return [flat]
    if any(shard.dtype != dtype or not shard.is_contiguous() for shard in shards):
        cast = [torch.empty(shard.shape, dtype=dtype, device=shard.device) for shard in shards]
        foreach_copy(cast, shards)
        return cast
    return shards
