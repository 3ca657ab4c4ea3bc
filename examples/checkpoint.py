"""Checkpoints of a run, sharded or not, that a kill at any moment leaves whole.

Every checkpoint is a folder `step-<n>`, written under another name, flushed to the disk and renamed when complete. The
newest one counts. Each rank notes the sizes and checksums of its files there: what a disk or a copy has damaged is
refused before anything of it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

PROGRESS = "progress.json"
UNFINISHED = "unfinished"
SUMS = "sums-{rank}.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint of another model."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or are not what was written."""


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
    _flush(path)


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total = zlib.crc32(chunk, total)
    return total


def _damages(path: Path) -> list[str]:
    """What is wrong with the checkpoint; each rank reads its share of the files, all of them look at the sizes."""
    found = []
    sums: dict[str, Any] = {}
    progress = path / PROGRESS
    try:
        for rank in range(json.loads(progress.read_text())["num_writers"]):
            sums |= json.loads((path / SUMS.format(rank=rank)).read_text())
    except (OSError, ValueError, KeyError) as error:
        return [f"{type(error).__name__}: {error}"]
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    for index, (name, (num_bytes, checksum)) in enumerate(sorted(sums.items())):
        file = path / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != num_bytes:
            found.append(f"{name} has {file.stat().st_size} bytes instead of {num_bytes}")
        elif index % num_ranks == _rank() and _checksum(file) != checksum:
            found.append(f"{name} has another checksum")
    return found


def _check_whole(path: Path) -> None:
    """Raises `DamagedCheckpointError` on every rank when any has found something."""
    found = _damages(path)
    total = torch.tensor(len(found))
    if dist.is_initialized():
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = total.to(device)
        dist.all_reduce(total)
    if total > 0:
        raise DamagedCheckpointError(
            f"Expected the files that were written to {path}, found: {'; '.join(found) or 'see the other ranks'}. "
            "Restore the folder from a copy, or remove it to go on without it."
        )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without a process group, torch warns that it saves and loads in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def newest(folder: Path) -> Path | None:
    """The checkpoint to go on from, if there is one."""
    return next(reversed(_checkpoints(folder)), None)


def save(folder: Path, progress: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state of all ranks and `progress` (JSON, with "step"), then remove older checkpoints. Collective."""
    unfinished = folder / UNFINISHED
    if is_first_rank():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    _barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with _one_process_is_meant():
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state},
            checkpoint_id=unfinished,
            no_dist=not dist.is_initialized(),
        )
    ours = [path for path in unfinished.iterdir() if path.name.startswith(f"__{_rank()}_")]
    if is_first_rank():
        ours.append(unfinished / ".metadata")
    _write(unfinished / SUMS.format(rank=_rank()), {path.name: [path.stat().st_size, _checksum(path)] for path in ours})
    _barrier()
    if is_first_rank():
        older = _checkpoints(folder)  # more than one when a run was killed while it removed them
        num_writers = dist.get_world_size() if dist.is_initialized() else 1
        _write(unfinished / PROGRESS, {**progress, "num_writers": num_writers})
        _flush(unfinished)
        # Atomic: before this line the previous checkpoint is the newest one, after it this one is.
        unfinished.rename(folder / f"step-{progress['step']}")
        _flush(folder)  # the old one must not go before the new name is on the disk
        for path in older:
            shutil.rmtree(path)
    _barrier()


def load_newest(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, shape: dict[str, int]
) -> dict[str, Any] | None:
    """Load the newest checkpoint into `model` and `optimizer` and return its progress; None when there is none.

    Any number of ranks may read what any other number wrote. Raises `CheckpointMismatchError` when the checkpoint's
    model has another `shape`, and `DamagedCheckpointError` when files of it were damaged. Collective.
    """
    path = newest(folder)
    if path is None:
        return None
    _check_whole(path)
    progress = json.loads((path / PROGRESS).read_text())
    if progress["shape"] != shape:
        raise CheckpointMismatchError(
            f"Expected a checkpoint of a model with {shape}, found {progress['shape']} in {path}. "
            "Use the flags that it was written with, or another folder."
        )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with _one_process_is_meant():
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return progress
