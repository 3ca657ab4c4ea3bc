"""Optimizers that were made before `fully_shard`: they hold parameters that nothing computes with any more."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_passes._torch_compat import never_compile_alone
from fsdp_passes.errors import StaleOptimizerError
from fsdp_passes.sharding_plan import REPLACED_BY

_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def check_optimizers() -> None:
    """From now on let the next step of an optimizer raise `StaleOptimizerError` if it holds replaced parameters."""
    _checked.clear()
    _watch_steps()


@functools.cache  # once in a process
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_first_step)


@never_compile_alone
def _check_first_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or optimizer in _checked:
        return
    _checked.add(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # With a gradient it belongs to another module too, which is not sharded and trains it.
    replaced = [param for param in params if param.grad is None and hasattr(param, REPLACED_BY)]
    if replaced:
        name = getattr(replaced[0], REPLACED_BY).qualified_name
        raise StaleOptimizerError(type(optimizer).__name__, len(replaced), len(params), name)
