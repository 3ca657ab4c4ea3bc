"""TARGET on the command line: `module:factory`, a function that gives a sharded model and its arguments."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_passes._torch_compat import init_fake_process_group
from fsdp_passes.errors import FsdpError
from fsdp_passes.unit import unit_of


class UserMistake(Exception):
    """What a user of the command line got wrong, as one line."""


def one_line(error: BaseException) -> str:
    """The first line of an error's message without its full stop, behind its class."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__


@contextlib.contextmanager
def loaded(target: str, world_size: int) -> Iterator[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """The target's model, arguments and keyword arguments, in a fake process group of `world_size` ranks.

    Raises `UserMistake` for a target that does not exist, raises, or gives something else.
    """
    if world_size < 1:
        raise UserMistake(
            f"--world-size: expected at least 1 rank, found {world_size}. Give the number of ranks to shard over"
        )
    factory = find_factory(target)
    if dist.is_initialized():
        raise UserMistake("expected no process group yet, found one. Start this command without torchrun")
    init_fake_process_group(world_size)
    try:
        yield _call(target, factory)
    finally:
        dist.destroy_process_group()


def find_factory(target: str) -> Any:
    """The function that `module:factory` names."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise UserMistake(f"{target}: expected module:factory, for example examples.models:gpt_small")
    if module_name.endswith(".py"):
        dotted = ".".join(part for part in module_name.removesuffix(".py").split("/") if part not in ("", "."))
        raise UserMistake(
            f"{target}: expected the name of a module, found that of a file. Did you mean {dotted}:{name}?"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise UserMistake(
                f"{target}: expected a module '{module_name}' in the current folder or on PYTHONPATH, found none"
            ) from None
        raise UserMistake(f"{target}: importing '{module_name}' raised {one_line(error)}. Install it") from error
    except SystemExit as error:  # a script that reads its arguments when it is imported
        raise UserMistake(
            f"{target}: importing '{module_name}' ended the program ({one_line(error)}). Put what a script does behind "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise UserMistake(f"{target}: importing '{module_name}' raised {one_line(error)}. Mend the module") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module_name and not key.startswith("_")
        ]
        close = difflib.get_close_matches(name, functions, n=1, cutoff=0.5)
        hint = f". Did you mean {module_name}:{close[0]}?" if close else f". It has: {', '.join(functions[:8])}"
        raise UserMistake(f"{target}: expected a function '{name}' in '{module_name}', found none{hint}")
    return factory


def _call(target: str, factory: Any) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    try:
        made = factory()
    except Exception as error:
        raise UserMistake(f"{target}: the factory raised {one_line(error)}. --traceback shows where") from error
    except SystemExit as error:
        raise UserMistake(
            f"{target}: the factory ended the program ({one_line(error)}). Let it return (model, args)"
        ) from error
    expected = "expected (model, args) or (model, args, kwargs) from the factory"
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UserMistake(f"{target}: {expected}, found {_shape(made)}")
    model, args, kwargs = (*made, {})[:3]
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise UserMistake(f"{target}: {expected} with args a tuple and kwargs a dict, found {_shape(made)}")
    if all(unit_of(module) is None for module in model.modules()):
        raise UserMistake(
            f"{target}: expected a model that fully_shard() was called on, found {type(model).__name__} without a "
            "sharded parameter. Call fully_shard() in the factory"
        )
    return model, tuple(args), kwargs


def _shape(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return type(made).__name__


def as_mistake(error: BaseException, target: str) -> UserMistake:
    """An error of the library or of the traced model as one line."""
    if isinstance(error, FsdpError):
        return UserMistake(f"{target}: {' '.join(str(error).split())}")
    # What Dynamo says first of an error in an operator is that there was one; what it was stands at the chain's end.
    cause: BaseException = error
    while (earlier := cause.__cause__ or cause.__context__) is not None:
        cause = earlier
    text = one_line(error) if cause is error else f"{one_line(error)} ({one_line(cause)})"
    return UserMistake(f"{target}: tracing the model raised {text}. --traceback shows where")
