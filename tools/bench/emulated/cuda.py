"""The emulated link on a GPU: its own stream, events and works as NCCL's, one kernel for each collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from bench.emulated.kernel import ALL_GATHER, BLOCK, NUM_WARPS, REDUCE_SCATTER, SCALE, emulated_collective

_SCALED_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Tables of addresses that are kept: the caching allocator gives the same addresses in every step.
_MAX_TABLES = 4096


class CudaWork(dist.Work):
    """Done when `event` is. Holds the buffers until somebody waits, as NCCL's works do."""

    def __init__(self, link: CudaLink, event: torch.cuda.Event, buffers: list[Tensor]) -> None:
        super().__init__()
        self.link, self.event, self.buffers = link, event, buffers

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait; the host goes on."""
        torch.cuda.current_stream().wait_event(self.event)
        self.buffers = []
        self.link.works.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        return bool(self.event.query())


class CudaLink:
    """Carries collectives out one after another on one stream.

    Attributes:
        overhead_us: what starting and ending a kernel adds to the time it is told to stay; set by calibration.
        works: those that nobody has waited for, kept alive: torch.distributed's C++ side holds a work without its
            Python part, whose `wait` would be lost with it.
    """

    def __init__(self, rank: int, world_size: int, num_sms: int) -> None:
        self.rank, self.world_size, self.num_sms = rank, world_size, num_sms
        self.overhead_us = 0.0
        self.works: dict[int, CudaWork] = {}
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self._tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def all_gather(self, pairs: list[tuple[Tensor, Tensor]], duration_us: float, is_async: bool) -> CudaWork:
        entries = [(value, output, value.numel()) for output, value in pairs]
        return self._run(ALL_GATHER, entries, 1.0, duration_us, is_async)

    def reduce_scatter(
        self, pairs: list[tuple[Tensor, Tensor]], scale: float, duration_us: float, is_async: bool
    ) -> CudaWork:
        entries = [(value, output, output.numel()) for output, value in pairs]
        return self._run(REDUCE_SCATTER, entries, scale, duration_us, is_async)

    def scale(self, tensors: list[Tensor], scale: float, duration_us: float, is_async: bool) -> CudaWork:
        # Nothing to write when the values stay as they are (a broadcast, a maximum); the time passes all the same.
        entries = [(tensor, tensor, tensor.numel()) for tensor in tensors] if scale != 1 else []
        return self._run(SCALE, entries, scale, duration_us, is_async)

    def _run(
        self, kind: int, entries: list[tuple[Tensor, Tensor, int]], scale: float, duration_us: float, is_async: bool
    ) -> CudaWork:
        current = torch.cuda.current_stream(self.device)
        # As with NCCL, a synchronous collective runs on the caller's stream.
        stream = self.stream if is_async else current
        if is_async:
            # The inputs are ready when everything that the caller has queued so far is done.
            stream.wait_event(current.record_event())
        if entries or duration_us > 0:
            with torch.cuda.stream(stream):
                self.launch(kind, entries, scale, duration_us)
        for old in [key for key, work in self.works.items() if work.is_completed()] if len(self.works) > 256 else ():
            del self.works[old]
        buffers = [tensor for source, target, _ in entries for tensor in (source, target)]
        work = CudaWork(self, stream.record_event(), buffers if is_async else [])
        self.works[id(work)] = work
        return work

    def launch(self, kind: int, entries: list[tuple[Tensor, Tensor, int]], scale: float, duration_us: float) -> None:
        """One kernel on the current stream that stays for `duration_us`, less the overhead."""
        is_scaled = scale != 1
        num_bytes = [numel * source.element_size() for source, _, numel in entries]
        addresses = [(source.data_ptr(), target.data_ptr()) for source, target, _ in entries]
        is_aligned = all(a % 16 == b % 16 == 0 for a, b in addresses) and all(size % 64 == 0 for size in num_bytes)
        if is_scaled:
            dtypes = {source.dtype for source, _, _ in entries}
            if len(dtypes) != 1 or not dtypes <= _SCALED_DTYPES.keys():
                raise NotImplementedError(
                    f"Expected one floating-point dtype in an emulated sum, found {sorted(map(str, dtypes))}; reduce "
                    "by AVG, or one dtype at a time."
                )
            dtype = _SCALED_DTYPES[dtypes.pop()]
            sizes = [numel for _, _, numel in entries]
            is_aligned = is_aligned and all(numel % 16 == 0 for numel in sizes)
        else:  # only bytes move
            dtype = tl.int32 if is_aligned else tl.int8
            sizes = [size // 4 if is_aligned else size for size in num_bytes]
        rows = tuple((a, b, size) for (a, b), size in zip(addresses, sizes, strict=True))
        emulated_collective[(self.num_sms,)](
            self._table(rows),
            len(rows),
            max(0, int((duration_us - self.overhead_us) * 1e3)),
            self.rank,
            float(scale),
            0,
            KIND=kind,
            WORLD=self.world_size,
            DTYPE=dtype,
            IS_ALIGNED=is_aligned,
            IS_SCALED=is_scaled,
            IS_TIMED=True,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )

    def _table(self, rows: tuple[tuple[int, int, int], ...]) -> Tensor:
        """The addresses on the device; copied once for each combination and stream."""
        key = (torch.cuda.current_stream(self.device).cuda_stream, rows)
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                torch.cuda.synchronize(self.device)  # nothing reads the old ones any more
                self._tables.clear()
            host = torch.tensor(rows or ((0, 0, 0),), dtype=torch.int64).pin_memory()
            self._tables[key] = (host.to(self.device, non_blocking=True), host)
        return self._tables[key][0]
