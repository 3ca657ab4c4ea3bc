"""The examples run, give the same losses in every way, survive being killed, and measure what they say they measure."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import checkpoint
import show_schedule
import text
import train_gpt
from tests.ranks import RankPool, host_store, launched

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
TINY = ["--dim", "32", "--layers", "2", "--batch", "4", "--seq", "16", "--device", "cpu"]
STEPS = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several processes share the cores; OpenMP threads that wait for each other by spinning would slow all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def losses(log: Path) -> list[float]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    assert all(entry["tokens_per_s"] > 0 for entry in entries)
    return [entry["loss"] for entry in entries]


def run_reference(folder: Path, *flags: str, steps: int = STEPS) -> list[float]:
    """Train in this process, without sharding; the losses in the log."""
    log = folder / "reference.jsonl"
    assert train_gpt.main([*TINY, "--reference", "--steps", str(steps), "--log-file", str(log), *flags]) == 0
    return losses(log)


def run_ranks(log: Path, *flags: str) -> list[float]:
    """Train on two ranks that the script starts; the losses in the log."""
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--ranks", "2", "--steps", str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--log-file", str(log), *flags], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(log)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one uninterrupted process without sharding."""
    return run_reference(tmp_path_factory.mktemp("expected"))


def assert_equal_losses(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_example_has_a_main_whose_result_is_the_exit_code(script: str) -> None:
    source = ast.parse((EXAMPLES / script).read_text())
    mains = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert [ast.unparse(main.returns) for main in mains if main.returns] == ["int"]
    assert ast.unparse(source.body[-1]).splitlines() == ["if __name__ == '__main__':", "    sys.exit(main())"]


@pytest.mark.parametrize("script", ["train_gpt.py", "show_schedule.py"])
def test_examples_with_flags_explain_them(script: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--ranks" in done.stdout


def test_the_planted_mistake_is_found() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "eager_debug.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "found:"), done.stderr


def test_show_schedule_prints_both_schedules_and_the_hidden_share() -> None:
    flags = ["--layers", "3", "--dim", "32", "--batch", "4", "--seq", "16", "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "show_schedule.py"), *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    forward, backward = done.stdout.split("backward graph")
    moves = [" ".join(line.split()[:3]) for line in forward.splitlines() if "all_gather" in line]
    assert moves == [
        "start all_gather root",
        "start all_gather layers.0",
        "wait all_gather root",
        "start all_gather layers.1",
        "wait all_gather layers.0",
        "start all_gather layers.2",
        "wait all_gather layers.1",
        "start all_gather root",  # norm and head; the first was the embedding
        "wait all_gather layers.2",
        "wait all_gather root",
    ]
    units = ["root", "layers.2", "layers.1", "layers.0", "root"]  # first norm and head, last the embedding
    starts = [line.split()[2] for line in backward.splitlines() if "start reduce_scatter" in line]
    waits = [line.split()[2] for line in backward.splitlines() if "wait  reduce_scatter" in line]
    assert (starts, waits) == (units, units)
    share = re.search(r"communication hidden: (\d+)%", done.stdout)
    assert share is not None
    assert 0 <= int(share[1]) <= 100


def test_the_default_model_has_about_ten_million_parameters() -> None:
    args = train_gpt.parse([])
    with torch.device("meta"):
        model = train_gpt.GPT(args.dim, args.layers, args.seq)
    assert 9e6 < sum(param.numel() for param in model.parameters()) < 11e6


def test_the_loss_falls(tmp_path: Path) -> None:
    found = run_reference(tmp_path, "--dim", "64", steps=40)
    assert found[0] == pytest.approx(5.545, abs=0.05)  # ln 256: nothing is known yet
    assert sum(found[-5:]) / 5 < found[0] - 1.0


@pytest.mark.parametrize("way", ["--compile", "--eager"])
def test_two_ranks_have_the_losses_of_the_reference(tmp_path: Path, expected: list[float], way: str) -> None:
    assert_equal_losses(run_ranks(tmp_path / "log.jsonl", way), expected)


def test_bf16_follows_the_fp32_losses(tmp_path: Path, expected: list[float]) -> None:
    found = run_ranks(tmp_path / "log.jsonl", "--bf16")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
    assert found != expected


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_two_killed_ranks_go_on_with_the_same_losses(tmp_path: Path, expected: list[float]) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    flags = ["--eager", "--checkpoint", str(folder), "--save-every", "1"]
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, *flags, "--steps", "100000"]
    store = host_store()
    ranks = [
        subprocess.Popen(
            [*command, "--log-file", str(log)],
            env={**launched(store, rank, 2), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 240
        while not (folder / "step-3").exists():
            assert all(rank.poll() is None for rank in ranks), "a rank ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    assert len(losses(log)) < STEPS
    assert_equal_losses(run_ranks(log, *flags), expected)
    assert [path.name for path in folder.iterdir()] == [f"step-{STEPS}"]


def test_ranks_go_on_from_a_checkpoint_of_the_reference(tmp_path: Path, expected: list[float]) -> None:
    flags = ["--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "1000"]
    run_reference(tmp_path, *flags, steps=4)
    assert_equal_losses(run_ranks(tmp_path / "log.jsonl", *flags), expected)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("moment", ["dcp.save", "Path.write_text", "Path.rename", "shutil.rmtree"])
def test_a_run_killed_while_saving_goes_on_from_the_last_whole_checkpoint(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "checkpoints"
    flags = ["--checkpoint", str(folder), "--save-every", "2"]
    run_reference(tmp_path, *flags, steps=4)

    owner, name = operator.attrgetter(moment.rpartition(".")[0])(checkpoint), moment.rpartition(".")[2]
    original = getattr(owner, name)

    def kill(*arguments: object, **options: object) -> object:
        if name == "rename" and arguments[0] != folder / checkpoint.UNFINISHED:
            return original(*arguments, **options)  # torch's own files
        if options.get("ignore_errors"):
            return original(*arguments, **options)  # the clean-up before a save
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            run_reference(tmp_path, *flags)
    is_saved = moment == "shutil.rmtree"  # only old checkpoints are left to remove
    assert checkpoint.newest(folder) == folder / ("step-6" if is_saved else "step-4")
    assert_equal_losses(run_reference(tmp_path, *flags), expected)
    assert [path.name for path in folder.iterdir()] == [f"step-{STEPS}"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, "--reference", "--steps", "1", "--checkpoint", str(tmp_path)]
    assert train_gpt.main(flags) == 0
    assert train_gpt.main([*flags, "--layers", "3"]) == 2
    message = capsys.readouterr().err
    assert "Expected a checkpoint of a model with {'dim': 32, 'layers': 3, 'seq': 16}" in message
    assert "found {'dim': 32, 'layers': 2, 'seq': 16}" in message


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compile", "--eager"], "not allowed with argument"),
        (["--reference", "--ranks", "2"], "--reference is one process, not 2 ranks"),
        (["--reference", "--bf16"], "--reference has none"),
        (["--ranks", "3"], "--batch 16 cannot be split evenly over 3 ranks"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--steps", "-1"], "--steps must be at least 1, got -1"),
        (["--dim", "100"], "--dim must be a multiple of 32, got 100"),
        (["--save-every", "5"], "--save-every needs --checkpoint DIR"),
        (["--checkpoint", "x", "--save-every", "0"], "--save-every must be at least 1, got 0"),
    ],
)
def test_flags_that_cannot_work_together_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main([*flags, "--device", "cpu"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "2"], "--ranks 2, but torchrun started 4"),
        (["--reference"], "--reference is one process, not 4 ranks"),
    ],
)
def test_under_torchrun_the_number_of_ranks_is_torchruns(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert train_gpt.parse(["--device", "cpu"]).ranks == 4
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main([*flags, "--device", "cpu"])
    assert message in capsys.readouterr().err


# ---- data ------------------------------------------------------------------------------------------------------------


def test_ranks_share_a_global_batch_that_depends_on_the_step() -> None:
    batches = text.Batches(text.read_stdlib(1 << 16), batch=6, seq=8, seed=3)
    tokens, targets = batches.at(5, 0, 1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(torch.cat([batches.at(5, rank, 3)[0] for rank in range(3)]), tokens)
    assert not torch.equal(batches.at(6, 0, 1)[0], tokens)


def test_the_text_is_python_source_of_the_wanted_size() -> None:
    whole = text.read_stdlib(1 << 16)
    assert whole.dtype == torch.uint8
    assert len(whole) == 1 << 16
    assert b"import " in bytes(whole.tolist())


# ---- the measurement of hidden communication -------------------------------------------------------------------------


def event(name: str, begin_us: float, end_us: float) -> torch.autograd.profiler_util.FunctionEvent:
    return torch.autograd.profiler_util.FunctionEvent(id=0, name=name, thread=0, start_us=begin_us, end_us=end_us)


def test_hidden_communication_is_what_runs_while_nobody_starts_or_waits() -> None:
    """
    gloo, first thread    1000 --------- 5000
    gloo, second thread          3000 -------- 7000
    starts and waits    500-2000            6000 ---- 8000
    """
    events = [
        event("gloo:all_gather", 1000, 5000),
        event("gloo:all_reduce", 3000, 7000),
        event("_c10d_functional::all_gather_into_tensor", 500, 2000),
        event("_c10d_functional::wait_tensor", 6000, 8000),
        event("aten::mm", 2000, 6000),
    ]
    assert show_schedule.communication_times(events) == (pytest.approx(6.0), pytest.approx(2.0))


def measure_overlap(is_overlapped: bool) -> float:
    """The hidden share when every gather is awaited behind a product of matrices, or before it."""
    shard, matrix = torch.ones(1 << 20), torch.randn(768, 768)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            gathered = funcol.all_gather_tensor(shard, 0, dist.group.WORLD)
            if not is_overlapped:
                funcol.wait_tensor(gathered)
            for _ in range(8):
                matrix @ matrix
            if is_overlapped:
                funcol.wait_tensor(gathered)
            dist.barrier()
    events = [event for event in profiler.events() if "barrier" not in event.name]
    running_ms, exposed_ms = show_schedule.communication_times(events)
    return 1 - exposed_ms / running_ms


def test_real_gathers_are_exposed_before_compute_and_hidden_behind_it(two_ranks: RankPool) -> None:
    for share in two_ranks.run("tests.test_examples:measure_overlap", is_overlapped=False):
        assert share < 0.2
    for share in two_ranks.run("tests.test_examples:measure_overlap", is_overlapped=True):
        assert share > 0.5
