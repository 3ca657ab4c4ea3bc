"""`tools/bench_compile`: compile time, cold and with a warm cache, against plain torch.compile."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.launch import ROOT
from bench.report import JsonFile, environment, number, say, table


class CompileError(Exception):
    """A process of the measurement failed."""


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench_compile",
        description="Time until the first step is done, in fresh processes: with an empty cache (cold) and in a second "
        "process (warm), against torch.compile of the unsharded model; the passes' own share; host time per step.",
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32], help="numbers of layers (default: 8 32)")
    parser.add_argument("--model", choices=("llama", "mlp"), default="llama", help="small layers of this kind")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=1, help="medians of so many cold and warm runs (default: 1)")
    parser.add_argument("--time-limit-s", type=float, default=1200.0, help="of one process (default: 1200)")
    parser.add_argument("--json", default="results/compile.json", help="where to write the results")
    args = parser.parse_args(argv)
    if min(args.layers) < 1 or args.repeats < 1:
        parser.error(f"expected at least one layer and one repeat, found {args.layers} and {args.repeats}")
    return args


def _run(args: argparse.Namespace, system: str, layers: int, measure: str, cache: str) -> dict[str, Any]:
    """One process with its caches in `cache`; its result."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.compile_worker"]
    command += [system, args.model, str(layers), args.device, measure]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")]),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(cache) / "inductor"),
        "TRITON_CACHE_DIR": str(Path(cache) / "triton"),
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=args.time_limit_s)
    if done.returncode:
        raise CompileError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    say(f"{layers} layers, {system}, {measure}: {result['compile_s']:.1f} s, {result['cache_hits']} cache hits")
    return result


def measure_layers(args: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Cold and warm runs of both systems in turn, then the parts of ours."""
    found: dict[str, Any] = {"layers": layers, "plain": [], "ours": []}
    for _ in range(args.repeats):
        for system in ("plain", "ours"):
            with tempfile.TemporaryDirectory(prefix="bench_compile") as cache:
                cold = _run(args, system, layers, "time", cache)
                warm = _run(args, system, layers, "time", cache)
            found[system].append({"cold": cold, "warm": warm})
    with tempfile.TemporaryDirectory(prefix="bench_compile") as cache:
        found["parts"] = _run(args, "ours", layers, "parts", cache)
    return found


def _median(found: dict[str, Any], system: str, which: str) -> float:
    return statistics.median(run[which]["compile_s"] for run in found[system])


def results_table(results: list[dict[str, Any]]) -> str:
    """One row for each number of layers; growth is against the first row."""
    heading = [
        "layers", "plain cold s", "ours cold s", "ours / plain", "plain growth", "ours growth", "plain warm / cold",
        "ours warm / cold", "passes s", "passes share", "wrapper ms forward", "backward", "its autograd nodes",
    ]  # fmt: skip
    rows = []
    for found in results:
        plain, ours, parts = _median(found, "plain", "cold"), _median(found, "ours", "cold"), found["parts"]
        nodes = sum(count for name, count in parts["autograd_nodes"].items() if "HandOut" in name)
        cells = [
            (plain, 1),
            (ours, 1),
            (ours / plain, 3),
            (plain / _median(results[0], "plain", "cold"), 2),
            (ours / _median(results[0], "ours", "cold"), 2),
            (_median(found, "plain", "warm") / plain, 3),
            (_median(found, "ours", "warm") / ours, 3),
            (parts["passes_s"], 2),
            (parts["passes_s"] / parts["compile_s"], 3),
            (parts["wrapper_forward_ms"], 3),
            (parts["wrapper_backward_ms"], 3),
            (nodes, 0),
        ]
        rows.append([str(found["layers"]), *(number(value, digits) for value, digits in cells)])
    return table(heading, rows)


def main(argv: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    results: list[dict[str, Any]] = []
    document = {"title": "compile time", "environment": environment(), "config": vars(args), "results": results}
    output = JsonFile(args.json, document)
    for layers in args.layers:
        try:
            results.append(measure_layers(args, layers))
        except (CompileError, subprocess.TimeoutExpired) as error:
            say(str(error))
            output.save()
            return 1
        output.save()
        print(f"\n### Compile time, {args.model} layers, {args.device}, torch {document['environment']['torch']}\n")
        print(results_table(results), flush=True)
    return 0
