"""Compiling without running, for a warm-up and for `explain`: what a graph would return, as zeros, and modules that are
afterwards as before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

_num_active = 0  # nested warm-ups; a plain number, since every call of a graph looks at it


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, compiled graphs return zeros."""
    global _num_active
    _num_active += 1
    try:
        yield
    finally:
        _num_active -= 1


def are_active() -> bool:
    """Whether a warm-up is going on."""
    return _num_active > 0


@contextlib.contextmanager
def attributes_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo what a forward does to its modules' attributes, and leave the random state as it is."""
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for module, attributes, buffers in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


class StandIn:
    """The outputs of one of Dynamo's graphs: shapes, strides and dtypes, symbolic where the graph's are."""

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        self._symbols = {
            value.node.expr: index for index, value in enumerate(inputs) if isinstance(value, torch.SymInt)
        }
        outputs = gm.graph.output_node().args[0]
        assert isinstance(outputs, tuple | list)
        self._outputs = [
            _described(node.meta.get("example_value")) if isinstance(node, fx.Node) else node for node in outputs
        ]

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """For a call of the graph with `args`."""
        values = {symbol: int(args[index]) for symbol, index in self._symbols.items()}
        return tuple(self._make(output, values) for output in self._outputs)

    def _make(self, output: Any, values: dict[Any, int]) -> Any:
        if isinstance(output, torch.SymInt):
            return _number(output, values)
        if not isinstance(output, _Described):
            return output
        shape, stride = ([_number(size, values) for size in sizes] for sizes in (output.shape, output.stride))
        zeros = torch.empty_strided(shape, stride, dtype=output.dtype, device=output.device).zero_()
        # Not a leaf, which code behind a graph break could not change in place.
        return zeros.requires_grad_().clone() if output.requires_grad else zeros


class _Described:
    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.stride = tuple(value.shape), tuple(value.stride())
        self.dtype, self.device, self.requires_grad = value.dtype, value.device, value.requires_grad


def _described(value: Any) -> Any:
    return _Described(value) if isinstance(value, torch.Tensor) else value


def _number(size: int | torch.SymInt, values: dict[Any, int]) -> int:
    if isinstance(size, torch.SymInt):
        return int(size.node.expr.xreplace(values))
    return size
