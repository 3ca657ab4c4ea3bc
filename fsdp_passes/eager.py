"""The eager fallback: a sharded model that is not compiled gathers, overlaps and reduces through hooks.

It shares `FsdpContext`, the process groups and the region names with the compiled path. In compiled code the hooks only
cast inputs and outputs, which the compiler traces.

    pre_forward(i):   start(i) unless prefetched ; start(i + 1) ; wait(i)
    post_forward(i):  queue the release of i
    pre_backward(i):  start(i) unless prefetched ; start(i - 1) ; start queued reductions ; wait(i)
    post_backward(i): pack gradients ; queue the release of i ; queue the reduction of i
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_passes._torch_compat import (
    inside_transforms,
    is_in_backward,
    is_in_compiled_region,
    is_tracing_higher_order_op,
    local_tensor,
    never_compile_alone,
    storage_address,
    tangents_of,
    tree_leaves,
    tree_map_only,
)
from fsdp_passes.context import FsdpContext, Phase
from fsdp_passes.copies import check_copies, copy_for_reader, copy_of
from fsdp_passes.eager_backward import announce_backward, pre_backward, unit_has_input_gradients, watch_gradient
from fsdp_passes.foreign import (
    WHY_FOREIGN_GRAPHS_BREAK,
    is_in_foreign_region,
    is_traced_by_foreign_backend,
    warn_of_foreign_region,
)
from fsdp_passes.gathering import (
    finish_gather,
    keep_parts,
    release,
    release_kept,
    start_ahead,
    start_gather,
    undo_interrupted,
)
from fsdp_passes.parameter import FsdpParameter, fsdp_parameter_of
from fsdp_passes.regions import (
    FORWARD_COMPUTE,
    close_regions_above,
    num_open_regions,
    pop_region,
    push_region,
    region_name,
)
from fsdp_passes.unit import FsdpUnit, unit_of


def install_hooks(module: nn.Module) -> None:
    """Let the unit of `module` gather and release around its forward and backward."""
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)


# ---- forward ---------------------------------------------------------------------------------------------------------


@never_compile_alone
def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs ahead of a unit's forward. Returns its inputs as a pair, or None where they stay as they are."""
    unit = unit_of(module)
    assert unit is not None
    if torch.compiler.is_compiling():
        if is_traced_by_foreign_backend():
            _begin_forward(unit, (args, kwargs))
        elif not is_tracing_higher_order_op():
            unit.is_in_compiled_forward = True  # the compiler replays this at a graph break, before eager code runs
    elif is_in_compiled_region() and not is_in_foreign_region():
        if unit.context.copies:
            check_copies(unit.context)
        unit.may_run_eagerly = True
    elif not unit.is_in_method:
        if is_in_compiled_region():
            warn_of_foreign_region()
        _begin_forward(unit, (args, kwargs))
    dtype = unit.mp_policy.param_dtype
    if dtype is None or not unit.mp_policy.cast_forward_inputs:
        return None
    return _cast(args, dtype), _cast(kwargs, dtype)


@torch.compiler.disable(reason=WHY_FOREIGN_GRAPHS_BREAK)  # type: ignore[untyped-decorator]
def _begin_forward(unit: FsdpUnit, inputs: Any) -> None:
    _gather_for_forward(unit)
    _watch_inputs(unit, inputs)


@torch.compiler.disable
def _gather_for_forward(unit: FsdpUnit) -> None:
    context = unit.context
    if is_in_backward():  # activation checkpointing recomputes the unit
        for owner in (unit, *unit.borrows_from):
            start_gather(owner)
        for owner in (unit, *unit.borrows_from):
            finish_gather(owner)
        unit.is_recomputed = True
        return
    for param in unit.params:
        param.sync_requires_grad()  # frozen or unfrozen since the last forward
    if unit.is_root and context.phases:
        undo_interrupted(context)
    if not context.is_in_forward():
        release_kept(context)
        context.begin_forward()
    context.enter(unit, Phase.FORWARD)
    unit.num_regions_around = num_open_regions()
    if unit not in context.forward_order:
        context.forward_order.append(unit)
    for owner in (unit, *unit.borrows_from):
        start_gather(owner)
        owner.forward_versions = owner.gathered_versions
    start_ahead(unit, unit.forward_prefetch, context.next_in_forward(unit), is_backward=False)
    for owner in (unit, *unit.borrows_from):
        finish_gather(owner)
        for param in owner.params:
            watch_gradient(param)
    push_region(region_name(unit.display_name, FORWARD_COMPUTE))


def _watch_inputs(unit: FsdpUnit, inputs: Any) -> None:
    """Learn when the backward of a unit with frozen parameters is over: the last reader of a frozen parameter makes no
    gradient for it, and one of the inputs' comes last."""
    if is_in_backward() or not torch.is_grad_enabled() or all(p.placeholder.requires_grad for p in unit.params):
        return
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    # Autograd cannot say in `torch.autograd.grad` whether it will come to a leaf, and raises. Then the unit's backward
    # is over when all of it is: as a rule a leaf is an input of the first unit, which comes last anyway.
    if tensors and not any(tensor.is_leaf for tensor in tensors):
        hook = functools.partial(unit_has_input_gradients, unit)
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda grads: hook(), mode="all")


@never_compile_alone
def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """What runs behind a unit's forward, also when that has raised. Returns its output, cast and safe to keep."""
    unit = unit_of(module)
    assert unit is not None
    dtype = unit.mp_policy.output_dtype
    if dtype is not None:
        output = _cast(output, dtype)
    if torch.compiler.is_compiling() and not is_traced_by_foreign_backend():
        if not is_tracing_higher_order_op():
            unit.is_in_compiled_forward = False
        return output
    return _leave_forward(unit, output)


@torch.compiler.disable(reason=WHY_FOREIGN_GRAPHS_BREAK)  # type: ignore[untyped-decorator]
def _leave_forward(unit: FsdpUnit, output: Any) -> Any:
    if not (unit.may_run_eagerly or unit.is_in_method or is_in_backward()):
        output = _made_last(output)
    output = tree_map_only(nn.Parameter, _copy_of_gathered, output)
    output = _copy_views_of_gathered(unit.context, output)
    if unit.may_run_eagerly:
        unit.may_run_eagerly = False  # all of it was compiled
        if not unit.context.is_in_any_forward():
            unit.context.copies.drop()
    elif is_in_backward():
        unit.is_recomputed = False
    elif not unit.is_in_method:
        _end_forward(unit, output)
    return output


def _made_last(output: Any) -> Any:
    """`output` as a view, or a tuple with such views, whose nodes of autograd are the newest of the unit.

    Autograd runs newer nodes first. What a forward computes from a weight behind its output, and leaves in an attribute
    (an auxiliary loss), would else come ahead of the hook that announces the backward, and read the weight while its
    gather, which an earlier unit has started, still writes it.
    """
    if type(output) is tuple:
        return tuple([_made_last(each) if isinstance(each, torch.Tensor) else each for each in output])
    if type(output) is not torch.Tensor or output.grad_fn is None or inside_transforms(output)[1:]:
        return output
    with torch.enable_grad():  # off where the model has enabled gradients itself
        return output.view_as(output)


def _copy_of_gathered(tensor: nn.Parameter) -> torch.Tensor:
    """What a forward may return in place of a parameter: the parameter's own memory is released before it is read."""
    param = fsdp_parameter_of(tensor)
    if param is None:
        return tensor
    return copy_of(tensor) if param.unit.is_unsharded else copy_for_reader(param)


def _copy_views_of_gathered(context: FsdpContext, output: Any) -> Any:
    """`output` with a copy in place of each tensor that lies in gathered memory: `weight.t()`, `weight[2:]`.

    Also behind a root or another unit that stays gathered: the caller may read its output when the backward is over.
    """
    addresses = context.gathered_addresses

    def is_gathered(tensor: torch.Tensor) -> bool:
        return storage_address(local_tensor(tensor) if isinstance(tensor, DTensor) else tensor) in addresses

    if not addresses or not any(is_gathered(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)):
        return output
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if is_gathered(tensor) else tensor, output)


def _end_forward(unit: FsdpUnit, output: Any) -> None:
    context = unit.context
    if output is None and sys.exc_info()[0] is not None:  # the forward raised; torch calls the hook all the same
        if unit.is_root:
            undo_interrupted(context)
        elif context.phases.pop(unit, None) is Phase.FORWARD:
            close_regions_above(unit.num_regions_around)  # code around it may catch what was raised, and go on
        return
    pop_region()
    context.enter(unit, Phase.RESTING)
    for param in unit.params:
        param.check_unwritten()
    leaves = tree_leaves(output)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    outputs += tangents_of(outputs)
    levels = [level for tensor in outputs for level in inside_transforms(tensor)]
    announce_backward(levels, functools.partial(pre_backward, unit))
    # An output that hides its tensors in an object of unknown type cannot announce the backward: stay gathered.
    hides_tensors = torch.is_grad_enabled() and any(not _is_plain(leaf) for leaf in leaves)
    for owner in (unit, *unit.borrows_from) if not hides_tensors and not unit.is_borrowed_in(Phase.FORWARD) else ():
        if owner.reshards_after_forward or not torch.is_grad_enabled():
            keep_parts(owner)
            release(owner)
    if not context.is_in_forward():
        context.drain_delayed_releases(0)
        context.offloading.await_reads()  # the caller may write the shards now
    if not context.is_in_any_forward():
        context.copies.drop()


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | complex | str | bytes)


@never_compile_alone
def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `values` in `dtype`."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


# ---- reads ahead of a unit's forward, around it and in between graphs ------------------------------------------------


@never_compile_alone
def read_eagerly(param: FsdpParameter) -> torch.Tensor | None:
    """What eager code reads: the whole parameter in its unit's own code, and wherever else the unit is whole outside of
    forwards; a copy in other forwards. None where the sharded DTensor is to be read."""
    unit = param.unit
    if unit.is_unsharded and unit.context.phases.get(unit, Phase.RESTING) is not Phase.RESTING:
        return param.face()
    return _read_at_rest(param)


@torch.compiler.disable
def _read_at_rest(param: FsdpParameter) -> torch.Tensor | None:
    unit = param.unit
    if unit.may_run_eagerly:
        _gather_for_forward(unit)
        unit.may_run_eagerly = False  # only now: until then it says that this forward has begun before
    elif not _is_read_by_own_code(unit) and _may_compute(unit.context):
        return copy_for_reader(param)
    return param.face() if unit.is_unsharded else None


def _may_compute(context: FsdpContext) -> bool:
    """Whether a forward runs, or one is run again: in a backward, only that has gradients enabled."""
    return context.is_in_any_forward() or (is_in_backward() and torch.is_grad_enabled())


def _is_read_by_own_code(unit: FsdpUnit) -> bool:
    """Whether the unit, or one that borrows from it, runs and so keeps it whole."""
    phase = unit.context.phase
    readers = [other for other in unit.context.units if other is unit or unit in other.borrows_from]
    return any(reader.is_recomputed or phase(reader) is not Phase.RESTING for reader in readers)
