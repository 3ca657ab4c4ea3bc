"""`warmup`: compile a model's forward and backward before the first real step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_passes._torch_compat import backwards_at_once
from fsdp_passes.stand_in import attributes_restored, stand_ins


def warmup(model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compile everything that `model(*args, **kwargs)` and its backward need, and run none of it.

    Ranks may take different times to compile. A collective waits for the slowest of them only as long as its process
    group's timeout allows; compiling needs no other rank, so that nothing waits in here. The compiled code stays with
    the model: a call with arguments of the same kind compiles nothing.

    Graphs return zeros meanwhile. Code between two graphs runs with these, and through the fallback where it reads
    parameters; only then every rank has to call this at the same point.

    Parameters, gradients, buffers, attributes of modules and the random state are afterwards as before.

    Args:
        model: the result of `torch.compile(model, backend=overlap_fsdp)`, or a module whose parts are compiled.
        args, kwargs: as for a step; only shapes, dtypes, devices and what Python code looks at matter.

    Raises:
        What compiling raises, as the first step would.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    with backwards_at_once(), stand_ins(), _buffers_restored(modules), attributes_restored(modules):
        model(*args, **kwargs)


@contextlib.contextmanager
def _buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo writes into buffers by code between graphs."""
    values = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
