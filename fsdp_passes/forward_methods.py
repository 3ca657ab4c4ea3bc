"""Methods other than `forward` that run a sharded module: `encode`, `generate`."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from fsdp_passes.context import Phase
from fsdp_passes.eager import post_forward, pre_forward
from fsdp_passes.unit import FsdpUnit, unit_of


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of `module` gather and release as its forward does, in the fallback and in compiled code.

    Called inside the module's forward or another such method it changes nothing, nor does a forward inside of it: the
    outermost gathers and releases. Inputs and outputs are cast as those of a forward.

    Args:
        module: what `fully_shard` was called on. Any other module stays as it is, as with FSDP2.
        method_name: of a method of the module's class, or of a function that the module holds under that name.

    Raises:
        AttributeError: the module has no such method.
    """
    method = getattr(module, method_name)
    if unit_of(module) is None:
        return
    # Not bound to this module: a deepcopy calls it, too.
    function = method.__func__ if isinstance(method, types.MethodType) and method.__self__ is module else None

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        call = method if function is None else functools.partial(function, self)
        if unit is None or _is_running(unit):
            return call(*args, **kwargs)
        inputs = pre_forward(self, args, kwargs)
        if inputs is not None:
            args, kwargs = inputs
        if torch.compiler.is_compiling():
            return post_forward(self, args, call(*args, **kwargs))
        output, unit.is_in_method = None, True
        try:
            output = call(*args, **kwargs)
        finally:  # also when it raised, as torch calls the hook
            unit.is_in_method = False
            output = post_forward(self, args, output)
        return output

    setattr(module, method_name, types.MethodType(run, module))


def _is_running(unit: FsdpUnit) -> bool:
    if torch.compiler.is_compiling():
        return unit.is_in_compiled_forward
    return unit.is_in_method or unit.is_in_compiled_forward or unit.context.phase(unit) is Phase.FORWARD
