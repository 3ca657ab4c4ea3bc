"""The debugging mode: graphs that run node by node, a check of every read, and NaN in released weights.

`FSDP_PASSES_DEBUG=eager,nan` switches it on without a change to the script.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_passes._torch_compat import tree_leaves
from fsdp_passes.errors import OptionValueError, UseBeforeWaitError
from fsdp_passes.schedule import (
    ALL_GATHER,
    START,
    WAIT,
    Bucket,
    awaited_by,
    bucket_of,
    gathered_reads,
    is_wait,
    role_of,
)

ENVIRONMENT_VARIABLE = "FSDP_PASSES_DEBUG"
_FLAGS = ("eager", "nan")


@dataclasses.dataclass(frozen=True)
class DebugFlags:
    """What `FSDP_PASSES_DEBUG` asks for.

    Attributes:
        eager: run transformed graphs node by node whatever `inner` says.
        nan: fill released weights with NaN and keep their storage, so that a late read shows in the loss.
    """

    eager: bool = False
    nan: bool = False


def debug_flags() -> DebugFlags:
    """Read the environment variable: a list of "eager" and "nan", or "1" or "all" for both; empty or "0" for none."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if text in ("", "0"):
        return DebugFlags()
    names = _FLAGS if text in ("1", "all") else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in _FLAGS:
            raise OptionValueError(ENVIRONMENT_VARIABLE, text, f"'0', '1', or a list of {', '.join(_FLAGS)}")
    return DebugFlags(**dict.fromkeys(names, True))


def check_eager_read(parameter: str, unit: str) -> None:
    """In debugging mode, refuse to read a parameter whose gather is on its way, and name the line that does.

    Otherwise such a read gives the shard, which is right for code that only looks at it.
    """
    if debug_flags() == DebugFlags():
        return
    package = os.path.dirname(__file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(package)]
    where = "".join(traceback.format_list(frames[-1:])).rstrip()
    raise UseBeforeWaitError(parameter, "all-gather", unit, where)


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with the largest value of an integer dtype."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class CheckedInterpreter(fx.Interpreter):
    """Runs a scheduled graph node by node; breakpoints work, and a failing node is named with its source line.

    Args:
        gm: the graph after the passes.
        unit_names: names of the units by index, for messages.
        poison_released: fill a unit's gathered weights with NaN behind their last read, unless the backward keeps them.

    Raises:
        UseBeforeWaitError: a node reads what a collective on its way will write.
    """

    def __init__(self, gm: fx.GraphModule, unit_names: Sequence[str], *, poison_released: bool) -> None:
        super().__init__(gm)
        self.unit_names = unit_names
        self._in_flight: dict[int, Bucket] = {}  # address of a storage -> the collective that will write it
        self._released_after = _last_readers(gm.graph) if poison_released else {}

    def run_node(self, n: fx.Node) -> Any:
        inputs = [self.env[arg] for arg in n.all_input_nodes]
        if role_of(n) != WAIT:
            self._check_reads(n, inputs)
        result = super().run_node(n)
        bucket = bucket_of(n)
        if bucket is not None and role_of(n) == START:
            for tensor in _tensors(result):
                self._in_flight[_address(tensor)] = bucket
        elif is_wait(n):
            for tensor in _tensors([self.env[result] for result in awaited_by(n)]):
                self._in_flight.pop(_address(tensor), None)
        for gathered in self._released_after.get(n, ()):
            for tensor in _tensors(self.env.get(gathered)):
                poison(tensor)
        return result

    def _check_reads(self, node: fx.Node, inputs: list[Any]) -> None:
        for tensor in _tensors(inputs):
            bucket = self._in_flight.get(_address(tensor))
            if bucket is not None:
                where = (node.meta.get("stack_trace") or "").strip() or "no source line is known for it"
                raise UseBeforeWaitError(node.name, bucket.kind, self.unit_names[bucket.unit], where)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _last_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the gathered tensors that nothing reads behind it and that no output holds."""
    reads = gathered_reads(graph)
    last: dict[Bucket, fx.Node] = {}
    kept: set[Bucket] = set()
    gathered: dict[Bucket, list[fx.Node]] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        is_saved = any(user.op == "output" for user in node.users)
        for read in reads.get(node, ()):
            last[read] = node
            if is_saved:
                kept.add(read)
        if bucket is None or bucket.kind != ALL_GATHER:
            continue
        if is_saved or not bucket.reshard:
            kept.add(bucket)
        if is_wait(node):
            gathered.setdefault(bucket, []).extend(awaited_by(node))
    released: dict[fx.Node, list[fx.Node]] = {}
    for bucket, nodes in gathered.items():
        if bucket in last and bucket not in kept:
            released.setdefault(last[bucket], []).extend(nodes)
    return released
