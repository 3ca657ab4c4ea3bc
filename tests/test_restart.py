"""A rank that is killed in the middle of the example is replaced, and the run goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoint
import train_gpt
from bench.network import ADDRESSES, INTERFACES, NetworkError, inside, two_hosts

SCRIPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"
STEPS = 7
PORT = 29512  # of the launchers' meeting in a network of their own
TINY = ["--dim", "32", "--layers", "2", "--batch", "4", "--seq", "16", "--device", "cpu", "--steps", str(STEPS)]


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def reference(folder: Path) -> list[float]:
    log = folder / "reference.jsonl"
    assert train_gpt.main([*TINY, "--reference", "--log-file", str(log)]) == 0
    return losses(log)


def torchrun(*flags: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2", *flags]


def example(folder: Path) -> list[str]:
    flags = ["--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "1"]
    return [str(SCRIPT), *TINY, *flags, "--log-file", str(folder / "log.jsonl")]


def rank_process(run_id: str, rank: int) -> int | None:
    """The process of a rank of the run that was started with the environment variable RUN=`run_id`."""
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            command = (entry / "cmdline").read_bytes() if variables else b""
        except OSError:  # it has ended, or belongs to somebody else
            continue
        wanted = {f"RUN={run_id}".encode(), f"RANK={rank}".encode()}
        if wanted <= {*variables} and str(SCRIPT).encode() in command:
            return int(entry.name)
    return None


def kill_behind(checkpoint_name: str, folder: Path, launchers: list[subprocess.Popen[str]], rank: int) -> None:
    """SIGKILL to a rank as soon as the checkpoint is there."""
    deadline = time.monotonic() + 200
    while not (folder / "checkpoints" / checkpoint_name).exists():
        assert all(launcher.poll() is None for launcher in launchers), [one.communicate() for one in launchers]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    pid = rank_process(str(folder), rank)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def run_and_kill(folder: Path, commands: list[list[str]], environments: list[dict[str, str]]) -> str:
    """Start the launchers, kill rank 1 behind step 2, and wait; what they printed."""
    launchers = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RUN": str(folder), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        kill_behind("step-2", folder, launchers, rank=1)
        texts = [launcher.communicate(timeout=240)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0] * len(launchers), "\n".join(texts)
    return "".join(texts)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds a rank's process in /proc, which only Linux has")


@pytest.mark.parametrize("way", ["--eager", "--compile"])
def test_torchrun_replaces_a_killed_rank_and_the_losses_are_the_same(tmp_path: Path, way: str) -> None:
    command = torchrun("--standalone", "--nproc-per-node", "2")
    printed = run_and_kill(tmp_path, [[*command, *example(tmp_path), way]], [{}])
    assert "going on from there" in printed
    assert losses(tmp_path / "log.jsonl") == pytest.approx(reference(tmp_path), rel=1e-5)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{STEPS}"]


def test_on_two_hosts_too(tmp_path: Path) -> None:
    """Two network namespaces, a launcher in each."""
    commands, environments = [], []
    for host in range(2):
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", "restart"]
        rendezvous += ["--rdzv-conf", f"is_host={int(host == 0)}"]
        flags = ["--nnodes", "2", "--node-rank", str(host), *rendezvous, "--local-addr", ADDRESSES[host]]
        commands.append(inside(host, *torchrun(*flags), *example(tmp_path), "--eager"))
        environments.append({"GLOO_SOCKET_IFNAME": INTERFACES[host], "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        with two_hosts(mbit_per_s=4000, delay_ms=0):
            printed = run_and_kill(tmp_path, commands, environments)
    except NetworkError as error:
        pytest.skip(str(error))
    assert "going on from there" in printed
    assert losses(tmp_path / "log.jsonl") == pytest.approx(reference(tmp_path), rel=1e-5)


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    flags = ["--reference", "--checkpoint", str(tmp_path), "--save-every", "100"]
    assert train_gpt.main([*TINY, *flags, "--steps", "2"]) == 0
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    return newest


def truncate(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"{path.name} has {size // 2} bytes instead of {size}"


def flip_a_bit(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path.name} has another checksum"


def remove(path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_refused_and_the_file_named(
    saved: Path, name: str, damage: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(damage)
    expected = damage(saved / name)
    flags = ["--reference", "--checkpoint", str(saved.parent)]
    assert train_gpt.main([*TINY, *flags]) == 2
    assert f"found: {expected}. Restore the folder from a copy" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["progress.json", "sums-0.json"])
def test_a_checkpoint_without_its_notes_is_refused(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    truncate(saved / name)
    assert train_gpt.main([*TINY, "--reference", "--checkpoint", str(saved.parent)]) == 2
    assert "JSONDecodeError" in capsys.readouterr().err
