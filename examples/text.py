"""Real text that every machine has: the sources of the Python standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Third-party packages, and what would make the text depend on how Python was packaged.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "lib2to3", "idlelib"}


def read_stdlib(limit_bytes: int = 4 << 20) -> Tensor:
    """The first `limit_bytes` bytes of the standard library's .py files in sorted order, uint8 of shape (n,)."""
    root = sysconfig.get_path("stdlib")
    text = bytearray()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py") and len(text) < limit_bytes:
                text += Path(folder, name).read_bytes()
    if not text:
        raise FileNotFoundError(f"Expected the sources of the Python standard library in {root}, found no .py file.")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Batches:
    """Global batches drawn from a text. Which rows a step gets depends on the seed and the step alone.

    So every rank draws the same global batch and takes its rows of it, and a resumed run goes on where it was.
    """

    def __init__(self, text: Tensor, batch: int, seq: int, seed: int) -> None:
        self.text, self.batch, self.seq, self.seed = text, batch, seq, seed

    def at(self, step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch: tokens and the bytes that follow, each (batch/num_ranks, seq) int64."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.text) - self.seq, (self.batch, 1), generator=generator)
        rows = self.text[starts.chunk(num_ranks)[rank] + torch.arange(self.seq + 1)].long()
        return rows[:, :-1], rows[:, 1:]
