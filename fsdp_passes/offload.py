"""Sharded parameters and gradients that live on the CPU: their copies to the device and back, and who waits for them.

To the device, copies run on the communication stream, directly ahead of the gather that needs them. To the CPU they run
on a stream of their own: on the communication stream the next gather would queue behind them, and the two directions of
a link do not disturb each other. The host waits twice. A gradient is written into `.grad` behind its copy, when the
backward has ended. And no forward or backward ends while a shard is still being read: whoever writes it next, an
optimizer or `load_state_dict`, does so on the host, where streams order nothing.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

CPU = torch.device("cpu")


class Home(NamedTuple):
    """Where shards live that are elsewhere than what computes with them: in the CPU's memory.

    Attributes:
        device: of what is gathered from them, and of their gradients until these are reduced.
        pinned: whether they are in page-locked memory, which copies that overlap with compute need.
    """

    device: torch.device
    pinned: bool

    @classmethod
    def of(cls, policy: OffloadPolicy | None, mesh: DeviceMesh) -> Home | None:
        """None without a `CPUOffloadPolicy`. On a mesh of CPUs there is nothing to pin memory for."""
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        if mesh.device_type != "cuda":
            return cls(torch.device(mesh.device_type), False)
        return cls(torch.device("cuda", torch.cuda.current_device()), policy.pin_memory)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For a shard."""
        return torch.zeros(shape, dtype=dtype, device=CPU, pin_memory=self.pinned)

    def computes_on(self, device: torch.device) -> torch.device:
        """The device of what is gathered from shards on `device`: that is meta for shards without values."""
        return device if device.type == "meta" else self.device


def fetch(shards: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of `shards` on `device`, made on the current stream; the shards themselves where they are there already.

    In the shards' own dtype: on the way to a narrower one, a cast on the host would halve the bytes of the copy, but it
    would hold up the thread that queues the kernels, and the device casts at the speed of its own memory.
    """
    return [shard.to(device, non_blocking=True) for shard in shards]


class Offloading:
    """The copies of one root and of all units nested in it. Without a policy nothing here is used.

    Who reads and writes the host's memory, and what keeps them apart:

    - A **shard** is read by its copies to the device, and written by the host: by an optimizer, `load_state_dict`, the
      user, or a hook that steps an optimizer in the backward. Whoever lets one of these run waits for the copies first
      (`await_reads`): the end of each forward and backward, `unshard()`, and what calls hooks. Gradients that land call
      hooks, so reads are awaited before and not behind. A hook may write the parameter that it was called for; copies
      of others may be on their way while it runs. The other way round nothing waits: the host queues a copy behind what
      it wrote.
    - A **gradient's buffer** is written by one copy from the device, once, and then belongs to the host: it becomes
      `.grad`, or is added to it. Copies never go into `.grad` itself, which the user, an optimizer or a collective of
      the CPU may still be reading or writing. The host waits for the copy before it lets anybody have the buffer
      (`land`, `await_sent`).
    - Either kind of buffer, once dropped, goes back to PyTorch's cache of page-locked memory, which gives it away only
      behind the copies that it took part in.
    """

    def __init__(self) -> None:
        # Gradients on their way to the CPU, oldest first: each call waits for its copy and writes it, or with False
        # drops it.
        self._landing: collections.deque[Callable[[bool], None]] = collections.deque()
        self._num_old = 0  # of them, how many an earlier backward left
        self._stream: torch.cuda.Stream | None = None
        # Behind copies of shards, on whatever stream. A deque: autograd's threads append to it and take from it.
        self._reads: collections.deque[torch.cuda.Event] = collections.deque()
        self._last_sent: torch.cuda.Event | None = None  # behind the last copy of gradients to the CPU

    # ---- shards to the device ----------------------------------------------------------------------------------------

    def note_reads(self, device: torch.device) -> None:
        """Shards were read on the current stream, by all that was queued there until now."""
        if device.type == "cuda":
            self._reads.append(torch.cuda.current_stream(device).record_event())

    def await_reads(self) -> None:
        """Let the host wait until no copy reads a shard any more. The copies run a layer ahead of the compute, so that
        the device has something to do meanwhile."""
        while True:
            try:
                read = self._reads.popleft()
            except IndexError:  # empty, or another thread of autograd took the last one
                return
            read.synchronize()

    # ---- gradients to the CPU ----------------------------------------------------------------------------------------

    def send(self, grads: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
        """Start the copies of `grads` to the CPU, behind what was queued on the current stream. The results are
        undefined until the host has waited (`await_sent`, `land`). Nobody may write `grads` afterwards.

        A buffer that is dropped is given to the next gradient only behind its own copy: pinned memory comes from
        PyTorch's cache, which waits for that.
        """
        device = grads[0].device
        if device.type != "cuda":
            return list(grads)
        stream = self.stream_to_cpu(device)
        # The gradients are made on the stream that is current here.
        stream.wait_event(torch.cuda.current_stream(device).record_event())
        sent = []
        with torch.cuda.stream(stream):
            for grad in grads:
                # Dropped behind this call; their memory belongs to another stream, which could reuse it at once.
                grad.record_stream(stream)
                sent.append(torch.empty(grad.shape, dtype=grad.dtype, device=CPU, pin_memory=pinned))
                sent[-1].copy_(grad, non_blocking=pinned)
            self._last_sent = stream.record_event()
        return sent

    def stream_to_cpu(self, device: torch.device) -> torch.cuda.Stream:
        """The stream on which gradients are copied from `device`, a CUDA device, to the CPU. Made at its first use, and
        anew when the model has moved to another device."""
        if self._stream is None or self._stream.device != device:
            self.await_sent()  # only the last copy of one stream is remembered
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def await_sent(self) -> None:
        """Let the host wait for all copies to the CPU that were started."""
        if self._last_sent is not None:
            self._last_sent.synchronize()

    def land_later(self, write: Callable[[], None]) -> None:
        """Call `write` when the backward has ended and what was sent until now is on the CPU."""
        sent = self._last_sent

        def land(is_wanted: bool) -> None:
            if is_wanted:
                if sent is not None:
                    sent.synchronize()  # streams do not order the host, which adds these gradients up and steps
                write()

        self._landing.append(land)

    def end_backward(self, *, is_last: bool) -> None:
        """Write what this backward has sent if it is the last of an accumulation, else only what earlier ones left: the
        copies of this one have until the end of the next. So the buffers of one backward wait, however many follow."""
        if is_last:
            self.land()
            return
        older, self._num_old = self._num_old, 0
        try:
            self._land(older, is_wanted=True)
        finally:
            self._num_old = len(self._landing)

    def land(self, *, is_wanted: bool = True) -> None:
        """Write all gradients that were sent, or drop them."""
        self._num_old = 0
        self._land(len(self._landing), is_wanted=is_wanted)

    def _land(self, count: int, *, is_wanted: bool) -> None:
        """The `count` oldest. Where one raises, as a user's hook may, the others are written all the same, and the
        first error is raised behind them: no gradient is missing but those whose own writing failed, and none is left
        to be added to the next step's. An interruption (`KeyboardInterrupt`) is not held up: it drops the others."""
        first: Exception | None = None
        try:
            for _ in range(min(count, len(self._landing))):
                try:
                    self._landing.popleft()(is_wanted)
                except Exception as error:
                    first = first or error
        except BaseException:
            self._num_old = 0
            self._landing.clear()
            raise
        if first is not None:
            raise first
