"""`overlap_fsdp`: a Dynamo graph in, a callable out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from fsdp_passes._torch_compat import (
    FakeTensorMode,
    aot_autograd,
    compile_fx,
    compile_fx_and_inspect,
    copy_dynamo_graph,
    detect_fake_mode,
    inductor_mode_options,
    inductor_schedulers_off,
    is_deterministic,
    is_in_backward,
    make_dtensor,
    min_cut_rematerialization_partition,
    wrap_boxed,
)
from fsdp_passes.context import ensure_reduce_group
from fsdp_passes.debug import CheckedInterpreter, debug_flags
from fsdp_passes.eager_backward import whole_inputs
from fsdp_passes.errors import NothingShardedWarning, StaleParametersError
from fsdp_passes.gathering import release_on_demand
from fsdp_passes.ops import REDUCE_GROUP_SUFFIX
from fsdp_passes.options import OverlapOptions
from fsdp_passes.parameter import FsdpParameter, fsdp_parameter_of
from fsdp_passes.passes._uses import ParameterUse
from fsdp_passes.passes.fence_reductions import fence_reductions
from fsdp_passes.passes.find_parameter_uses import find_parameter_uses
from fsdp_passes.passes.insert_unshard import insert_unshard
from fsdp_passes.pipeline import (
    LowerAndSchedule,
    SchedulerPassWithSources,
    TagJointGraph,
    pin_and_verify,
    start_record,
    verify_generated_code,
)
from fsdp_passes.regions import close_backward_regions, close_regions_above, num_open_regions

Compiled = Callable[..., Any]


def overlap_fsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Backend for `torch.compile(model, backend=overlap_fsdp, options={...})`.

    Args:
        gm: the graph that Dynamo traced over full-shaped placeholders of the sharded parameters.
        example_inputs: its inputs; the placeholders are recognized by identity.
        mode: as in `torch.compile`; its Inductor options are applied below the user's own.
        options: see `OverlapOptions`.

    Returns:
        A callable with the graph's signature. It takes the placeholders that Dynamo passes and computes with the
        shards behind them; gradients arrive as DTensors in `.grad` of the sharded parameters.

    Raises:
        UnknownOptionError, OptionValueError: before anything is compiled.
        MutatedParameterError: the code writes into a sharded parameter.
        ScheduleError: the schedule breaks an invariant (with `verify=True`).
    """
    settings = OverlapOptions.from_dict(options)
    inductor_options = {**inductor_mode_options(mode), **settings.inductor}
    for example in example_inputs:
        param = fsdp_parameter_of(example)
        if param is not None:
            param.sync_requires_grad()
    original, gm = gm, copy_dynamo_graph(gm)
    uses = find_parameter_uses(gm, example_inputs)
    if not uses:
        if not any(fsdp_parameter_of(example) for example in example_inputs):
            _warn_nothing_sharded(gm, example_inputs)
        return _compile_inner(gm, list(example_inputs), settings, inductor_options)

    positions = [use.position for use in uses]
    inner, label_from = compile_sharded(gm, uses, example_inputs, settings, inductor_options)

    def recompile(*args: Any) -> Any:
        # Dynamo traces its own graph again; its guards on this call's frame fail at the next call.
        return torch.compile(original, backend=overlap_fsdp, mode=mode, options=dict(options or {}))(*args)

    constants = [use.param.graph_constants for use in uses]
    return functools.partial(_run, inner, recompile, positions, label_from, settings, constants)


def compile_sharded(
    gm: fx.GraphModule,
    uses: Sequence[ParameterUse],
    example_inputs: Sequence[Any],
    settings: OverlapOptions,
    inductor_options: dict[str, Any],
    place: Callable[[fx.GraphModule, list[Any]], list[Any]] = lambda gm, inputs: inputs,
) -> tuple[Compiled, list[int]]:
    """Put the communication into a graph and compile it.

    `place` may change the graph and the compiler's example inputs before that: where they are on another device than
    the one to trace for.

    Returns:
        The compiled graph, which takes shards and then labels, and for each label the position in `uses` of a
        parameter of its unit.
    """
    suffix = "" if settings.unify_communication_stream else REDUCE_GROUP_SUFFIX
    label_from = insert_unshard(gm, uses, reduce_group_suffix=suffix)
    units = {use.unit_index: use.param.unit for use in uses}
    record = start_record([units[index].display_name for index in sorted(units)], settings)
    backends = tuple(sorted({dist.get_backend(unit.mesh.get_group()) for unit in units.values()}))
    lower = LowerAndSchedule(settings, record, backends)
    inputs = place(gm, _local_inputs(example_inputs, [use.position for use in uses], label_from))
    return _compile_inner(gm, inputs, settings, inductor_options, lower), label_from


_has_warned_nothing_sharded = False  # once in a process: a graph break or a new shape compiles again


def _warn_nothing_sharded(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Graphs between two graph breaks often have no parameters at all; only unsharded parameters deserve a warning."""
    global _has_warned_nothing_sharded
    if not _has_warned_nothing_sharded and any(isinstance(example, torch.nn.Parameter) for example in example_inputs):
        _has_warned_nothing_sharded = True
        warnings.warn(
            "overlap_fsdp: expected a model with sharded parameters, found none in this graph. It is compiled without "
            "communication. Call fully_shard() on the model before torch.compile().",
            NothingShardedWarning,
            stacklevel=2,
        )


def _local_inputs(example_inputs: Sequence[Any], positions: Sequence[int], label_from: Sequence[int]) -> list[Any]:
    """The compiler's example inputs: fake shards where the placeholders were, the labels, and the placeholders of
    parameters whose gradients are kept whole."""
    fake_mode = detect_fake_mode() or FakeTensorMode()
    inputs = list(example_inputs)
    params = [_parameter_at(example_inputs, position) for position in positions]
    for position, param in zip(positions, params, strict=True):
        is_reduced = param.placeholder.requires_grad and not param.keeps_whole_grad
        shard = param.shard().detach().requires_grad_(is_reduced)
        inputs[position] = fake_mode.from_tensor(shard, static_shapes=True)
    for index in label_from:
        inputs.append(fake_mode.from_tensor(params[index].unit.label, static_shapes=True))
    inputs += [fake_mode.from_tensor(p.placeholder, static_shapes=True) for p in params if p.keeps_whole_grad]
    return inputs


def _parameter_at(inputs: Sequence[Any], position: int) -> FsdpParameter:
    param = fsdp_parameter_of(inputs[position])
    assert param is not None, "Dynamo's guards let a tensor through that is no sharded parameter"
    return param


def _compile_inner(
    gm: fx.GraphModule,
    inputs: list[Any],
    settings: OverlapOptions,
    inductor_options: dict[str, Any],
    lower: LowerAndSchedule | None = None,
) -> Compiled:
    flags = debug_flags()
    if settings.inner != "inductor" or flags.eager:
        return _compile_aot(gm, inputs, lower, is_checked=settings.inner == "eager" or flags.eager)
    if lower is None:
        plain: Any = compile_fx(gm, inputs, config_patches=inductor_options)
        return plain
    patches = {
        **inductor_schedulers_off(),
        **inductor_options,
        "joint_custom_post_pass": TagJointGraph(),
        "post_grad_custom_post_pass": lower,
        "_pre_fusion_custom_pass": SchedulerPassWithSources(fence_reductions),
    }
    if is_deterministic(inductor_options):
        # This mode skips the reordering passes below, so that the order after fusion has to be the last one.
        last = SchedulerPassWithSources(pin_and_verify)
        patches |= {"_post_fusion_custom_pass": last, "reorder_for_peak_memory": False}
    else:
        patches |= {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": [pin_and_verify],
        }
    return compile_fx_and_inspect(gm, inputs, patches, functools.partial(verify_generated_code, lower.record))


def _compile_aot(
    gm: fx.GraphModule, inputs: list[Any], lower: LowerAndSchedule | None, *, is_checked: bool
) -> Compiled:
    tag = TagJointGraph()

    def compile_graph(graph_module: fx.GraphModule, _: Sequence[Any]) -> Compiled:
        if lower is not None:
            lower(graph_module.graph)
            graph_module.recompile()

        def run(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            if is_checked:
                names = lower.record.unit_names if lower is not None else ()
                return CheckedInterpreter(graph_module, names, poison_released=debug_flags().nan).run(*inputs)
            return graph_module.forward(*inputs)

        return wrap_boxed(run)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        tag(joint.graph)
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        inference_compiler=compile_graph,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, inputs)


# ---- run time --------------------------------------------------------------------------------------------------------


class _HandOutShards(torch.autograd.Function):
    """Sharded parameters in, this rank's padded shards out; in backward, padded gradients in and DTensors out.

    One node for all parameters of a graph: a node per parameter would cost more than a small layer's compute.
    """

    @staticmethod
    def forward(ctx: Any, params: list[FsdpParameter], *sharded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.params = params
        ctx.versions = [param._version for param in sharded]
        # Fresh aliases: autograd writes its history into the tensors that a Function returns.
        return tuple(param.shard().detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        results: list[DTensor | None] = []
        for param, version in zip(ctx.params, ctx.versions, strict=True):
            if param.sharded_param._version != version:  # the backward has gathered what was written
                raise StaleParametersError(param.unit.display_name)
        for param, grad in zip(ctx.params, grads, strict=True):
            if grad is None:
                results.append(None)
                continue
            sharded = param.sharded_param
            results.append(make_dtensor(grad[: param.local_rows], sharded))
        return None, *results


def _run(
    inner: Compiled,
    recompile: Compiled,
    positions: Sequence[int],
    label_from: Sequence[int],
    settings: OverlapOptions,
    constants: list[tuple[object, ...]],
    *args: Any,
) -> Any:
    """Replace each placeholder that Dynamo passed by the shard behind that very object, and run the graph.

    The positions are the graph's; the parameters are this call's. One artifact serves every layer with the same code.
    A parameter that was frozen or unfrozen since the graph was compiled needs another graph: a gradient would be
    missing or reduced for nothing. So does one whose group, dtypes or resharding differ from what the graph assumes.
    """
    params = [_parameter_at(args, position) for position in positions]
    changed = [param for param in params if param.sync_requires_grad()]
    found = [param.graph_constants for param in params]
    if changed or found != constants:
        return recompile(*args)
    inputs = list(args)
    trainable: list[tuple[int, FsdpParameter]] = []
    needs_grad = torch.is_grad_enabled()
    for position, param in zip(positions, params, strict=True):
        if needs_grad and param.sharded_param.requires_grad and not param.keeps_whole_grad:
            trainable.append((position, param))
        else:
            inputs[position] = param.shard()
    if trainable:
        locals_ = _HandOutShards.apply([p for _, p in trainable], *[p.sharded_param for _, p in trainable])
        for (position, _), local in zip(trainable, locals_, strict=True):
            inputs[position] = local
    for index in label_from:
        inputs.append(params[index].unit.label)
    inputs += whole_inputs(params)
    if not settings.unify_communication_stream:
        for mesh in dict.fromkeys(param.mesh for param in params):
            ensure_reduce_group(mesh)
    context = params[0].unit.context
    release_on_demand(context)
    if not is_in_backward():
        context.is_grad_enabled = needs_grad
    context.lookahead.open_requests = None
    if not is_in_backward():
        close_backward_regions()
    depth = num_open_regions()
    try:
        return inner(*inputs)
    except BaseException:
        context.lookahead.interrupt()
        raise
    finally:
        close_regions_above(depth)
