"""The arguments of the library's operators by name, whether they come from a call or from a graph's node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx


class Unshard(NamedTuple):
    """Of `ops.unshard`, which says what they mean."""

    shard: Any
    label: Any
    unit: int
    rows: int
    world_size: int
    group_name: str
    reduce_group_name: str
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard: bool
    divide_factor: float | None = None
    whole: Any = None
    partial: Any = None
    num_replicas: int = 1
    replica_group_name: str = ""
    kept_world_size: int = 0
    kept_group_name: str = ""
    shard_dim: int = 0
    device: torch.device | None = None
    pinned: bool = False

    @classmethod
    def of(cls, node: fx.Node) -> Unshard:
        return cls(*node.args, **node.kwargs)  # type: ignore[arg-type]


class ReduceGrad(NamedTuple):
    """Of `ops.reduce_grad`."""

    grad: Any
    label: Any
    unit: int
    world_size: int
    group_name: str
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype
    divide_factor: float | None = None
    shard_dim: int = 0
    home: str = ""

    @classmethod
    def of(cls, node: fx.Node) -> ReduceGrad:
        return cls(*node.args, **node.kwargs)  # type: ignore[arg-type]


class ReduceReplicas(NamedTuple):
    """Of `ops.reduce_replicas`."""

    grad: Any
    label: Any
    unit: int
    num_replicas: int
    group_name: str
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype
    divide_factor: float | None = None
    home: str = ""

    @classmethod
    def of(cls, node: fx.Node) -> ReduceReplicas:
        return cls(*node.args, **node.kwargs)  # type: ignore[arg-type]
