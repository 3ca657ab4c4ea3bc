"""Inductor's generated Python, read as an order of collectives, waits and kernels.

Written apart from the library's own reader, so that the tests do not trust what they test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import textwrap
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

from fsdp_passes import overlap_fsdp

# Compiled for the order only: nothing comes from a cache, so that every pass runs.
NO_CACHE = {"force_disable_caches": True}


@dataclasses.dataclass(frozen=True)
class Step:
    """One line that runs something.

    kind: "start", "wait", "matmul", "kernel" (generated), "open" or "close" (of a region of compute), "open_start"
        or "close_start" (of the region around a start), "next" (the start of the next graph's first gather).
    name: of the collective for starts and waits ("gather0", "reduce1": numbered in the order of their starts), of the
        label for regions, of the kernel otherwise.
    reads: the collectives whose results the line reads.
    """

    kind: str
    name: str
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind in ("start", "wait"):
            return f"{self.name}.{self.kind}"
        return f"mm({','.join(self.reads)})" if self.kind == "matmul" else f"{self.kind}({self.name})"


def read_code(source: str) -> list[Step]:
    """The steps of the generated `call` function."""
    body = source[source.index("def call(") :]
    end = re.search(r"\n +return \(", body)
    assert end is not None, source
    body = body[: end.start()]
    steps: list[Step] = []
    result_of: dict[str, str] = {}  # variable -> collective
    suffixes: list[str] = []  # of the open regions
    for line in map(str.strip, body.splitlines()):
        if match := re.match(r"(\w+) = torch\.ops\.\w+\.(all_gather|reduce_scatter)\w*\.default\(", line):
            kind = match[2].split("_")[-1].replace("scatter", "reduce")
            name = f"{kind}{sum(step.kind == 'start' and step.name.startswith(kind) for step in steps)}"
            result_of[match[1]] = name
            steps.append(Step("start", name))
        elif match := re.match(r"torch\.ops\.\w+\.(?:wait_tensor|await_collective)\.default\(\[?(\w+)", line):
            steps.append(Step("wait", result_of[match[1]]))
        elif match := re.match(r"torch\.ops\.fsdp_passes\.region_begin\.default\((\w+), '(\w+)'", line):
            suffixes.append("" if match[2].endswith("_compute") else "_start")
            steps.append(Step("open" + suffixes[-1], match[1]))
        elif match := re.match(r"torch\.ops\.fsdp_passes\.region_end\.default\((\w+)", line):
            steps.append(Step("close" + suffixes.pop(), match[1]))
        elif match := re.match(r"torch\.ops\.fsdp_passes\.start_next_graph\.default\((\w+)\)", line):
            steps.append(Step("next", match[1]))
        elif match := re.match(r"(\w+) = (\w+)(\[\d+\]|  # alias)?$", line):
            if match[2] in result_of:
                result_of[match[1]] = result_of[match[2]]
        elif match := re.match(r"(?:\w+ = )?((?:extern_kernels|torch\.ops)[\w.]+|cpp_\w+)\((.*)\)", line):
            words = re.findall(r"\w+", match[2])
            reads = tuple(dict.fromkeys(result_of[word] for word in words if word in result_of))
            is_matmul = re.search(r"\.(add|b|badd)?mm\b|attention|bmm", match[1]) is not None
            steps.append(Step("matmul" if is_matmul else "kernel", match[1], reads))
    return steps


def order(steps: list[Step], kinds: tuple[str, ...] = ("start", "wait", "matmul")) -> str:
    """The steps of these kinds in a few lines; neighbouring waits of one collective are written once."""
    words = [str(step) for step in steps if step.kind in kinds]
    kept = [word for i, word in enumerate(words) if not (word.endswith(".wait") and i and words[i - 1] == word)]
    return "\n".join(textwrap.wrap(" ".join(kept), 110))


@contextlib.contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """Do not build C++ kernels: where only the code is read, g++ would take most of the time."""
    with unittest.mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *buffers: None):
        yield


def generated_code(
    model: nn.Module, *inputs: Any, backward: bool = True, inductor: dict[str, Any] | None = None, **options: Any
) -> list[str]:
    """The generated code of the graphs of `model(*inputs).sum()`, which are executed without their kernels."""
    options["inductor"] = {**NO_CACHE, **(inductor or {})}

    def step() -> None:
        output = torch.compile(model, backend=overlap_fsdp, options=options)(*inputs)
        if backward:
            output.sum().backward()

    with kernels_that_do_nothing():
        _, codes = run_and_get_code(step)
    assert len(codes) == 1 + backward
    return codes


# ---- what must hold --------------------------------------------------------------------------------------------------


def _where(steps: list[Step], matches: Callable[[Step], bool]) -> list[int]:
    return [index for index, step in enumerate(steps) if matches(step)]


def order_problems(steps: list[Step], *, prefetch: int = 1) -> list[str]:
    """Violations of: `prefetch` units ahead, awaited behind the unit before, waits of one collective together, each
    collective awaited once before it is read, each reduction awaited behind the start of the next one."""
    problems = []
    starts = {step.name: index for index, step in enumerate(steps) if step.kind == "start"}
    matmuls = {name: _where(steps, lambda s, n=name: s.kind == "matmul" and n in s.reads) for name in starts}
    waits = {name: _where(steps, lambda s, n=name: s.kind == "wait" and s.name == n) for name in starts}
    for name, start in starts.items():
        reads = _where(steps, lambda s, n=name: n in s.reads)
        if not waits[name] or waits[name][0] < start:
            problems.append(f"{name} is not awaited behind its start")
        elif reads and reads[0] < waits[name][-1]:
            problems.append(f"{name} is read before its last wait")
        elif any(step.kind in ("matmul", "kernel") for step in steps[waits[name][0] : waits[name][-1]]):
            problems.append(f"a kernel runs between the waits of {name}")
    # The root is read at both ends of a forward: the units are those that are read in one place.
    units = sorted((n for n in starts if n.startswith("gather") and matmuls[n]), key=lambda n: matmuls[n][0])
    units = [n for n in units if not any(starts[n] < starts[m] and matmuls[m][-1] < matmuls[n][0] for m in units)]
    for index, name in enumerate(units):
        if index >= prefetch and starts[name] > matmuls[units[index - prefetch]][0]:
            problems.append(f"{name} starts behind the first product of {units[index - prefetch]}")
        if index >= 1 and waits[name][0] < matmuls[units[index - 1]][-1]:
            problems.append(f"{name} is awaited before the last product of {units[index - 1]}")
        if index > prefetch and starts[name] < matmuls[units[index - prefetch - 1]][-1]:
            problems.append(f"{name} starts while more than {1 + prefetch} units are gathered")
    reductions = [name for name in starts if name.startswith("reduce")]
    for name, following in itertools.pairwise(reductions):
        if waits[name][0] < starts[following]:
            problems.append(f"{name} is awaited before {following} is started")
        if not any(step.kind in ("matmul", "kernel") for step in steps[starts[name] : waits[name][0]]):
            problems.append(f"nothing hides {name}")
    return problems
