"""Inductor's generated Python, read as a schedule: the last level at which an order can be checked.

What the scheduler was asked for and what is generated can differ: a release may add a reordering behind the last hook.
Code from Inductor's graph cache is read too, but there is no schedule to compare its order with: that is done where it
is made. Code from AOTAutograd's cache was read before it was stored, by the same sources and options (they are part of
the key): a check that fails leaves no entry there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from fsdp_passes.errors import ScheduleError


@dataclasses.dataclass(frozen=True)
class CodeStep:
    """One line of generated code that runs something.

    Attributes:
        kind: "start", "wait", "kernel", "reuse", "region_begin", "region_end" or "start_next".
        name: the collective's operator, the kernel's name, or the variable whose memory another one takes over.
        start: for a start, a wait and what reads a collective's result: the variables of those starts.
        text: the line, without indentation.
        sent: for a start, the variables in its first argument.
    """

    kind: str
    name: str
    start: tuple[str, ...]
    text: str
    sent: tuple[str, ...] = ()


# An in-place collective of the user's has no result; its first argument is what is to be awaited.
_START = re.compile(
    r"(?:(\w+) = )?torch\.ops\.(?:_c10d_functional\.(?=\w)|fsdp_passes\.(?=all_gather|reduce_scatter))"
    r"(\w+)\.default\(\[?(\w*)"
)
# One of ours waits for all results, one of the user's for each.
_WAIT = re.compile(
    r"torch\.ops\.(?:_c10d_functional\.(wait_tensor)|fsdp_passes\.(await_collective))\.default\(\[?(\w+)"
)
_REGION = re.compile(r"torch\.ops\.fsdp_passes\.(region_begin|region_end)\.default\((.*)\)")
_START_NEXT = re.compile(r"torch\.ops\.fsdp_passes\.start_next_graph\.default\((\w+)\)")
_ITEM = re.compile(r"(\w+) = (\w+)\[\d+\]$")
_ALIAS = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*(?:# (?:reuse|alias))?$")
_REUSE = re.compile(r"\w+ = .*\bdel (\w+)  # reuse$")
_KERNEL = re.compile(r"(extern_kernels\.\w+|(?:cpp|triton)_\w+(?:\.run)?|torch\.ops\.\w+\.\w+(?:\.\w+)?|\w+\.run)\(")


def read_generated_code(source: str) -> list[CodeStep]:
    """The steps of the generated module's `call` function (and of its partitions), in order."""
    steps: list[CodeStep] = []
    origin: dict[str, str] = {}  # variable -> variable of the collective whose result it is
    inside = False
    for raw in source.splitlines():
        line = raw.strip()
        if re.match(r"def (call|partition_\d+)\(", line):
            inside = True
        elif re.match(r"(def |class |if __name__)", line) or (raw and not raw[0].isspace() and inside):
            inside = inside and raw[0].isspace() and not line.startswith(("def ", "class "))
        if not inside or not line or line.startswith(("#", "del ", "assert_")):
            continue
        step = _read_line(line, origin)
        if step is not None:
            steps.append(step)
    return steps


def _read_line(line: str, origin: dict[str, str]) -> CodeStep | None:
    if match := _WAIT.search(line):
        return CodeStep("wait", match[1] or match[2], (origin.get(match[3], match[3]),), line)
    if match := _START.match(line):
        variable = match[1] or match[3]
        sent = re.findall(r"\w+", line[match.start(3) :].split("]")[0]) if "[" in match[0] else [match[3]]
        # In place, each tensor of the first argument is a result.
        origin.update(dict.fromkeys([variable] if match[1] else sent, variable))
        return CodeStep("start", match[2], (variable,), line, tuple(sent))
    if match := _REGION.search(line):
        return CodeStep(match[1], match[2], (), line)
    if match := _START_NEXT.search(line):
        return CodeStep("start_next", match[1], (), line)
    if match := _REUSE.match(line):
        return CodeStep("reuse", match[1], (), line)
    if match := _ITEM.match(line):
        if match[2] in origin:
            origin[match[1]] = origin[match[2]]
        return None
    if match := _KERNEL.search(line):
        words = dict.fromkeys(re.findall(r"\w+", line[match.end() :]))
        starts = dict.fromkeys(origin[word] for word in words if word in origin)
        return CodeStep("kernel", match[1], tuple(starts), line)
    if (match := _ALIAS.match(line)) and match[2] in origin:
        origin[match[1]] = origin[match[2]]
    return None


def check_generated_code(source: str, *, scheduled: Sequence[str] | None, where: str) -> None:
    """Raise `ScheduleError` when the code breaks invariant 1, or orders its collectives otherwise than was scheduled.

    Args:
        source: Inductor's generated Python.
        scheduled: "start <operator>" and "wait" in the order that the scheduler was asked for; None when the code came
            from a cache and only the code itself can be checked.
        where: names the graph in the message.
    """
    steps = read_generated_code(source)
    problems = []
    starts = [i for i, step in enumerate(steps) if step.kind == "start"]
    for index in starts:
        variable, name = steps[index].start[0], f"{steps[index].name} ({steps[index].start[0]})"
        waits = [i for i, step in enumerate(steps) if step.kind == "wait" and step.start == (variable,)]
        if not waits or waits[0] < index:
            problems.append(f"{name}: expected a wait behind its start, found none")
            continue
        between = [step.name for step in steps[waits[0] : waits[-1]] if step.kind == "kernel"]
        if between:
            problems.append(f"{name}: {between[0]} runs between the waits of one bucket")
        early = [step.name for step in steps[index : waits[-1]] if step.kind == "kernel" and variable in step.start]
        if early:
            problems.append(f"{name}: {early[0]} reads a result before its wait")
        in_flight = steps[index : waits[0]]
        reused = [step.name for step in in_flight if step.kind == "reuse" and step.name in steps[index].sent]
        if reused:
            problems.append(f"{name}: the memory of {reused[0]}, which it sends, is used again before its wait")
    if scheduled is not None and not problems:
        found = collective_order(steps)
        if found != list(scheduled):
            at = next((i for i, pair in enumerate(zip(found, scheduled, strict=False)) if pair[0] != pair[1]), None)
            place = "their number" if at is None else f"place {at}: '{found[at]}' instead of '{scheduled[at]}'"
            problems.append(
                f"the code orders its collectives otherwise than they were scheduled; they differ in {place}"
            )
    if problems:
        raise ScheduleError(where, problems)


def collective_order(steps: Sequence[CodeStep]) -> list[str]:
    """ "start <operator>" and "wait" for each collective step, in order."""
    return [
        f"start {step.name}" if step.kind == "start" else "wait" for step in steps if step.kind in ("start", "wait")
    ]
