"""The commands of `python -m fsdp_passes`: each takes parsed arguments, prints to stdout and returns an exit code."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from fsdp_passes.cost.hardware import find_cluster
from fsdp_passes.errors import FsdpError
from fsdp_passes.inspect.explain import Explanation, explain
from fsdp_passes.inspect.scale import scale, scale_text
from fsdp_passes.inspect.scale_page import scale_page
from fsdp_passes.inspect.targets import UserMistake, as_mistake, loaded, one_line
from fsdp_passes.pipeline import PASS_NAMES

OK, FOUND, MISTAKE, INTERRUPTED = 0, 1, 2, 130
FIRST_WORD_S, WORD_EVERY_S = 3.0, 10.0


@contextlib.contextmanager
def without_torchs_errors() -> Iterator[None]:
    """PyTorch logs the traceback of an operator that fails while it is traced; the mistake is told in one line."""

    def is_below_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    names = [name for name in logging.root.manager.loggerDict if name == "torch" or name.startswith("torch.")]
    handlers = list(dict.fromkeys(handler for name in names for handler in logging.getLogger(name).handlers))
    for handler in handlers:
        handler.addFilter(is_below_error)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_below_error)


@contextlib.contextmanager
def progress(what: str, *, is_quiet: bool) -> Iterator[None]:
    """Say on stderr what takes so long, once it does; stdout stays clean for pipes."""
    if is_quiet:
        yield
        return
    done, begin = threading.Event(), time.monotonic()

    def speak() -> None:
        pause = FIRST_WORD_S
        while not done.wait(pause):
            print(f"{what} … {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            pause = WORD_EVERY_S

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


@contextlib.contextmanager
def explained(
    args: argparse.Namespace, world_size: int, *, hardware: str = "h100", kernels: bool = False
) -> Iterator[Explanation]:
    """The explanation of the target; its process group exists inside. `hardware` changes times only."""
    options = dict(_option(text) for text in args.option)
    try:
        cluster = find_cluster(hardware)
    except FsdpError as error:
        raise UserMistake(" ".join(str(error).split())) from error
    with loaded(args.target, world_size) as (model, inputs, kwargs):
        # Through a function, since the model's own keywords may have the names of explain's.
        quiet = contextlib.nullcontext() if args.traceback else without_torchs_errors()
        with quiet, progress(f"tracing {args.target} for {world_size} ranks", is_quiet=args.quiet):
            try:
                explanation = explain(model, *inputs, options=options, hardware=cluster, kernels=kernels, **kwargs)
            except (Exception, SystemExit) as error:  # a forward may call sys.exit()
                raise as_mistake(error, args.target) from error
        yield explanation


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserMistake(f"--option {text}: expected NAME=VALUE, for example --option prefetch=2")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a plain word: bucket_mode=packed


def write_file(path: str, write: Any) -> None:
    """`write(path)`, with a mistake in one line when the file cannot be written."""
    try:
        write(path)
    except OSError as error:
        raise UserMistake(
            f"{path}: expected a file that can be written ({error.strerror}). Give another path"
        ) from None
    print(f"wrote {path}", file=sys.stderr)


def check_writable(*paths: str | None) -> None:
    """Before the work: whether the results can be written where they are asked for."""
    for path in filter(None, paths):
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path):
            found = "a folder"
        elif not os.path.isdir(folder):
            found = f"no folder {folder}"
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            found = "no permission"
        else:
            continue
        raise UserMistake(f"{path}: expected a file that can be written, found {found}. Give another path")


def run_explain(args: argparse.Namespace) -> int:
    """Print the tables; with --cost the closed forms too."""
    check_writable(args.json, args.html)
    with explained(args, args.world_size, hardware=args.hardware, kernels=args.kernels) as explanation:
        print(explanation, flush=True)
        if args.json:
            write_file(args.json, explanation.to_json)
        if args.html:
            write_file(args.html, explanation.to_html)
        if args.cost:
            with progress(f"tracing {args.target} with symbols", is_quiet=args.quiet):
                text = str(explanation.cost)
            print(f"\n{text}", flush=True)
    return OK


def run_verify(args: argparse.Namespace) -> int:
    """Check the schedule's invariants; 1 when one is broken."""
    code = OK
    with explained(args, args.world_size, kernels=args.kernels) as explanation:
        for graph in explanation.graphs:
            checked = [("graph", graph.report), ("kernel order", graph.kernel_report)]
            for what, report in checked:
                if report is None:
                    continue
                bad = [*report.problems, *report.losses]
                code = FOUND if bad else code
                state = f"{len(bad)} violation(s)" if bad else "every invariant holds"
                print(f"{graph.timeline.title}, {what}: {state}")
                for mark, texts in (("wrong", report.problems), ("slow", report.losses), ("note", report.exceptions)):
                    for text in texts:
                        print(f"  {mark}: {text}")
    return code


def run_diff(args: argparse.Namespace) -> int:
    """Print what one pass changes in each graph."""
    if args.pass_name not in PASS_NAMES:
        raise UserMistake(f"--pass {args.pass_name}: expected one of {', '.join(PASS_NAMES)}")
    with explained(args, args.world_size) as explanation:
        has_colour = args.color == "always" or (args.color == "auto" and is_colour_wanted())
        graphs = [graph for graph in explanation.graphs if args.phase in ("both", graph.phase)]
        if not graphs:
            print(f"{args.phase}: there is no such graph, since nothing that is trained needs one")
        for graph in graphs:
            before, after = _around(graph.passes, args.pass_name)
            lines = difflib.unified_diff(
                before.splitlines(),
                after.splitlines(),
                f"{graph.timeline.title} before {args.pass_name}",
                f"{graph.timeline.title} after {args.pass_name}",
                lineterm="",
                n=args.context,
            )
            if before == after:
                print(f"{graph.timeline.title}: {args.pass_name} changes nothing")
            for line in lines:
                print(_coloured(line) if has_colour else line)
    return OK


def _around(passes: Any, name: str) -> tuple[str, str]:
    names = list(passes)
    if name not in names:
        return "", ""
    index = names.index(name)
    return passes[names[index - 1]], passes[name]


_COLOURS = {"+": "32", "-": "31", "@": "36"}


def is_colour_wanted() -> bool:
    """In a terminal that has colours, unless the user asked for none (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(line: str) -> str:
    colour = "1" if line.startswith(("+++", "---")) else _COLOURS.get(line[:1])
    return f"\x1b[{colour}m{line}\x1b[0m" if colour else line


def run_scale(args: argparse.Namespace) -> int:
    """Print the table over numbers of ranks."""
    check_writable(args.html)
    world_sizes = args.world_size
    with explained(args, world_sizes[0], hardware=args.hardware) as explanation:
        points = scale(explanation, world_sizes)
        print(scale_text(explanation, points))
        if args.html:
            page = scale_page(explanation, points)
            write_file(args.html, lambda path: pathlib.Path(path).write_text(page, encoding="utf-8"))
    return OK


def run_trace(args: argparse.Namespace) -> int:
    """Report on traces of real runs."""
    check_writable(args.json, args.html)
    for path in args.files:
        if not pathlib.Path(path).is_file():
            found = "a folder" if pathlib.Path(path).is_dir() else "no such file"
            raise UserMistake(f"{path}: expected a trace file of torch.profiler, found {found}. Check the path")
    from fsdp_passes.inspect.trace import trace_report

    with progress(f"reading {', '.join(args.files)}", is_quiet=args.quiet):
        try:
            report = trace_report(args.files)
        except (FsdpError, OSError, ValueError) as error:
            text = " ".join(str(error).split()) if isinstance(error, FsdpError) else one_line(error)
            raise UserMistake(text if args.files[0] in text else f"{', '.join(args.files)}: {text}") from error
    print(report.text())
    if args.json:
        write_file(args.json, report.to_json)
    if args.html:
        write_file(args.html, report.to_html)
    return OK
