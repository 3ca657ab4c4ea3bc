"""python -m fsdp_passes: outputs, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline

from fsdp_passes.__main__ import main
from fsdp_passes.inspect import commands
from fsdp_passes.inspect.trace import trace_report
from tests.graphs import folded

ROOT = pathlib.Path(__file__).parents[2]
TARGETS = """
    import torch
    from torch import nn
    from fsdp_passes import fully_shard
    from tests.graphs import sharded_transformer

    def tiny():
        return sharded_transformer(), (torch.arange(4),)

    def named():
        return sharded_transformer(), (), {"tokens": torch.arange(4)}

    def raises():
        raise RuntimeError("no such data\\nsecond line")

    def unsharded():
        return nn.Linear(4, 4), (torch.ones(1, 4),)

    def only_a_model():
        return sharded_transformer()

    def wrong_args():
        return sharded_transformer(), torch.arange(4)

    def wrong_shape():
        return fully_shard(nn.Linear(4, 4)), (torch.ones(1, 5),)

    number = 3
"""


@pytest.fixture(autouse=True)
def module_of_targets(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "some_targets.py").write_text(textwrap.dedent(TARGETS))
    (tmp_path / "broken_target.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "raising_target.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    sys.modules.pop("some_targets", None)


# ---- what the commands print -----------------------------------------------------------------------------------------


def test_explain_prints_the_tables_and_writes_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert main(["explain", "some_targets:tiny", "--world-size", "4", "-o", "prefetch=2", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("TinyTransformer over 4 ranks, times predicted for h100\none step without")
    assert f"wrote {path}" in printed.err
    data = json.loads(path.read_text())
    assert (data["world_size"], data["options"]["prefetch"]) == (4, 2)


def test_a_factory_may_give_keyword_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "some_targets:named"]) == 0
    assert "over 8 ranks" in capsys.readouterr().out


def test_cost_prints_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "some_targets:tiny", "--cost"]) == 0
    assert "communication bytes = " in capsys.readouterr().out


def test_html_has_both_timelines_of_each_graph(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.html"
    assert main(["explain", "some_targets:tiny", "--html", str(path)]) == 0
    page = path.read_text()
    for title in ("forward, before scheduling", "backward, before scheduling", "TinyTransformer over 8 ranks"):
        assert title in page


def test_golden_diff(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "diff",
        "some_targets:tiny",
        "--pass",
        "schedule_one_layer_ahead",
        "--phase",
        "forward",
        "--context",
        "0",
    ]
    assert main(command) == 0
    assert_expected_inline(
        folded(capsys.readouterr().out),
        """\
--- forward before schedule_one_layer_ahead
+++ forward after schedule_one_layer_ahead
@@ -15,0 +16 @@
+all_gather_1 = fsdp_passes.all_gather.default([primals_3, primals_4], primals_12, 8, '0', torch.float32, False)
@@ -20 +21 @@
-all_gather_1 = fsdp_passes.all_gather.default([primals_3, primals_4], primals_12, 8, '0', torch.float32, False)
+all_gather_2 = fsdp_passes.all_gather.default([primals_5, primals_6], primals_13, 8, '0', torch.float32, False)
@@ -33 +34 @@
-all_gather_2 = fsdp_passes.all_gather.default([primals_5, primals_6], primals_13, 8, '0', torch.float32, False)
+all_gather_3 = fsdp_passes.all_gather.default([primals_7, primals_8], primals_14, 8, '0', torch.float32, False)
@@ -46 +47 @@
-all_gather_3 = fsdp_passes.all_gather.default([primals_7, primals_8], primals_14, 8, '0', torch.float32, False)
+all_gather_4 = fsdp_passes.all_gather.default([primals_9, primals_10], primals_11, 8, '0', torch.float32, False)
@@ -59 +59,0 @@
-all_gather_4 = fsdp_passes.all_gather.default([primals_9, primals_10], primals_11, 8, '0', torch.float32, False)
@@ -69,0 +70 @@
+t_6: float32[10, 8] = aten.t.default(t_3)
@@ -71 +71,0 @@
-t_6: float32[10, 8] = aten.t.default(t_3)""",
    )


def test_diff_is_coloured_only_when_asked_for_or_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diff", "some_targets:tiny", "--pass", "schedule_one_layer_ahead"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--color", "always"]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    assert "\x1b[32m+all_gather_1" in coloured


def test_golden_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "some_targets:tiny"]) == 0
    assert_expected_inline(
        folded(capsys.readouterr().out),
        """\
forward, graph: every invariant holds
  note: all_gather 0 (unit root): nothing in this graph hides it, it is the first and nothing runs before it
backward, graph: every invariant holds""",
    )


def test_verify_ends_with_1_when_an_invariant_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdp_passes.pipeline.schedule_one_layer_ahead", lambda graph, **_: False)
    assert main(["verify", "some_targets:tiny"]) == 1
    printed = capsys.readouterr().out
    assert "forward, graph: " in printed
    assert "slow: all_gather 1 (unit layers.0): starts behind the first use of unit root, expected before it" in printed


def test_golden_scale(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scale.html"
    assert main(["scale", "some_targets:tiny", "--world-size", "2..32", "--html", str(path)]) == 0
    assert_expected_inline(
        folded(capsys.readouterr().out),
        """\
TinyTransformer, predicted for H100 SXM, 8 to a node joined by NVLink 4, nodes joined by InfiniBand NDR; each rank
        keeps its inputs
ranks  step ms  compute ms  comm ms  exposed ms  exposed %  state GiB  unsharded GiB
    2    0.153       0.000    0.153       0.153      100.0      0.000          0.000
    4    0.242       0.000    0.242       0.242      100.0      0.000          0.000
    8    0.419       0.000    0.419       0.419      100.0      0.000          0.000
   16    0.910       0.000    0.910       0.910      100.0      0.000          0.000
   32    1.893       0.000    1.893       1.893      100.0      0.000          0.000
comm: all collectives, hidden or not; state: shards, gradients and Adam's moments of one rank; unsharded: most
        gathered parameters at once. Activations and the optimizer's step are not in it.
Communication stops being hidden at 2 ranks: 0.106 ms (69.2% of the step) are exposed that larger inputs of each
        rank could hide; the first gathers and the last reductions are exposed at any size.""",
    )
    page = path.read_text()
    assert page.count('role="img"') == 6  # three drawings, each for wide and for narrow windows
    assert page.count("<polyline") == 12
    assert "http" not in page


def test_trace_reports_on_a_recorded_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    files = [str(path) for path in sorted((ROOT / "tests" / "data").glob("fsdp2_two_ranks*.json.gz"))]
    assert main(["trace", *files, "--json", str(data), "--html", str(page)]) == 0
    assert capsys.readouterr().out == trace_report(files).text() + "\n"
    assert json.loads(data.read_text()) == json.loads(json.dumps(trace_report(files).to_dict()))
    assert "<html" in page.read_text()


def test_a_trace_that_is_none_is_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "note.txt"
    file.write_text("hello\nmore")
    assert main(["trace", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fsdp_passes: ")
    assert str(file) in line


def test_progress_goes_to_stderr_and_can_be_silenced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "FIRST_WORD_S", 0.0)
    assert main(["verify", "some_targets:tiny"]) == 0
    assert "tracing some_targets:tiny for 8 ranks … 0 s\n" in capsys.readouterr().err
    assert main(["verify", "some_targets:tiny", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain some_targets", "some_targets: expected module:factory, for example examples.models:gpt_small"),
        ("explain nothing_here:tiny", "expected a module 'nothing_here' in the current folder or on PYTHONPATH"),
        ("explain broken_target:f", "importing 'broken_target' raised ModuleNotFoundError: No module named"),
        ("explain raising_target:f", "importing 'raising_target' raised ZeroDivisionError: division by zero"),
        ("explain some_targets:tyni", "expected a function 'tyni' in 'some_targets', found none. Did you mean"),
        ("explain some_targets:number", "expected a function 'number' in 'some_targets', found none"),
        ("explain some_targets:raises", "the factory raised RuntimeError: no such data. --traceback shows"),
        ("explain some_targets:unsharded", "found Linear without a sharded parameter. Call fully_shard()"),
        (
            "explain some_targets:only_a_model",
            "expected (model, args) or (model, args, kwargs) from the factory, found",
        ),
        ("explain some_targets:wrong_args", "with args a tuple and kwargs a dict, found (FsdpTinyTransformer, Tensor)"),
        ("explain some_targets:wrong_shape", "tracing the model raised"),
        ("explain some_targets:tiny --world-size 0", "expected a number of ranks of at least 1, found '0'"),
        ("explain some_targets:tiny --world-size many", "expected a number of ranks of at least 1, found 'many'"),
        ("explain some_targets:tiny --hardware abacus", "expected one of a100, h100"),
        ("explain some_targets:tiny -o prefech=2", "prefech: expected one of the options"),
        ("explain some_targets:tiny -o prefetch", "--option prefetch: expected NAME=VALUE"),
        ("explain some_targets:tiny -o prefetch=0", "prefetch: expected an integer of at least 1, found 0"),
        ("explain some_targets:tiny --json /no/such/folder/x.json", "expected a file that can be written"),
        ("scale some_targets:tiny --world-size 0..8", "expected A..B or A,B,C with growing numbers of at least 1"),
        ("scale some_targets:tiny --world-size 8..2", "expected A..B or A,B,C with growing numbers of at least 1"),
        ("diff some_targets:tiny", "the following arguments are required: --pass"),
        ("diff some_targets:tiny --pass nothing", "--pass nothing: expected one of bucket_all_gathers, bucket_reduce"),
        ("trace /no/such/file.json", "/no/such/file.json: expected a trace file of torch.profiler, found no such file"),
        ("trace", "the following arguments are required: FILE"),
        ("", "the following arguments are required: COMMAND"),
        ("explode", "invalid choice: 'explode'"),
    ],
)
def test_a_mistake_is_one_line_and_ends_with_2(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("tracing")]
    assert len(error) == 1, error
    assert message in error[0]
    assert not torch.distributed.is_initialized()


def test_the_traceback_of_a_mistake_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "some_targets:raises", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


# ---- as a process ----------------------------------------------------------------------------------------------------


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "fsdp_passes", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        **options,  # type: ignore[call-overload]
    )


def test_help_has_examples_and_the_exit_codes() -> None:
    for arguments in ([], ["explain"]):
        done = run(*arguments, "--help")
        assert done.returncode == 0
        assert "examples:\n  python -m fsdp_passes explain examples.models:llama3_8b" in done.stdout
        assert "exit codes: 0 done; 1 verify found a broken invariant; 2 a mistake" in done.stdout


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = (
        f"{sys.executable} -m fsdp_passes diff examples.models:gpt_small --quiet --pass bucket_all_gathers | head -1"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "--- forward before bucket_all_gathers\n"), done.stderr
    assert "BrokenPipe" not in done.stderr


LLAMA = """
import resource, sys
from fsdp_passes.__main__ import main
code = main(["explain", "examples.models:llama3_8b", "--world-size", "64"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def test_llama3_8b_over_64_ranks_takes_less_than_120_s_and_4_gib() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LLAMA], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 4 * 2**20  # KiB
    assert "Llama over 64 ranks" in done.stdout
    assert "29 like it" in done.stdout
    assert "hidden behind layers.30" in done.stdout
