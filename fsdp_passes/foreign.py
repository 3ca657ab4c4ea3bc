"""Code that another backend than ours compiles: `layer.compile()`, `torch.compile(model)`.

Such a backend takes the placeholders for whole parameters. So the hooks leave its graphs (a graph break) and gather and
reduce as they do without a compiler; between them it compiles what computes with the gathered parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fsdp_passes._torch_compat import backend_of_region, backend_that_traces, never_compile_alone
from fsdp_passes.errors import ExportedModuleError, ForeignBackendWarning

WHY_FOREIGN_GRAPHS_BREAK = (
    "a sharded module's parameters are gathered and released by its hooks, since this backend does not do it in the "
    "graph. Use torch.compile(model, backend=overlap_fsdp)"
)

Backend = TypeVar("Backend", bound=Callable[..., Any])


def gathers_parameters(backend: Backend) -> Backend:
    """Mark a Dynamo backend that puts the gathers into its graphs itself."""
    backend.gathers_parameters = True  # type: ignore[attr-defined]
    return backend


@never_compile_alone
def is_foreign(backend: Any) -> bool:
    """Whether `backend` (None: no compiler) leaves gathering to the hooks. Wrappers of a marked backend are as good as
    that: `torch.compile`'s own, `functools.partial` and `functools.wraps`."""
    while backend is not None:
        if getattr(backend, "gathers_parameters", False):
            return False
        for name in ("compiler_fn", "func", "__wrapped__"):
            if callable(getattr(backend, name, None)):
                backend = getattr(backend, name)
                break
        else:
            return True
    return False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_traced_by_foreign_backend() -> bool:
    """Asked by traced code: which backend the graph is for. Dynamo keeps graphs of different backends apart.

    Raises `ExportedModuleError` where something else than Dynamo traces, or Dynamo for `torch.export`.
    """
    backend = backend_that_traces()
    if backend is None or torch.compiler.is_exporting():
        raise ExportedModuleError
    return is_foreign(backend)


@never_compile_alone
def is_in_foreign_region() -> bool:
    """Asked by eager code: whether what it calls will be compiled by another backend than ours."""
    return is_foreign(backend_of_region())


_has_warned = False  # once in a process: each unit would


@torch.compiler.disable
def warn_of_foreign_region() -> None:
    """Say once that communication is not in the graphs."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "torch.compile: expected backend=overlap_fsdp for a sharded model, found another backend. It compiles what "
            "computes between the units' hooks, which communicate as without a compiler. For communication in the "
            "graph use torch.compile(model, backend=overlap_fsdp).",
            ForeignBackendWarning,
            stacklevel=2,
        )
