"""What `fully_shard` is going to do: everything is checked here before anything is changed."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_passes._torch_compat import join_meshes, local_tensor
from fsdp_passes.errors import (
    AlreadyShardedError,
    CapturedParameterError,
    ForeignDTensorError,
    IntegerParameterError,
    MeshError,
    NoForwardError,
    NoProcessGroupError,
    OptionValueError,
    ShardPlacementError,
    UnitPatternError,
    UnsupportedArgumentError,
    UnsupportedParameterError,
    WrapOrderError,
)
from fsdp_passes.mesh import num_shards
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.unit import unit_of

# On an original parameter: the FsdpParameter that took its place, for modules that still hold the original.
REPLACED_BY = "_fsdp_replaced_by"


def check_arguments(module: Any, mp_policy: Any, ignored_params: Any, offload_policy: Any, dp_mesh_dims: Any) -> None:
    """Raise for arguments of another kind; some of these would be passed over in silence, a name among the ignored
    parameters for instance."""
    if not isinstance(module, nn.Module):
        raise OptionValueError("module", module, "an nn.Module; several become units of one call through units=[...]")
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise OptionValueError("mp_policy", mp_policy, "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...)")
    for param in ignored_params or ():
        if not isinstance(param, nn.Parameter):
            raise OptionValueError("ignored_params", param, "the nn.Parameters themselves")
    if offload_policy is not None and type(offload_policy) not in (OffloadPolicy, CPUOffloadPolicy):
        instead = "Pass CPUOffloadPolicy(), for shards on the CPU, or leave it out: parameters stay on the device."
        raise UnsupportedArgumentError("offload_policy", offload_policy, instead)
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
    if not isinstance(mesh, DeviceMesh):
        raise OptionValueError("mesh", mesh, "a DeviceMesh; init_device_mesh makes one")
    if mesh.ndim > 2:
        raise MeshError(f"one with {mesh.ndim} dimensions, {mesh.mesh_dim_names or tuple(mesh.shape)}")
    return mesh


def check_reshard(reshard_after_forward: Any, mesh: DeviceMesh) -> tuple[bool | None, int]:
    """Whether to reshard after the forward, and over how many ranks; 0 for all of them."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, 0
    size = num_shards(mesh)
    is_divisor = isinstance(reshard_after_forward, int) and reshard_after_forward >= 1
    if not is_divisor or size % reshard_after_forward:
        expected = f"True, False, None, or a divisor of {size}, the ranks over which parameters are sharded"
        raise OptionValueError("reshard_after_forward", reshard_after_forward, expected)
    if reshard_after_forward == 1:
        return False, 0  # each rank keeps all of it
    return True, reshard_after_forward % size


def unit_patterns(units: Any) -> list[str]:
    """The argument `units` of `fully_shard` as a list."""
    patterns = list(units or ()) if isinstance(units, Iterable | None) and not isinstance(units, str) else [units]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise OptionValueError("units", pattern, "a pattern of module paths, or several")
    return patterns


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


class Planned(NamedTuple):
    """A parameter that a unit will own: every reference to it, its path in the unit, and along which dimension it will
    be sharded."""

    param: nn.Parameter
    references: list[tuple[nn.Module, str]]
    path: str
    shard_dim: int


Named = list[Planned]
PlacementFunction = Callable[[nn.Parameter], Any]


def plan_units(
    targets: list[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    ignored: set[nn.Parameter],
    placement_fn: PlacementFunction | None = None,
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
                plan[index[param]].references.append((owner, name))
                continue
            ours: FsdpParameter | None = owner.__dict__.get("_fsdp_parameters", {}).get(name)
            if ours is not None:
                if any(child is target for child in ours.unit.module.modules()):
                    raise WrapOrderError(target_name, path, ours.unit.display_name)
                continue
            full_path = f"{target_path}.{path}" if target_path else path
            _check_parameter(param, owner, full_path, mesh)
            index[param] = len(plan)
            dim = 0 if placement_fn is None else _shard_dim(param, full_path, mesh, placement_fn)
            plan.append(Planned(param, [(owner, name)], path, dim))
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


def _check_parameter(param: nn.Parameter, owner: nn.Module, path: str, mesh: DeviceMesh) -> None:
    if isinstance(param, DTensor) and not _is_tensor_parallel(param, mesh):
        raise ForeignDTensorError(path, f"mesh {param.device_mesh} as {param.placements}", str(mesh))
    if param.requires_grad and not (param.is_floating_point() or param.is_complex()):
        raise IntegerParameterError(path, param.dtype)
    if param.numel() == 0:
        raise UnsupportedParameterError(path, f"the empty shape {tuple(param.shape)}", "Pass it in ignored_params.")
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
        found = "an embedding with sparse=True, whose gradient has only some rows"
        raise UnsupportedParameterError(path, found, "Set sparse=False, or pass it in ignored_params.")


def _is_tensor_parallel(param: DTensor, mesh: DeviceMesh) -> bool:
    """Whether the DTensor's mesh and `mesh` are different dimensions of one mesh, so that parts can be sharded."""
    names, others = mesh.mesh_dim_names or (), param.device_mesh.mesh_dim_names or ()
    if param.dim() == 0 or not names or not others or set(names) & set(others):
        return False
    if not all(placement.is_replicate() or isinstance(placement, Shard) for placement in param.placements):
        return False
    try:
        join_meshes(mesh, param.device_mesh)
    except (RuntimeError, ValueError, AssertionError):  # dimensions of different meshes
        return False
    return True


def _shard_dim(param: nn.Parameter, path: str, mesh: DeviceMesh, placement_fn: PlacementFunction) -> int:
    """The dimension that the user's function names. Along another one than 0, ranks have equal parts."""
    placement, shape = placement_fn(param), tuple(local_shape(param))
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ShardPlacementError(path, repr(placement), "None or Shard(dim)")
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(len(shape), 1):
        raise ShardPlacementError(path, repr(placement), f"a dimension of its shape {shape}")
    if dim and shape[dim] % num_shards(mesh):
        expected = f"a dimension of its shape {shape} that {num_shards(mesh)} ranks divide, or dimension 0"
        raise ShardPlacementError(path, repr(placement), expected)
    return dim


def local_shape(param: torch.Tensor) -> torch.Size:
    """Shape of what this rank has of a parameter: with tensor parallelism, a part."""
    return local_tensor(param).shape if isinstance(param, DTensor) else param.shape


def _check_captured(target: nn.Module, plan: Named) -> None:
    """Find lists, tuples and dicts of parameters in module attributes (nn.LSTM keeps its flat weights so)."""
    ids = {id(planned.param): planned.path for planned in plan}
    for prefix, child in target.named_modules():
        for attribute, value in child.__dict__.items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for item in items:
                if isinstance(item, nn.Parameter) and id(item) in ids:
                    raise CapturedParameterError(ids[id(item)], f"{prefix or 'the module'}", attribute)
