"""Timers around the library's own passes and around its wrapper at run time, for `tools/bench_compile`."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsdp_passes import backend, pipeline
from fsdp_passes.compiled_call import CompiledCall, HandOut


class PassTimers:
    """Seconds spent in each of our own steps of a compilation, by name. Install before anything is compiled."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()

    def install(self) -> None:
        for name in (
            "copy_dynamo_graph",
            "find_parameter_uses",
            "insert_unshard",
            "fence_reductions",
            "pin_and_verify",
            "verify_generated_code",
        ):
            setattr(backend, name, self._timed(name, getattr(backend, name)))
        pipeline._sources_hash = self._timed("hash_of_sources", pipeline._sources_hash)
        for cls in (pipeline.TagJointGraph, pipeline.LowerAndSchedule):
            cls.__call__ = self._timed(cls.__name__, cls.__call__)  # type: ignore[method-assign]

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin_s

        return run

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class WrapperTimer:
    """Host time of what runs around the compiled graphs. Install before anything is compiled."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0

    def install(self) -> None:
        run, hand_out = CompiledCall.__call__, HandOut.backward

        def timed_run(call: CompiledCall, *args: Any) -> Any:
            inner, inner_s = call.inner, 0.0

            def timed_inner(*inputs: Any) -> Any:
                nonlocal inner_s
                begin_s = time.perf_counter()
                try:
                    return inner(*inputs)
                finally:
                    inner_s += time.perf_counter() - begin_s

            call.inner = timed_inner
            begin_s = time.perf_counter()
            try:
                return run(call, *args)
            finally:
                self.forward_s += time.perf_counter() - begin_s - inner_s
                call.inner = inner

        def timed_backward(ctx: Any, *grads: Any) -> Any:
            begin_s = time.perf_counter()
            result = hand_out(ctx, *grads)
            self.backward_s += time.perf_counter() - begin_s
            return result

        CompiledCall.__call__ = timed_run  # type: ignore[method-assign]
        HandOut.backward = staticmethod(timed_backward)  # type: ignore[assignment]

    def clear(self) -> None:
        self.forward_s = self.backward_s = 0.0


def autograd_nodes(loss: Tensor) -> collections.Counter[str]:
    """How many autograd nodes of each name lie behind `loss`, the accumulation into leaves left out."""
    names: collections.Counter[str] = collections.Counter()
    seen, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() != "torch::autograd::AccumulateGrad":
            names[node.name()] += 1
        pending += [following for following, _ in node.next_functions]
    return names
