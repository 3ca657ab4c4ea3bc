"""Checkpoints of a run, sharded or not, that a kill at any moment leaves whole.

Every checkpoint is a folder `step-<n>`, written under another name and renamed when complete. The newest one counts.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
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


class CheckpointMismatchError(ValueError):
    """A checkpoint of another model."""


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


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
    if is_first_rank():
        older = _checkpoints(folder)  # more than one when a run was killed while it removed them
        (unfinished / PROGRESS).write_text(json.dumps(progress))
        # Atomic: before this line the previous checkpoint is the newest one, after it this one is.
        unfinished.rename(folder / f"step-{progress['step']}")
        for path in older:
            shutil.rmtree(path)
    _barrier()


def load_newest(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, shape: dict[str, int]
) -> dict[str, Any] | None:
    """Load the newest checkpoint into `model` and `optimizer` and return its progress; None when there is none.

    Any number of ranks may read what any other number wrote. Raises `CheckpointMismatchError` when the checkpoint's
    model has another `shape`. Collective.
    """
    path = newest(folder)
    if path is None:
        return None
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
