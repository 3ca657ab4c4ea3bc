"""Tables for people, JSON for everything else; both grow as results come in."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BEGIN_S = time.monotonic()


def say(text: str) -> None:
    """A line of progress on stderr with the time since the start, flushed at once."""
    print(f"[{time.monotonic() - _BEGIN_S:7.1f} s] {text}", file=sys.stderr, flush=True)


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; the first is text, the others are numbers on the right."""
    columns = list(zip(heading, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(heading), line(rule), *(line(row) for row in rows)])


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


class JsonFile:
    """A JSON document that is written again whenever `save` is called; a reader never sees half of it."""

    def __init__(self, path: str | None, document: dict[str, Any]) -> None:
        self.path = Path(path) if path else None
        self.document = document

    def save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(self.document, indent=1) + "\n")
        unfinished.replace(self.path)


def environment(**more: Any) -> dict[str, Any]:
    """What a table of results has to name: the machine, the versions, the command."""
    import platform

    import torch

    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        **more,
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "num_gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        }
    return found
