"""The command line: `python -m fsdp_passes`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from fsdp_passes.inspect import commands
from fsdp_passes.inspect.targets import UserMistake
from fsdp_passes.pipeline import PASS_NAMES

TARGET = """\
TARGET is module:factory, a function without arguments that gives (model, args) or (model, args, kwargs), the model
sharded by fully_shard(). It is called in a fake process group of the wanted number of ranks: nothing is communicated,
no step runs, and a model on the meta device needs no memory.

"""
TRACES = """\
Traces are those of torch.profiler's export_chrome_trace(), one file for each rank. prof.step() behind each training
step marks the steps; a trace without marks counts as one step.

"""
EXAMPLES = """\
examples:
  python -m fsdp_passes explain examples.models:llama3_8b --world-size 64 --html /tmp/llama.html
  python -m fsdp_passes explain examples.models:gpt_small --cost --json /tmp/gpt.json
  python -m fsdp_passes diff examples.models:gpt_small --pass schedule_one_layer_ahead --color always | less -R
  python -m fsdp_passes verify examples.models:gpt_small --kernels
  python -m fsdp_passes scale examples.models:llama3_8b --world-size 8..16384 --html /tmp/scale.html
  python -m fsdp_passes trace rank0.json.gz rank1.json.gz

"""
EXIT_CODES = """\
exit codes: 0 done; 1 verify found a broken invariant; 2 a mistake in the call, said in one line; 130 interrupted.
Results go to stdout, progress and mistakes to stderr.
"""


def _range(text: str) -> list[int]:
    """ "8..64" -> [8, 16, 32, 64]; "8..24" -> [8, 16, 24]; "8,24" -> [8, 24]."""
    try:
        first, dots, last = text.partition("..")
        if not dots:
            sizes = [int(part) for part in text.split(",")]
        else:
            sizes, size = [], int(first)
            while 1 <= size < int(last):
                sizes.append(size)
                size *= 2
            sizes += [int(last)] if 1 <= int(first) <= int(last) else []
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or sizes != sorted(set(sizes)):
        raise argparse.ArgumentTypeError(f"expected A..B or A,B,C with growing numbers of at least 1, found '{text}'")
    return sizes


def _world_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a number of ranks of at least 1, found '{text}'")
    return size


def _num_lines(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of lines of at least 0, found '{text}'")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage before it."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(commands.MISTAKE, f"{self.prog}: {message}. See {self.prog} --help\n")


def _examples(command: str) -> str:
    return "\n".join(line for line in EXAMPLES.splitlines() if f"fsdp_passes {command} " in line)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fsdp_passes",
        description="See what the FSDP passes make of a model.",
        epilog=TARGET + EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = _Parser(add_help=False)
    shared.add_argument("--quiet", action="store_true", help="no progress on stderr")
    shared.add_argument("--traceback", action="store_true", help="the whole traceback of a mistake, for debugging")
    target = _Parser(add_help=False)
    target.add_argument("target", metavar="TARGET", help="module:factory")
    target.add_argument(
        "--option", "-o", action="append", default=[], metavar="NAME=VALUE", help="of the backend: prefetch=2"
    )
    priced = _Parser(add_help=False)
    priced.add_argument(
        "--hardware", default="h100", help="a100, h100 (default), h200, b200, h100-ethernet or a JSON file"
    )
    ranks = _Parser(add_help=False)
    ranks.add_argument("--world-size", type=_world_size, default=8, metavar="N", help="ranks to shard over (8)")
    files = _Parser(add_help=False)
    files.add_argument("--json", metavar="FILE", help="write everything as JSON")
    files.add_argument("--html", metavar="FILE", help="write the timeline page")

    def add(name: str, parents: list[_Parser], text: str, run: object) -> argparse.ArgumentParser:
        command = commands_of.add_parser(
            name,
            parents=[*parents, shared],
            help=text,
            description=text,
            epilog=f"{TARGET if target in parents else TRACES}examples:\n{_examples(name)}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    commands_of = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    explain = add(
        "explain", [target, priced, ranks, files], "the schedule of a step and its times", commands.run_explain
    )
    explain.add_argument("--kernels", action="store_true", help="let Inductor generate code, for its final order")
    explain.add_argument("--cost", action="store_true", help="the cost in closed form too; traces once more")
    diff = add("diff", [target, ranks], "a graph before and after one pass", commands.run_diff)
    diff.add_argument("--pass", dest="pass_name", required=True, metavar="NAME", help=f"one of {', '.join(PASS_NAMES)}")
    diff.add_argument("--phase", choices=("forward", "backward", "both"), default="both")
    diff.add_argument(
        "--context", type=_num_lines, default=3, metavar="LINES", help="unchanged lines around a change (3)"
    )
    diff.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    verify = add("verify", [target, ranks], "check the schedule's invariants", commands.run_verify)
    verify.add_argument("--kernels", action="store_true", help="Inductor's final order too")
    scale = add("scale", [target, priced], "a step over the number of ranks", commands.run_scale)
    scale.add_argument(
        "--world-size",
        type=_range,
        default="8..1024",
        metavar="A..B",
        help="ranks, doubling up to B, or A,B,C (8..1024)",
    )
    scale.add_argument("--html", metavar="FILE", help="write the curves as a page")
    trace = add("trace", [files], "what a recorded run hid and exposed", commands.run_trace)
    trace.add_argument("files", nargs="+", metavar="FILE", help="Chrome traces of torch.profiler, plain or gzipped")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except UserMistake as mistake:
        if args.traceback:
            traceback.print_exc()
        full_stop = "" if str(mistake).endswith(("?", ".")) else "."
        print(f"fsdp_passes: {mistake}{full_stop}", file=sys.stderr)
        return commands.MISTAKE
    except KeyboardInterrupt:
        return commands.INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()  # the reader had enough (`| head`)
        return commands.OK
    except OSError as error:  # a full disk behind `> file`
        if args.traceback:
            traceback.print_exc()
        _forget_stdout()
        where = f"{error.filename}: " if error.filename else ""
        print(f"fsdp_passes: {where}{error.strerror or error}. Make room, or write elsewhere.", file=sys.stderr)
        return commands.MISTAKE


def _forget_stdout() -> None:
    """Python flushes stdout at its end, and would complain a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
