"""Which copies of parameters are kept for eager code that reads them outside of their unit, and who has written one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp_passes._torch_compat import replace_local_tensor
from fsdp_passes.errors import MutatedParameterError
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.unit import FsdpUnit

# Who reads one unit after the other (the norm of every weight) must not make all of them whole at once; two are kept
# for who compares neighbours.
MOST_UNITS = 2


class _Watched(NamedTuple):
    """A copy, until nobody has it, and a tensor without memory that shares its version counter."""

    param: FsdpParameter
    copy: weakref.ref[torch.Tensor]
    version: torch.Tensor


class KeptCopies:
    """Copies of the parameters of the units that were read last, and what knows of writes into these and into earlier
    ones, which their readers may have still."""

    def __init__(self) -> None:
        self._of_units: dict[FsdpUnit, Mapping[FsdpParameter, tuple[Any, torch.Tensor]]] = {}  # who was read last, last
        self._watched: list[_Watched] = []

    def __len__(self) -> int:
        """How many units have copies."""
        return len(self._of_units)

    def __bool__(self) -> bool:
        return bool(self._of_units or self._watched)

    def of(self, param: FsdpParameter) -> torch.Tensor | None:
        """The copy of `param`; None if there is none, or the shard was written, frozen or unfrozen since."""
        key, copy = self._of_units.get(param.unit, {}).get(param, (None, None))
        if copy is None or key != _key(param):
            return None
        self._of_units[param.unit] = self._of_units.pop(param.unit)
        return copy

    def keep(self, unit: FsdpUnit, copies: Mapping[FsdpParameter, torch.Tensor]) -> None:
        """Keep the copies of all parameters of `unit`, and forget those of the unit that was read longest ago.

        Raises `MutatedParameterError` if somebody has written into a copy and has given it up.
        """
        self._of_units.pop(unit, None)
        while len(self._of_units) >= MOST_UNITS:
            del self._of_units[next(iter(self._of_units))]
        self._of_units[unit] = {param: (_key(param), copy) for param, copy in copies.items()}
        given_up = [watched for watched in self._watched if watched.copy() is None]
        self._watched = [watched for watched in self._watched if watched.copy() is not None]
        self._watched += [_Watched(param, weakref.ref(copy), _version_of(copy)) for param, copy in copies.items()]
        _raise_if_written(given_up)

    def check_unwritten(self) -> None:
        """Raise `MutatedParameterError` if somebody has written into a copy, once for each write."""
        watched, self._watched = self._watched, [watched for watched in self._watched if not watched.version._version]
        _raise_if_written(watched)

    def drop(self) -> None:
        """Forget all. Raises `MutatedParameterError` if somebody has written into a copy."""
        watched = self._watched
        self.clear()
        _raise_if_written(watched)

    def clear(self) -> None:
        """Forget all, also writes: an exception says more."""
        self._of_units.clear()
        self._watched = []


def _key(param: FsdpParameter) -> Any:
    return param.values_version, param.sharded_param.requires_grad


def _version_of(copy: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of `copy`."""
    alias = copy.detach()
    empty = torch.empty(0, dtype=copy.dtype, device=copy.device)
    if isinstance(alias, DTensor):
        replace_local_tensor(alias, empty)
    else:
        alias.data = empty
    return alias


def _raise_if_written(watched: list[_Watched]) -> None:
    for param, _, version in watched:
        if version._version:
            raise MutatedParameterError(param.qualified_name)
