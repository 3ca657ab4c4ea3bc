"""What `fully_shard` is going to do: everything is checked here before anything is changed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_passes.errors import (
    AlreadyShardedError,
    CapturedParameterError,
    ForeignDTensorError,
    IntegerParameterError,
    MeshError,
    NoForwardError,
    NoProcessGroupError,
    UnitPatternError,
    UnsupportedArgumentError,
    UnsupportedParameterError,
    WrapOrderError,
)
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.unit import unit_of

# On an original parameter: the FsdpParameter that took its place, for modules that still hold the original.
REPLACED_BY = "_fsdp_replaced_by"


def check_arguments(
    reshard_after_forward: Any, shard_placement_fn: Any, offload_policy: Any, dp_mesh_dims: Any
) -> None:
    if reshard_after_forward not in (None, True, False) or type(reshard_after_forward) is int:
        raise UnsupportedArgumentError("reshard_after_forward", reshard_after_forward, "Use True, False or None.")
    if shard_placement_fn is not None:
        raise UnsupportedArgumentError(
            "shard_placement_fn", shard_placement_fn, "Leave it out: parameters are sharded along dimension 0."
        )
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise UnsupportedArgumentError("offload_policy", offload_policy, "Leave it out: parameters stay on the device.")
    if dp_mesh_dims is not None:
        raise UnsupportedArgumentError(
            "dp_mesh_dims",
            dp_mesh_dims,
            "Pass the dimensions to use as mesh: mesh['shard'] or mesh['replicate', 'shard'].",
        )


def check_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise NoProcessGroupError
    if mesh is None:
        # A group may have a backend for each device type ("cpu:gloo,cuda:nccl").
        has_nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        device_type = "cuda" if has_nccl else "cpu"
        return init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.ndim > 2:
        raise MeshError(f"one with {mesh.ndim} dimensions, {mesh.mesh_dim_names or tuple(mesh.shape)}")
    return mesh


def match_units(module: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Paths and modules that match any pattern, innermost first and otherwise in module order.

    A pattern with wildcards passes over containers, unless it matches nothing else.
    """
    paths = [(path, child) for path, child in module.named_modules() if path]
    matched: dict[nn.Module, str] = {}
    for pattern in patterns:
        hits = [
            (path, child)
            for path, child in paths
            if _path_matches(path.split("."), pattern.split(".")) and any(True for _ in child.parameters())
        ]
        if not hits:
            available = [path for path, child in paths if any(True for _ in child.parameters())]
            raise UnitPatternError(pattern, available)
        if any(wildcard in pattern for wildcard in "*?["):
            hits = [(path, child) for path, child in hits if not is_container(child)] or hits
        matched.update({child: path for path, child in hits})
    innermost_first = sorted(matched.items(), key=lambda item: -item[1].count("."))
    return [(path, child) for child, path in innermost_first]


def is_container(module: nn.Module) -> bool:
    """Whether `module` only holds others, or parameters, and is never called: hooks on it would not run."""
    kinds = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return isinstance(module, kinds) and type(module).forward is nn.Module.forward


def _path_matches(path: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_path_matches(path[i:], pattern[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _path_matches(path[1:], pattern[1:])


Named = list[tuple[nn.Parameter, list[tuple[nn.Module, str]], str]]


def plan_units(
    targets: list[tuple[str, nn.Module]], mesh: DeviceMesh, ignored: set[nn.Parameter]
) -> list[tuple[nn.Module, Named]]:
    """For each unit to make, the parameters that it will own, with every reference to each. Checks all of them."""
    taken: set[nn.Parameter] = set()
    plans = []
    for target_path, target in targets:
        target_name = f"{target_path} ({class_name(target)})" if target_path else class_name(target)
        if unit_of(target) is not None:
            raise AlreadyShardedError(target_name)
        if is_container(target):
            raise NoForwardError(target_name)
        plan: Named = []
        index: dict[nn.Parameter, int] = {}
        for owner, name, path in parameters_below(target):
            param = owner._parameters[name]
            assert param is not None
            if param in ignored or param in taken or getattr(param, REPLACED_BY, None) is not None:
                continue
            if param in index:
                plan[index[param]][1].append((owner, name))
                continue
            ours: FsdpParameter | None = owner.__dict__.get("_fsdp_parameters", {}).get(name)
            if ours is not None:
                if any(child is target for child in ours.unit.module.modules()):
                    raise WrapOrderError(target_name, path, ours.unit.display_name)
                continue
            _check_parameter(param, f"{target_path}.{path}" if target_path else path, mesh)
            index[param] = len(plan)
            plan.append((param, [(owner, name)], path))
        _check_captured(target, plan)
        taken.update(index)
        plans.append((target, plan))
    return plans


def parameters_below(module: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, child in module.named_modules():
        for name, param in child._parameters.items():
            if param is not None:
                yield child, name, f"{prefix}.{name}" if prefix else name


def class_name(module: nn.Module) -> str:
    """The user's class, also when the module already has a subclass of ours."""
    return str(type(module).__dict__.get("_fsdp_original_class", type(module)).__name__)


def _check_parameter(param: nn.Parameter, path: str, mesh: DeviceMesh) -> None:
    if isinstance(param, DTensor):
        raise ForeignDTensorError(path, f"mesh {param.device_mesh} as {param.placements}", str(mesh))
    if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
        raise IntegerParameterError(path, param.dtype)
    if param.numel() == 0:
        raise UnsupportedParameterError(path, f"the empty shape {tuple(param.shape)}", "Pass it in ignored_params.")


def _check_captured(target: nn.Module, plan: Named) -> None:
    """Find lists, tuples and dicts of parameters in module attributes (nn.LSTM keeps its flat weights so)."""
    ids = {id(param): path for param, _, path in plan}
    for prefix, child in target.named_modules():
        for attribute, value in child.__dict__.items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for item in items:
                if isinstance(item, nn.Parameter) and id(item) in ids:
                    raise CapturedParameterError(ids[id(item)], f"{prefix or 'the module'}", attribute)
