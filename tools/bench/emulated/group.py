"""A process group of N ranks in one process.

Every emulated rank holds what this process holds: an all-gather repeats the own shard N times, a reduce-scatter's
average is the own part of the own gradient, and a sum is N times that. So every system that is measured on the group
sees the same finite values, and a whole model whose weights went through one all-gather computes the same loss.

The methods below are those that torch.distributed calls on a process group written in Python. Release 2.13 renamed
them (`_allgather_base` became `all_gather_single`, and so on); both names are here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bench.emulated.cpu import CpuLink
from bench.emulated.link import LinkModel

BACKEND = "emulated"

Pairs = list[tuple[Tensor, Tensor]]


class Link(Protocol):
    """What carries collectives out: `CpuLink` or `CudaLink`."""

    def all_gather(self, pairs: Pairs, duration_us: float, is_async: bool) -> dist.Work: ...

    def reduce_scatter(self, pairs: Pairs, scale: float, duration_us: float, is_async: bool) -> dist.Work: ...

    def scale(self, tensors: list[Tensor], scale: float, duration_us: float, is_async: bool) -> dist.Work: ...


class EmulatedGroup(dist.ProcessGroup):
    """`world_size` ranks with the same contents, of which this process is `rank`.

    Attributes:
        has_peers: no other process plays a part.
        averages: reduce-scatters can average, as NCCL's can.
        model: how long each collective takes.
        num_launches: collectives so far; a grouped one counts once.
    """

    averages = True
    has_peers = False

    def __init__(self, rank: int, model: LinkModel, device_type: str, num_sms: int) -> None:
        super().__init__(rank, model.world_size)
        self.model = model
        self.num_launches = 0
        self._my_rank, self._device_type, self._num_sms = rank, device_type, num_sms
        self._link: Link | None = None
        self._name, self._desc = "", ""

    @property
    def link(self) -> Link:
        """Made at the first collective: a group may be registered before CUDA is initialized."""
        if self._link is None:
            if self._device_type == "cuda":
                from bench.emulated.cuda import CudaLink  # imports Triton

                self._link = CudaLink(self._my_rank, self.model.world_size, self._num_sms)
            else:
                self._link = CpuLink(self._my_rank, self.model.world_size)
        return self._link

    # ---- names, which torch.distributed sets and asks for ------------------------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, value in pairs:
            _check_sizes(output, value, self.model.world_size, "all-gather")
        self.num_launches += 1
        duration_us = self.model.gather_us(sum(output.nbytes for output in outputs))
        return self.link.all_gather(pairs, duration_us, _is_async(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, value in pairs:
            _check_sizes(value, output, self.model.world_size, "reduce-scatter")
        self.num_launches += 1
        duration_us = self.model.gather_us(sum(value.nbytes for value in inputs))
        return self.link.reduce_scatter(pairs, self._scale(opts), duration_us, _is_async(opts))

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [value], opts)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    # The same under the names of 2.11.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self.num_launches += 1
        duration_us = self.model.all_reduce_us(sum(tensor.nbytes for tensor in tensors))
        return self.link.scale(tensors, self._scale(opts), duration_us, _is_async(opts))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank holds the same already; set-up code calls it, so that it takes no time."""
        return self.link.scale(tensors, 1.0, 0.0, _is_async(opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.link.scale([], 1.0, 0.0, True)

    def _scale(self, opts: Any) -> float:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if op == dist.ReduceOp.SUM:
            return float(self.model.world_size)
        # `in` would compare the other way round, which knows no options that C++ made.
        if op == dist.ReduceOp.AVG or op == dist.ReduceOp.MAX or op == dist.ReduceOp.MIN:
            return 1.0
        raise NotImplementedError(
            f"Expected a reduction by SUM, AVG, MAX or MIN, found {op}; the emulated group knows no other."
        )


def _is_async(opts: Any) -> bool:
    """Without options (grouped calls of 2.11) a collective is asynchronous, as NCCL's are."""
    return bool(getattr(opts, "asyncOp", True))


def _check_sizes(whole: Tensor, part: Tensor, world_size: int, what: str) -> None:
    if whole.numel() != part.numel() * world_size or whole.dtype != part.dtype:
        raise ValueError(
            f"Expected the whole buffer of an emulated {what} to hold {world_size} times the part's elements in the "
            f"same dtype, found {tuple(whole.shape)} {whole.dtype} and {tuple(part.shape)} {part.dtype}."
        )
    if not (whole.is_contiguous() and part.is_contiguous()):
        raise ValueError(f"Expected contiguous buffers in an emulated {what}, found {whole.stride()}, {part.stride()}.")


def init_emulated_group(model: LinkModel, device_type: str, *, num_sms: int = 16) -> EmulatedGroup:
    """Make an emulated group the default group of this process.

    Args:
        model: the number of ranks and the time of each collective.
        device_type: "cuda": a kernel on `num_sms` multiprocessors holds them for the modelled time; "cpu": `wait()`
            sleeps until the modelled time is over.
        num_sms: thread blocks of each collective; NCCL uses 16 to 32 within a node.
    """

    def make(store: Any, rank: int, world_size: int, timeout: Any) -> EmulatedGroup:
        assert world_size == model.world_size, f"subgroups are not emulated: {world_size} of {model.world_size} ranks"
        return EmulatedGroup(rank, model, device_type, num_sms)

    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, lambda *args: _makers[-1](*args), devices=["cpu", "cuda"])
    _makers.append(make)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=model.world_size)
    group = dist.group.WORLD
    assert isinstance(group, EmulatedGroup)
    torch.cuda.set_device(0) if device_type == "cuda" else None
    return group


# The newest maker serves: a backend can be registered only once in a process, while tests make several groups.
_makers: list[Any] = []
