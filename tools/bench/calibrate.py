"""Check the emulated link against its own model before anything is measured on it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.communication import CommunicationAlone
from bench.emulated.group import EmulatedGroup

if TYPE_CHECKING:
    from bench.systems import Setting

# The emulator refuses to report when a collective alone is further off than this.
TOLERANCE = 0.05
# Below it the clock of CUDA events (about half a microsecond) and the launch decide, not the model.
SMALLEST_CHECKED_US = 50.0
_REPEATS = 10


class CalibrationError(Exception):
    """A collective does not last what the model says."""


def calibrate(group: EmulatedGroup, setting: Setting, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time each grouped collective of the shape alone, and compare with `group.model`.

    First measures what launching adds to a kernel that only stays, and lets the link subtract it.

    Returns:
        For each distinct collective its name, bytes, modelled and measured microseconds. Empty on the CPU.

    Raises:
        CalibrationError: one is off by more than 5 %.
    """
    if setting.device.type != "cuda":
        return []
    link: Any = group.link
    link.overhead_us = 0.0
    link.overhead_us = max(0.0, time_us(lambda: link.launch(0, [], 1.0, 200.0), link) - 200.0)
    say(f"emulated link: a kernel's own overhead is {link.overhead_us:.1f} us")
    alone = CommunicationAlone(setting.shape, setting.mesh, setting.device, setting.reduce_dtype)
    results, wrong = [], []
    for shapes in dict.fromkeys(tuple(unit) for unit in alone.unit_shapes):
        shards, wholes, grads, rows = alone.buffers[shapes]
        for what, kind, sources, targets, whole in (
            ("all-gather", 0, shards, wholes, wholes),
            ("reduce-scatter", 1, grads, rows, grads),
        ):
            entries = _entries(kind, sources, targets)
            whole_bytes = sum(tensor.nbytes for tensor in whole)
            model_us = group.model.gather_us(whole_bytes)
            measured_us = time_us(lambda k=kind, e=entries, d=model_us: link.launch(k, e, 1.0, d), link)
            off = measured_us / model_us - 1
            results.append({"collective": what, "bytes": whole_bytes, "model_us": model_us, "measured_us": measured_us})
            say(
                f"  {what} of {whole_bytes / 1e6:.1f} MB: {model_us:.1f} us modelled, {measured_us:.1f} us ({off:+.1%})"
            )
            if model_us >= SMALLEST_CHECKED_US and abs(off) > TOLERANCE:
                wrong.append(f"{what} of {whole_bytes / 1e6:.1f} MB: {model_us:.1f} us, found {measured_us:.1f} us")
    if wrong:
        raise CalibrationError(
            f"Expected each emulated collective within {TOLERANCE:.0%} of its model, found:\n  "
            + "\n  ".join(wrong)
            + "\nNothing is reported. Where it is too slow, copying takes longer than the link: raise --num-sms or "
            "lower --bandwidth. Otherwise make sure that nobody else uses the GPU."
        )
    return results


def _entries(kind: int, sources: list[Tensor], targets: list[Tensor]) -> list[tuple[Tensor, Tensor, int]]:
    """(input, output, elements of one rank's part), as the link's launch takes them."""
    parts = sources if kind == 0 else targets
    return [(s, t, part.numel()) for s, t, part in zip(sources, targets, parts, strict=True)]


def time_us(launch: Callable[[], None], link: Any) -> float:
    """The median duration of what `launch` puts on the link's stream.

    A kernel that stays for some milliseconds goes first: the launches queue up behind it, and the time between two
    events is the GPU's alone.
    """
    with torch.cuda.stream(link.stream):
        launch()  # compiles, and copies the table of addresses
        torch.cuda.synchronize()
        link.launch(0, [], 1.0, 5000.0)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            launch()
            event.record()
        torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events))
