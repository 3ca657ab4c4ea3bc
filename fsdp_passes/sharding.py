"""`fully_shard`: parameters become shards, modules become units."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_passes._torch_compat import never_compile_alone
from fsdp_passes.context import FsdpContext
from fsdp_passes.debug import check_eager_read, debug_flags
from fsdp_passes.eager import install_hooks, read_eagerly
from fsdp_passes.errors import PickledModuleError, ReplacedParameterError
from fsdp_passes.foreign import WHY_FOREIGN_GRAPHS_BREAK, is_traced_by_foreign_backend
from fsdp_passes.fsdp_module import FsdpModule
from fsdp_passes.mesh import shard_subgroup
from fsdp_passes.offload import Home
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.scalar import FsdpScalar
from fsdp_passes.sharding_plan import (
    REPLACED_BY,
    Named,
    check_arguments,
    check_mesh,
    check_reshard,
    match_units,
    parameters_below,
    plan_units,
    unit_patterns,
)
from fsdp_passes.streams import warn_of_one_queue
from fsdp_passes.unit import FsdpUnit, unit_of
from fsdp_passes.watchdog import watch_of


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    units: Sequence[str] | str | None = None,
    dp_mesh_dims: Any = None,
) -> nn.Module:
    """Shard the parameters of `module` over `mesh`, as one unit.

    A unit owns every parameter below its module that no nested unit owns; its parameters are gathered together. Call it
    on the innermost modules first and on the root last. Parameters become `DTensor(Shard(0))`.

    Args:
        module: changed in place. Modules with parameters change their class to a subclass.
        mesh: one dimension, or two: (replicas, shards). Replicas hold equal shards; `fully_shard` sends them those of
            the first. By default all ranks in one dimension.
        reshard_after_forward: whether gathered parameters are dropped between forward and backward. None: yes, except
            for the root. A number n, which divides the ranks over which parameters are sharded: each of n neighbouring
            ranks keeps a part, and the backward gathers over these alone.
        shard_placement_fn: called with each parameter; returns `Shard(dim)`, or None for dimension 0. Along another
            dimension than 0 it must be divisible by the ranks, and gathers and reductions make a copy more.
        mp_policy: `param_dtype` is the dtype of gathered parameters (cast before the gather), `reduce_dtype` that of
            the gradient reduction. The gradient has the parameter's own dtype.
        offload_policy: `CPUOffloadPolicy(pin_memory=True)`: shards, their gradients and so the optimizer's state
            are on the CPU, where it steps; buffers and what is gathered are on the mesh's device. By default all is.
        ignored_params: parameters to leave as they are.
        units: patterns of module paths, or one; each matching module becomes a unit first, the innermost first. "*"
            matches within one part of a path, "**" any number of parts. Patterns with wildcards pass over containers
            without a forward (`nn.ModuleList`).
        dp_mesh_dims: not supported yet.

    Returns:
        `module`.

    Raises:
        An error of `fsdp_passes.errors`; the model is then as it was before the call.
    """
    check_arguments(module, mp_policy, ignored_params, offload_policy, dp_mesh_dims)
    debug_flags()  # a wrong one raises here, and not when the first unit is released
    mesh = check_mesh(mesh)
    warn_of_one_queue(mesh.device_type)
    reshard, kept_world_size = check_reshard(reshard_after_forward, mesh)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    ignored = set(ignored_params or ())
    targets = [*match_units(module, unit_patterns(units)), ("", module)]
    plans = plan_units(targets, mesh, ignored, shard_placement_fn)
    kept_group = shard_subgroup(mesh, kept_world_size) if kept_world_size else None
    home = Home.of(offload_policy, mesh)
    for target, params in plans:
        _make_unit(target, params, mesh, mp_policy, reshard, kept_group, ignored, home)
    return module


# ---- changes ---------------------------------------------------------------------------------------------------------


def _make_unit(
    module: nn.Module,
    plan: Named,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
    kept_group: dist.ProcessGroup | None,
    ignored: set[nn.Parameter],
    home: Home | None,
) -> None:
    context = FsdpContext()
    unit = FsdpUnit(module, mesh, mp_policy, reshard_after_forward, [], context, kept_group=kept_group)
    if mesh.device_type == "cuda":
        # Where whole parameters stay on the CPU, they need no room on the device even one unit at a time.
        _move_to_device(module, plan if home is None else [p for p in plan if p.param.dim() == 0], ignored)
    for param, references, path, shard_dim in plan:
        fsdp_param: FsdpParameter | FsdpScalar
        if param.dim() == 0:
            unit.scalars.append(fsdp_param := FsdpScalar(param, path, mesh, mp_policy))
        else:
            unit.params.append(fsdp_param := FsdpParameter(param, path, mesh, mp_policy, shard_dim, home))
        fsdp_param.unit = unit
        for owner, name in references:
            _refer(owner, name, fsdp_param)
        setattr(param, REPLACED_BY, fsdp_param)
    # A weight that is tied to a parameter of a nested unit: that unit owns it, and this reference follows.
    for owner, name, _ in list(parameters_below(module)):
        replaced_by = getattr(owner._parameters[name], REPLACED_BY, None)
        if replaced_by is not None:
            _refer(owner, name, replaced_by)
    # A tied weight, or a whole module that two units share: its owner is gathered with this unit too.
    inside = set(module.modules())
    for owner, name, _ in parameters_below(module):
        ours: FsdpParameter | None = owner.__dict__.get("_fsdp_parameters", {}).get(name)
        if ours is not None and ours.unit is not unit and ours.unit not in unit.borrows_from:
            is_nested = ours.unit.module in inside
            if not is_nested or owner not in set(ours.unit.module.modules()):
                unit.borrows_from.append(ours.unit)
    unit.sync_replicas()  # ranks may have drawn their values from seeds of their own
    module.__dict__["_fsdp_unit"] = unit
    _set_class(module)
    install_hooks(module)
    for prefix, child in module.named_modules():
        nested = unit_of(child)
        if nested is None or nested is unit:
            continue
        if nested.context is not context:
            context.adopt(nested.context)
        nested.rename(prefix, is_root=False)
    context.units.append(unit)
    for first in unit.params[:1]:
        watch_of(first.group_name)  # a rank that waits for this one hears from it before its first collective too


def _move_to_device(module: nn.Module, plan: Named, ignored: set[nn.Parameter]) -> None:
    """As FSDP2 does: CPU parameters and buffers of this unit go to the current CUDA device; meta ones stay."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = (
        [planned.param for planned in plan] + list(module.buffers()) + [p for p in module.parameters() if p in ignored]
    )
    for tensor in tensors:
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.to(device)


def _refer(owner: nn.Module, name: str, fsdp_param: FsdpParameter | FsdpScalar) -> None:
    """Let `owner.<name>` be `fsdp_param`."""
    fsdp_param.references.append((owner, name))
    table = owner.__dict__.setdefault("_fsdp_parameters", {})
    table[name] = fsdp_param
    owner._parameters[name] = fsdp_param.adopted_param
    _set_class(owner)


def _set_class(owner: nn.Module) -> None:
    """Give `owner` the subclass that its parameters and its being a unit or not ask for."""
    base = type(owner).__dict__.get("_fsdp_original_class", type(owner))
    table = owner.__dict__.get("_fsdp_parameters", {})
    owner.__class__ = _sharded_class(base, tuple(sorted(table)), unit_of(owner) is not None)


@functools.cache
def _sharded_class(original: type[nn.Module], names: tuple[str, ...], is_unit: bool) -> type[nn.Module]:
    """The subclass of `original` whose parameters `names` show the face that the caller needs; units gain methods.

    One class per original class and names: Dynamo's guards check the class, so a class per module would cost a
    compilation per layer.
    """
    namespace: dict[str, Any] = {name: property(functools.partial(_face, name)) for name in names}
    namespace["_fsdp_original_class"] = original
    namespace["__module__"] = original.__module__

    # What may put other tensors in the parameters' place: `to_empty`, `.to()`, `load_state_dict(assign=True)`. The
    # compiler traces placeholders, which have to be on the same device before it looks.
    def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        original._apply(module, fn, recurse)
        _adopt_replaced(module)
        return module

    def _load_from_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before = dict(module._parameters)
        original._load_from_state_dict(module, *args, **kwargs)
        try:
            _adopt_replaced(module)
        except ReplacedParameterError:  # by `load_state_dict(assign=True)`
            module._parameters.update(before)
            raise

    def __deepcopy__(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if hasattr(original, "__deepcopy__"):
            return original.__deepcopy__(module, memo)  # type: ignore[no-any-return]
        new = type(module).__new__(type(module))
        memo[id(module)] = new
        getstate = getattr(module, "__getstate__", lambda: module.__dict__)  # Python 3.10 has no default
        new.__setstate__(copy.deepcopy(getstate(), memo))
        return new

    def __reduce_ex__(module: nn.Module, protocol: Any) -> Any:
        raise PickledModuleError(original.__name__)

    namespace.update(__deepcopy__=__deepcopy__, __reduce_ex__=__reduce_ex__)
    if names:
        namespace["_apply"] = _apply
        namespace["_load_from_state_dict"] = _load_from_state_dict
    bases = (FsdpModule, original) if is_unit else (original,)
    return type(f"Fsdp{original.__name__}", bases, namespace)


def _adopt_replaced(module: nn.Module) -> None:
    for param in module.__dict__["_fsdp_parameters"].values():
        param.shard()


@never_compile_alone
def _face(name: str, module: nn.Module) -> torch.Tensor:
    """What `module.<name>` gives: the placeholder to a compiler, the gathered parameter to an eager forward, and the
    sharded DTensor to everybody else."""
    param: FsdpParameter | FsdpScalar = module.__dict__["_fsdp_parameters"][name]
    if isinstance(param, FsdpScalar):
        return param.face() if torch.compiler.is_compiling() else param.eager_face()
    if torch.compiler.is_compiling():
        if is_traced_by_foreign_backend() and param.placeholder.untyped_storage().size() == 0:
            return read_outside_graph(module, name)
        return param.traced_face()
    read = read_eagerly(param)
    if read is not None:
        return read
    if param.unit.pending_gather is not None:
        check_eager_read(param.qualified_name, param.unit.display_name)
    sharded = module._parameters[name]
    assert sharded is not None
    return sharded


@torch.compiler.disable(reason=WHY_FOREIGN_GRAPHS_BREAK)  # type: ignore[untyped-decorator]
def read_outside_graph(module: nn.Module, name: str) -> torch.Tensor:
    """The face that eager code sees, for a backend that would compute with an empty placeholder."""
    return _face(name, module)
