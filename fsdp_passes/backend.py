"""`overlap_fsdp`: a Dynamo graph in, a callable out."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fsdp_passes._torch_compat import (
    FakeTensorMode,
    aot_autograd,
    compile_cache_failure,
    compile_fx_and_inspect,
    copy_dynamo_graph,
    detect_fake_mode,
    elementwise_recomputed,
    group_of,
    inductor_mode_options,
    inductor_schedulers_off,
    is_deterministic,
    min_cut_rematerialization_partition,
    switches_autograd_on,
    without_packing,
    wrap_boxed,
)
from fsdp_passes.agreement import has_peers
from fsdp_passes.compiled_call import Compiled, CompiledCall
from fsdp_passes.context import set_mesh_timeout
from fsdp_passes.debug import ENVIRONMENT_VARIABLE, CheckedInterpreter, debug_flags
from fsdp_passes.errors import (
    CompileCacheError,
    CudaGraphsWarning,
    NothingShardedWarning,
    ProcessGroupGoneError,
    UncheckedGraphsWarning,
)
from fsdp_passes.foreign import gathers_parameters
from fsdp_passes.gather_ops import leaving_nothing_behind
from fsdp_passes.mesh import REDUCE_GROUP_SUFFIX
from fsdp_passes.options import OverlapOptions
from fsdp_passes.parameter import GradientSink, fsdp_parameter_of
from fsdp_passes.passes._uses import ParameterUse
from fsdp_passes.passes.fence_reductions import fence_reductions
from fsdp_passes.passes.find_parameter_uses import find_parameter_uses
from fsdp_passes.passes.insert_unshard import insert_unshard
from fsdp_passes.passes.unwrap_reads import unwrap_reads
from fsdp_passes.pipeline import (
    LowerAndSchedule,
    SchedulerPassWithSources,
    TagJointGraph,
    pin_and_verify,
    start_record,
    verify_generated_code,
)
from fsdp_passes.stand_in import StandIn

_CUDA_GRAPHS = "triton.cudagraphs"  # Inductor's name of the option


@gathers_parameters
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
    original = gm
    gm, uses = take_graph(gm, example_inputs)
    if not uses:
        if not any(fsdp_parameter_of(example) for example in example_inputs):
            _warn_nothing_sharded(gm, example_inputs)
        return _compile_inner(gm, list(example_inputs), settings, inductor_options)

    if inductor_options.get(_CUDA_GRAPHS):
        _warn_no_cuda_graphs()
    inner, label_from = compile_sharded(gm, uses, example_inputs, settings, inductor_options)

    def recompile(*args: Any) -> Any:
        # Dynamo traces its own graph again; its guards on this call's frame fail at the next call.
        return torch.compile(original, backend=overlap_fsdp, mode=mode, options=dict(options or {}))(*args)

    enables_grad = switches_autograd_on(original.graph)
    return CompiledCall(inner, recompile, uses, label_from, settings, StandIn(original), enables_grad=enables_grad)


def take_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[ParameterUse]]:
    """A copy of Dynamo's graph for the passes, and the sharded parameters in it. Raises as `find_parameter_uses`."""
    for example in example_inputs:
        param = fsdp_parameter_of(example)
        if param is not None:
            param.sync_requires_grad()
    gm = copy_dynamo_graph(gm)
    unwrap_reads(gm)
    return gm, find_parameter_uses(gm, example_inputs)


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
    group_names = {use.param.group_name for use in uses}
    group_names |= {use.param.replica_group_name for use in uses if use.param.num_replicas > 1}
    kept_groups = [unit.kept_group for unit in units.values() if unit.kept_group is not None]
    group_names |= {group.group_name for group in kept_groups}
    backends = tuple(sorted({dist.get_backend(group_of(name)) for name in group_names}))
    if settings.collective_timeout_s:
        for unit in units.values():
            set_mesh_timeout(unit.mesh, float(settings.collective_timeout_s))
    lower = LowerAndSchedule(settings, record, backends, has_peers=any(map(has_peers, sorted(group_names))))
    inputs = place(gm, _local_inputs(example_inputs, uses, label_from))
    with elementwise_recomputed() if settings.recompute_elementwise else contextlib.nullcontext():
        return _compile_inner(gm, inputs, settings, inductor_options, lower), label_from


def _warn_no_cuda_graphs() -> None:
    warnings.warn(
        f"overlap_fsdp: {_CUDA_GRAPHS} (part of mode='reduce-overhead' and 'max-autotune') is switched off for code "
        "with sharded parameters, whose collectives are started and watched from the host. "
        "mode='max-autotune-no-cudagraphs' does not ask for it.",
        CudaGraphsWarning,
        stacklevel=2,
    )


@functools.cache  # once in a process
def _warn_unchecked() -> None:
    warnings.warn(
        f"{ENVIRONMENT_VARIABLE}=nan: expected graphs that run node by node, found compiled ones, in which released "
        f"weights are not filled with NaN and no late read shows. Set {ENVIRONMENT_VARIABLE}=eager,nan.",
        UncheckedGraphsWarning,
        stacklevel=2,
    )


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


def _local_inputs(example_inputs: Sequence[Any], uses: Sequence[ParameterUse], label_from: Sequence[int]) -> list[Any]:
    """The compiler's example inputs: fake shards where the placeholders were, the labels, and the sinks of gradients
    that are not reduced, or not over the replicas."""
    fake_mode = detect_fake_mode() or FakeTensorMode()
    inputs = list(example_inputs)
    for use in uses:
        is_reduced = use.param.placeholder.requires_grad and use.sink is GradientSink.SHARD
        shard = use.param.shard().detach().requires_grad_(is_reduced)
        inputs[use.position] = fake_mode.from_tensor(shard, static_shapes=True)
    for index in label_from:
        inputs.append(fake_mode.from_tensor(uses[index].param.unit.label, static_shapes=True))
    sinks = [use.param.sink(use.sink) for use in uses]
    inputs += [fake_mode.from_tensor(sink, static_shapes=True) for sink in sinks if sink is not None]
    return inputs


def _compile_inner(
    gm: fx.GraphModule,
    inputs: list[Any],
    settings: OverlapOptions,
    inductor_options: dict[str, Any],
    lower: LowerAndSchedule | None = None,
) -> Compiled:
    flags = debug_flags()
    is_checked = settings.inner == "eager" or flags.eager
    if flags.nan and not is_checked and lower is not None:
        _warn_unchecked()
    if settings.inner != "inductor" or is_checked:
        return _compile_aot(gm, inputs, lower, is_checked=is_checked)
    if lower is None:
        return compile_fx_and_inspect(gm, inputs, inductor_options, lambda *_: None, _with_our_errors)
    patches = {
        **inductor_schedulers_off(),
        **inductor_options,
        # A CUDA graph replays kernels without the host, which watches the collectives and compares them.
        _CUDA_GRAPHS: False,
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
    inspect = functools.partial(verify_generated_code, lower.record)
    return compile_fx_and_inspect(gm, inputs, patches, inspect, _with_our_errors, leaving_nothing_behind())


@contextlib.contextmanager
def _with_our_errors() -> Iterator[None]:
    """Where Inductor cannot write its files, an error says where that was and what to do. That a group is gone, which
    only a backward meets here, comes out as itself: nobody unpacks what a backward raises."""
    try:
        yield
    except Exception as error:
        ours = without_packing(error)
        if isinstance(ours, ProcessGroupGoneError) and ours is not error:
            raise ours from None
        failure = compile_cache_failure(error)
        if failure is None:
            raise
        raise CompileCacheError(*failure) from error


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
            if not is_checked:
                with leaving_nothing_behind():
                    return graph_module.forward(*inputs)
            names = lower.record.unit_names if lower is not None else ()
            checked = CheckedInterpreter(graph_module, names, poison_released=debug_flags().nan)
            with leaving_nothing_behind(lambda: checked.env.values()):  # `run` makes a new one
                return checked.run(*inputs)

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
