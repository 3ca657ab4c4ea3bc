"""Every PyTorch-internal name that this library uses, in one place.

Each name below is private to PyTorch or changed between the supported releases (2.11, 2.13, 2.14). Nothing else in the
package imports a name with a leading underscore from torch; `tests/test_torch_compat.py` reaches every function here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch import fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.symbolic_convert import tls as symbolic_convert_state
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_utils, custom_graph_pass, ir, list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.dependencies import WeakDep
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.virtualized import V
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental import _config as fx_config
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "CustomGraphPass",
    "FakeTensorMode",
    "SchedulerPass",
    "add_order_dependency",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "aot_autograd",
    "as_real",
    "backend_of_region",
    "backend_that_traces",
    "backwards_at_once",
    "call_after_backward",
    "collective_name",
    "compile_cache_failure",
    "compile_fx_and_inspect",
    "copy_dynamo_graph",
    "default_store",
    "detect_fake_mode",
    "dtensor_of",
    "elementwise_recomputed",
    "foreach_add",
    "foreach_copy",
    "get_hash_for_files",
    "gradient_hooks",
    "group_of",
    "group_timeout_s",
    "has_gradient_hooks",
    "inductor_mode_options",
    "inductor_schedulers_off",
    "init_fake_process_group",
    "inputs_of_caller",
    "inside_transforms",
    "is_backward_graph",
    "is_deterministic",
    "is_in_backward",
    "is_in_compiled_region",
    "is_profiler_enabled",
    "is_tracing_higher_order_op",
    "join_meshes",
    "local_tensor",
    "make_dtensor",
    "mark_dynamic",
    "min_cut_rematerialization_partition",
    "never_compile_alone",
    "outside_transforms",
    "reduce_scatter_coalesced",
    "refresh_ancestors",
    "register_group_alias",
    "register_work",
    "replace_local_tensor",
    "scheduled_fx_nodes",
    "scheduled_graph_module",
    "scheduler_node_kind",
    "set_dynamo_source",
    "sizes_as_given",
    "storage_address",
    "strided_shard",
    "switch_autograd",
    "switches_autograd_on",
    "symbols_apart",
    "tangents_of",
    "trace_artifact",
    "tree_leaves",
    "tree_map_only",
    "where_autograd_is_off",
    "with_bases_of_views",
    "without_packing",
    "without_version_bump",
    "wrap_boxed",
    "writes_gradient",
]


# The base class that lets Inductor's caches accept a pass over scheduler nodes; 2.11 has one class for all passes.
SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """A DTensor's own local tensor, without the autograd node that `to_local()` adds."""
    assert isinstance(param, DTensor), f"expected a DTensor, found {type(param).__name__}"
    return param._local_tensor


def replace_local_tensor(param: torch.Tensor, local: torch.Tensor) -> None:
    """Let a DTensor keep its rows in `local`, which has the same shape and values."""
    assert isinstance(param, DTensor), f"expected a DTensor, found {type(param).__name__}"
    param._local_tensor = local


def make_dtensor(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """A DTensor of `like`'s global shape and placement around `local`; no communication, no autograd node."""
    assert isinstance(like, DTensor), f"expected a DTensor, found {type(like).__name__}"
    # `DTensor(...)` takes three times as long: `__init__` has nothing to do, and switches Dynamo off for that.
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor of a global shape and stride around `local`; no communication, no autograd node."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def strided_shard(dim: int, num_parts: int) -> Placement:
    """Sharded along `dim` after another dimension of the mesh has cut that into `num_parts`."""
    return _StridedShard(dim, split_factor=num_parts)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dimensions of several, which are parts of one mesh with named dimensions."""
    return DeviceMesh._concatenate(list(meshes))


def gradient_hooks(param: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """What `register_hook` and `register_post_accumulate_grad_hook` registered on `param`, in that order."""
    before, after = param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
    return list((before or {}).values()), list((after or {}).values())


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether autograd calls somebody with the gradient of `param`: hooks, or an optimizer that
    `_apply_optimizer_in_backward` has put there. Other hooks on autograd's node of a leaf cannot be seen."""
    return any(gradient_hooks(param)) or hasattr(param, "_in_backward_optimizers")


def without_version_bump(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """In-place writes inside leave autograd's version counter of `tensor` as it was."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def storage_address(tensor: torch.Tensor) -> int:
    """Where the memory of `tensor` begins; 0 for tensors without memory of their own: wrappers of other tensors
    (DTensor, asynchronous collectives' results), sparse ones, those of `torch.func`, and empty ones."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # no storage, or one that nobody may look at
        return 0


def inside_transforms(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`tensor`, and where it is one of a transform of `torch.func`, what that wraps, from the outside in: each level
    has an autograd graph of its own."""
    found = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(found[-1]):
        found.append(torch._C._functorch.get_unwrapped(found[-1]))
    return found


def with_bases_of_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`tensors`, and what those among them that are views look at, unless autograd has not made it.

    Writing through a view gives all views of the same memory another history, without the nodes that made them; what
    is left of the old one is the node that made the memory.
    """
    bases = [tensor._base for tensor in tensors]
    return [*tensors, *[base for base in bases if base is not None and base.grad_fn is not None]]


def tangents_of(values: Sequence[object]) -> list[torch.Tensor]:
    """What forward-mode differentiation carries along with tensors among `values`; nothing where it does not run."""
    if forward_ad._current_level < 0:
        return []
    tangents = [forward_ad.unpack_dual(value).tangent for value in values if isinstance(value, torch.Tensor)]
    return [tangent for tangent in tangents if tangent is not None]


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Inside, the transforms of `torch.func` that are running see nothing of what is computed."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return torch._C._DisableFuncTorch()  # type: ignore[no-any-return]


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy (and cast) each source into its target; on CUDA in few launches."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_add(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add each source to its target."""
    torch._foreach_add_(list(targets), list(sources))


def is_profiler_enabled() -> bool:
    """Whether a torch.profiler (or `emit_nvtx`) is recording in this process."""
    return torch.autograd._profiler_enabled()


# ---- process groups --------------------------------------------------------------------------------------------------


def group_of(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know under `name`."""
    resolved: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return resolved


def group_timeout_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """How many seconds a collective of the group may take: of tensors on `device`, or on its accelerator if it has one.

    A group has a backend for each type of device, and each backend its own timeout.
    """
    if device is None:
        device = next((device for device in group._device_types if device.type != "cpu"), torch.device("cpu"))
    options = getattr(group._get_backend(device), "options", None)
    return float(getattr(options, "_timeout", default_pg_timeout).total_seconds())


def default_store() -> dist.Store:
    """The store of the default process group, under a prefix of its own."""
    return dist.distributed_c10d._get_default_store()


def register_group_alias(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` under `name` too."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Let functional collectives' `wait_tensor` of `tensor` wait for `work`."""
    torch._C._distributed_c10d._register_work(tensor, work)  # type: ignore[attr-defined]


def init_fake_process_group(world_size: int) -> None:
    """This process as rank 0 of a default group of any size that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


# ---- Dynamo ----------------------------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compile_alone(function: Function) -> Function:
    """Dynamo traces `function` where traced code calls it, but never as a graph of its own.

    Behind a graph break each call of eager code is a chance to compile; a hook or a property of ours must run as eager
    code there, since it looks at what the compiler does.
    """
    skip_code(function.__code__)  # type: ignore[attr-defined]
    return function


def is_in_compiled_region() -> bool:
    """Whether eager code runs between graphs: Dynamo will compile the functions that are called from here."""
    return get_eval_frame_callback() is not None


@never_compile_alone
def backend_of_region() -> Any:
    """What compiles the functions that are called from here, as it was given to Dynamo; None outside of such code."""
    return _innermost_backend(get_eval_frame_callback() or None)


def _translator() -> Any:
    """What Dynamo is translating on this thread; None when it is not tracing."""
    return getattr(symbolic_convert_state, "current_tx", None)


def backend_that_traces() -> Any:
    """What Dynamo is tracing for now, as it was given to it; None when it is not tracing."""
    translator = _translator()
    return None if translator is None else _innermost_backend(translator.output.compiler_fn)


@never_compile_alone
def _innermost_backend(callback: Any) -> Any:
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_tracing_higher_order_op() -> bool:
    """Whether Dynamo is inside the body of an operator that takes code, such as activation checkpointing. Such code
    must have no side effect, and no graph break can be in it."""
    return not _translator().output.is_root_tracer()


# ---- graphs ----------------------------------------------------------------------------------------------------------


def where_autograd_is_off(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For each node that runs without autograd in a graph from Dynamo: the switch (`no_grad`, `inference_mode`) that
    turned it off, until which it was on; None where it is off ahead of the graph, as it is now."""
    off: dict[fx.Node, fx.Node | None] = {}
    before_inference: dict[Any, tuple[bool, bool, fx.Node | None]] = {}
    is_on, is_inference = torch.is_grad_enabled(), False
    switch: fx.Node | None = None
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            if node.args[0]:
                is_on = not is_inference  # inside of it, enabling gradients changes nothing
            elif is_on:
                is_on, switch = False, node
        elif node.target is torch.autograd.grad_mode._enter_inference_mode:
            before_inference[node] = is_on, is_inference, switch
            switch = node if is_on else switch
            is_on, is_inference = not node.args[0], bool(node.args[0])
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            is_on, is_inference, switch = before_inference[node.args[0]]
        elif not is_on:
            off[node] = switch
    return off


def switches_autograd_on(graph: fx.Graph) -> bool:
    """Whether nodes of a graph from Dynamo run with autograd, wherever the graph is called."""
    return any(
        (node.target is torch._C._set_grad_enabled and bool(node.args[0]))
        or (node.target is torch.autograd.grad_mode._enter_inference_mode and not node.args[0])
        for node in graph.nodes
    )


def switch_autograd(graph: fx.Graph, is_on: bool) -> fx.Node:
    """Add a node that turns autograd on or off for those behind it."""
    return graph.call_function(torch._C._set_grad_enabled, (is_on,))


def set_dynamo_source(node: fx.Node) -> None:
    """Tell AOTAutograd that a placeholder added by us has no source in the user's frame."""
    node._dynamo_source = None  # type: ignore[attr-defined]


def is_backward_graph(graph: fx.Graph) -> bool:
    """Whether AOTAutograd's partitioner made this graph as a backward: its gradients come in as `tangents_<n>`."""
    return any("tangents" in str(node.target) for node in graph.find_nodes(op="placeholder"))


def inputs_of_caller(graph: fx.Graph) -> set[fx.Node]:
    """The graph inputs that the traced function was called with. A backward's others are what the forward saved for it
    alone, whose memory Inductor may use again behind the last step that takes it."""
    inputs = graph.find_nodes(op="placeholder")
    if not is_backward_graph(graph):
        return set(inputs)
    return {node for node in inputs if str(node.target).startswith("primals")}


def backwards_at_once() -> contextlib.AbstractContextManager[Any]:
    """Inside, AOTAutograd compiles a backward graph together with its forward, not when the backward first runs."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo for a symbol in place of this size, unless the traced code needs the number."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def symbols_apart() -> contextlib.AbstractContextManager[Any]:
    """Inside, two dynamic dimensions that happen to have the same size are two symbols."""
    return fx_config.patch(use_duck_shape=False)  # type: ignore[attr-defined,no-any-return]


def sizes_as_given() -> contextlib.AbstractContextManager[Any]:
    """Inside, Dynamo takes sizes and numbers for constants, whatever it compiled at the same place before; marked
    dimensions are symbols as always."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)  # type: ignore[attr-defined,no-any-return]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Leave a text in the structured trace (`TORCH_TRACE`), where tlparse finds it; without a trace, `text` is not
    called."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False
    )


# ---- Inductor's scheduler --------------------------------------------------------------------------------------------


def scheduled_fx_nodes() -> Sequence[fx.Node]:
    """The FX nodes of the graph that Inductor is scheduling now, in order."""
    return list(V.graph.graph.nodes)


_STARTS = ("fsdp_passes::all_gather", "fsdp_passes::reduce_scatter")


def scheduler_node_kind(snode: Any) -> str:
    """'collective', 'wait', 'region', 'copy' (of gradients to the CPU), 'compute' or 'none' (nothing runs) for one of
    Inductor's scheduler nodes."""
    inner = getattr(snode, "node", None)
    if isinstance(inner, ir.MultiOutput | ir.NopKernel):
        return "none"
    if isinstance(inner, ir._WaitKernel):  # of the user's own collectives
        return "wait"
    if isinstance(inner, ir._CollectiveKernel):
        return "collective"
    overload = getattr(inner, "op_overload", None)
    if "await_collective" in str(overload):
        return "wait"
    if "send_home" in str(overload):
        return "copy"
    if overload is not None and str(getattr(overload, "namespace", "")) == "fsdp_passes":
        return "collective" if overload.name().startswith(_STARTS) else "region"
    return "compute"


def collective_name(snode: Any) -> str:
    """The operator of a scheduler node of kind 'collective', without namespace and overload."""
    return snode.node.op_overload._schema.name.split("::")[1]


def is_deterministic(inductor_options: Mapping[str, Any]) -> bool:
    """Whether Inductor runs in its deterministic mode, in which it skips the last reordering passes."""
    return bool(inductor_options.get("deterministic", inductor_config.deterministic))


def add_order_dependency(snode: Any, earlier: Any) -> None:
    """Let a scheduler node run behind `earlier` although it reads nothing of it."""
    name = next(iter(earlier.get_buffer_names()))
    snode.add_fake_dep(WeakDep(name, mutating_buf=next(iter(snode.get_buffer_names())), is_fake=True))


def refresh_ancestors(snodes: Sequence[Any]) -> None:
    """Recompute which nodes lie before which, as fusion needs after `add_order_dependency`."""
    if snodes:
        snodes[0].scheduler.compute_ancestors()


def scheduled_graph_module() -> fx.GraphModule:
    """The module whose graph Inductor is scheduling now."""
    module = V.graph.module
    assert isinstance(module, fx.GraphModule)
    return module


def wrap_boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a compiled function as taking its inputs as one list, which it may clear."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def copy_dynamo_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be changed: Dynamo reads the placeholders of its own graph again after the backend returns."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned: Any = graph.graph_copy(gm.graph, copied, return_output_node=True)
    value, output = returned
    graph.output(value).meta = dict(output.meta)
    for old, new in copied.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    result = fx.GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        result._param_name_to_source = gm._param_name_to_source
    return result


# Inductor's own schedulers of communication. Each of them would move our collectives after they were placed and
# verified; `enable_simple_overlap` is on by default since 2.14 and runs behind the last custom pass, where it sinks
# each wait to its own first use and so lets buffers be reused between the waits of one group.
_INDUCTOR_SCHEDULERS = {
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "_micro_pipeline_tp": False,
    "graph_partition": False,  # moves collectives behind the last custom pass, for larger CUDA graphs
}


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor options that `torch.compile(mode=...)` stands for."""
    return {} if mode in (None, "default") else dict(list_mode_options(mode))


def inductor_schedulers_off() -> dict[str, Any]:
    """Settings that keep this release's Inductor from scheduling communication itself."""
    known = inductor_config.get_config_copy()
    return {name: value for name, value in _INDUCTOR_SCHEDULERS.items() if name in known}


def elementwise_recomputed() -> contextlib.AbstractContextManager[object]:
    """The partitioner may recompute elementwise values that the backward has to write to memory for a matrix product.

    By default it saves them, since recomputing them is not free. A sharded model is short of memory first.
    """
    patch: Any = functorch_config.patch
    return patch(ban_recompute_materialized_backward=False)  # type: ignore[no-any-return]


def compile_fx_and_inspect(
    gm: fx.GraphModule,
    inputs: list[Any],
    patches: dict[str, Any],
    inspect: Callable[[str, bool], None],
    around: Callable[[], contextlib.AbstractContextManager[None]],
    wrap_backward: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """`compile_fx`; `inspect(source, is_backward)` sees the code of each graph, from the graph cache too.

    `around` is entered whenever Inductor compiles: a backward is compiled later, when autograd first comes to it.
    `wrap_backward` gets each compiled backward and returns what autograd calls in its place.
    AOTAutograd's cache is the exception for `inspect`, which does not see what it returns; on 2.11 for `wrap_backward`
    too.
    """
    if wrap_backward is not None and _HAS_POLICY:
        patches = {**patches, "cudagraph_policy": _WrapBackwards(wrap_backward)}

    def inner_compile(graph: fx.GraphModule, graph_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with around():
            output = compile_fx_inner(graph, graph_inputs, **kwargs)
        source = getattr(output, "source_code", None)
        if source:
            inspect(source, bool(kwargs.get("is_backward")))
        if wrap_backward is not None and not _HAS_POLICY:
            _WrapBackwards(wrap_backward).wrap_output(output)
        return output

    with around():
        compiled: Any = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    return compiled


# Inductor asks it about each graph that it has compiled or that came out of a cache, AOTAutograd's too. New in 2.13.
_HAS_POLICY = hasattr(cudagraph_utils, "CUDAGraphPolicy")
_Policy: Any = getattr(cudagraph_utils, "CUDAGraphPolicy", object)


class _WrapBackwards(_Policy):  # type: ignore[misc]
    """Inductor's policy for CUDA graphs, which are off here: what `wrap_output` returns runs in the graph's place."""

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.wrap = wrap

    def wrap_output(self, output: Any) -> Any:
        run = getattr(output, "current_callable", None)
        if run is not None and output.fx_kwargs.get("is_backward"):
            output.current_callable = self.wrap(run)  # in place: caches take the output itself, but not what it calls
        return output


_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def without_packing(error: Exception) -> Exception:
    """What was raised while Inductor compiled: it packs what it meets into an error of its own."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def compile_cache_failure(error: Exception) -> tuple[str, OSError] | None:
    """The folder of Inductor's cache and what the system says, where `error` means that nothing can be written there.

    Generated code goes through that folder also where the caches themselves are switched off.
    """
    cause = without_packing(error)
    if not isinstance(cause, OSError) or cause.errno not in _NOT_WRITABLE:
        return None
    folder = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    named = cause.filename  # a write into a full disk names none
    is_inside = named is None or f"{os.path.abspath(os.fsdecode(named))}{os.sep}".startswith(f"{folder}{os.sep}")
    return (folder, cause) if is_inside else None


# ---- eager collectives -----------------------------------------------------------------------------------------------

# Renamed in 2.13.
_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
_ALL_GATHER = "all_gather_single_coalesced" if _IS_RENAMED else "allgather_into_tensor_coalesced"
_REDUCE_SCATTER = "reduce_scatter_single_coalesced" if _IS_RENAMED else "reduce_scatter_tensor_coalesced"


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Backends know no complex numbers: the same memory as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Gather each input into its output with one grouped collective; returns the work to wait for.

    The group's own method: `torch.distributed`'s way to group collectives takes twice the host's time.
    """
    start = getattr(group, _ALL_GATHER)
    work: dist.Work = start([*map(as_real, outputs)], [*map(as_real, inputs)], AllgatherOptions())
    return work


def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, average: bool
) -> dist.Work:
    """Reduce each input into its output with one grouped collective; returns the work to wait for."""
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    start = getattr(group, _REDUCE_SCATTER)
    work: dist.Work = start([*map(as_real, outputs)], [*map(as_real, inputs)], options)
    return work


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, average: bool) -> dist.Work:
    """Reduce each tensor in place with one grouped collective; returns the work to wait for."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    return group.allreduce_coalesced([*map(as_real, tensors)], options)


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def writes_gradient(node: Any) -> bool:
    """Whether the backward that is running now adds to `.grad` of the leaf whose node of autograd this is:
    `torch.autograd.grad` does not, nor does `backward(inputs=...)` with other inputs."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # it does not answer for a leaf in `torch.autograd.grad`
        return False


def call_after_backward(function: Callable[[], None]) -> None:
    """Run `function` once, when the backward that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]
