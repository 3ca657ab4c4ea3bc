"""Weights that leave a compiled function: in what it returns or stores, or in a local that lives over a graph break.

The compiler hands out the object that it was given, which is a placeholder without memory. Which ones leave is known
only when all is traced. So the function is then traced once more, and each read in it gives a view, which is a result
of the graph: gathered where it leaves, with its gradient, and of no consequence where it does not.
"""

from __future__ import annotations

import re
import types
import weakref

import torch

from fsdp_passes._torch_compat import never_compile_alone, retrace, sources_behind_graph, traced_code

# How Dynamo writes `module.__dict__["_fsdp_parameters"][name].placeholder`, which `module.<name>` reads.
_PLACEHOLDER = re.compile(r"_fsdp_parameters.*\.placeholder$")

_hands_out: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@never_compile_alone
def are_reads_views() -> bool:
    """Asked by traced code: whether the function that is traced hands out weights."""
    return traced_code() in _hands_out


def trace_handed_out_weights_as_views() -> None:
    """Asked by the backend before it compiles: trace again if the function hands out a placeholder."""
    code = traced_code()
    if code is None or code in _hands_out or not any(map(_PLACEHOLDER.search, sources_behind_graph())):
        return
    _hands_out.add(code)
    retrace("a weight of a sharded module leaves the compiled function")
