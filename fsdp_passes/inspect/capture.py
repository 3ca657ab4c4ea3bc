"""Compile a sharded model without running it: the passes' records of its forward and backward graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from fsdp_passes._torch_compat import (
    FakeTensorMode,
    backwards_at_once,
    detect_fake_mode,
    mark_dynamic,
    sizes_as_given,
    symbols_apart,
    tree_leaves,
    tree_map_only,
)
from fsdp_passes.backend import compile_sharded, take_graph
from fsdp_passes.errors import ExplainError, FsdpError
from fsdp_passes.foreign import gathers_parameters
from fsdp_passes.options import OverlapOptions
from fsdp_passes.pipeline import CompilationRecord, record_compilations
from fsdp_passes.stand_in import StandIn, attributes_restored
from fsdp_passes.unit import FsdpUnit, unit_of


@dataclasses.dataclass(frozen=True)
class Call:
    """A model and what it is called with. `symbols` maps a name to the size that stands for it in the arguments."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def units_of(model: nn.Module) -> list[FsdpUnit]:
    """The units of a sharded model, in module order. Raises `ExplainError` when there are none."""
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None and unit.params]
    if not units:
        raise ExplainError(
            f"{type(model).__name__}: expected a model that fully_shard() was called on, found no sharded parameter. "
            "Shard it first, as for training."
        )
    return units


def prepare(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call with its tensors detached, so that nothing is marked on the caller's own, and on the meta device when
    the model is."""
    is_meta = units_of(model)[0].params[0].placeholder.device.type == "meta"

    def own(tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach().requires_grad_(tensor.requires_grad)
        return alias.to("meta") if is_meta else alias

    return Call(model, tree_map_only(torch.Tensor, own, args), tree_map_only(torch.Tensor, own, dict(kwargs)))


def with_symbols(call: Call, names: Sequence[str]) -> Call:
    """The call with its tensors' leading sizes marked as symbols, the first of them `names[0]` and so on.

    Symbols are told apart by their sizes, and PyTorch makes none of the sizes 0 and 1: a size that is 1, or equal to an
    earlier one, is replaced by another.
    """
    tensors = [leaf for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)]
    given: dict[str, int] = {}
    for dim, name in enumerate(names):
        size = next((tensor.shape[dim] for tensor in tensors if tensor.dim() > dim), None)
        if size is not None:
            given[name] = size
    chosen: dict[str, int] = {}
    for name, size in reversed(given.items()):
        while size <= 1 or size in chosen.values():
            size += 1
        chosen[name] = size

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        dims = [dim for dim, name in enumerate(names) if dim < len(shape) and given.get(name) == shape[dim]]
        for dim in dims:
            shape[dim] = chosen[names[dim]]
        if shape != list(tensor.shape):
            tensor = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)
        else:
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)  # the mark stays on the tensor
        for dim in dims:
            mark_dynamic(tensor, dim)
        return tensor

    args, kwargs = tree_map_only(torch.Tensor, mark, (call.args, dict(call.kwargs)))
    return Call(call.model, args, kwargs, chosen)


def capture(call: Call, options: OverlapOptions) -> list[CompilationRecord]:
    """Compile the call's graphs, forward and backward, and run none of them.

    What a graph would return is replaced by zeros of its shapes, so that the code behind a graph break is compiled too.
    That code itself runs and may gather parameters it reads; under a real process group of several ranks, where a
    single rank must not communicate, a graph break is therefore an error (of Dynamo's, which says where).

    Raises `ExplainError` when nothing was compiled.
    """
    is_alone = dist.get_backend() == "fake" or dist.get_world_size() == 1

    @gathers_parameters
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        stand_in = StandIn(gm)
        _compile(gm, example_inputs, options)
        return lambda *args: stand_in(args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(attributes_restored(call.model.modules()))
        stack.enter_context(backwards_at_once())
        # Explained again with other sizes, Dynamo would make symbols of them, and predictions need numbers.
        stack.enter_context(sizes_as_given())
        if call.sizes:
            stack.enter_context(symbols_apart())
        records = stack.enter_context(record_compilations())
        step = torch.compile(_fresh_function(call.model), backend=backend, fullgraph=not is_alone)
        try:
            step(*call.args, **call.kwargs)
        except Exception as error:
            ours = getattr(error, "inner_exception", None)  # Dynamo wraps what a backend raises
            if isinstance(ours, FsdpError):
                raise ours from None
            raise
    records = [record for record in records if record.graphs]
    if not records:
        raise ExplainError(
            f"{type(call.model).__name__}: expected a forward that torch.compile can trace, found no graph that "
            "reads a sharded parameter. TORCH_LOGS=graph_breaks shows why."
        )
    return records


def _fresh_function(model: nn.Module) -> Callable[..., Any]:
    """A function that calls the model, with a code object of its own: Dynamo keeps what it compiled by code object, so
    that explanations neither use up the user's recompilations nor see them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name="explained_call")
    return types.FunctionType(code, call.__globals__, "explained_call", None, call.__closure__)


# ---- the meta device -------------------------------------------------------------------------------------------------


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], options: OverlapOptions) -> None:
    """What `overlap_fsdp` does with a graph, but for the device: a model on meta is traced as if it were on the CPU.

    On meta itself, PyTorch writes attention out as matrix products and does not differentiate some operators.
    """
    gm, uses = take_graph(gm, example_inputs)
    if not uses:
        return
    compile_sharded(gm, uses, example_inputs, options, dict(options.inductor), _on_cpu)


def _on_cpu(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    if not any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in inputs):
        return inputs
    _move_graph_from_meta(gm)
    mode = detect_fake_mode(inputs)
    assert mode is not None
    return [_move_from_meta(value, mode) for value in inputs]


def _move_graph_from_meta(gm: fx.GraphModule) -> None:
    """Tensors that the graph makes itself are made on the CPU too."""
    for node in gm.graph.nodes:
        if str(node.kwargs.get("device", "")) == "meta":
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        node.args = tuple(torch.device("cpu") if _is_meta_device(arg) else arg for arg in node.args)
    for name, buffer in list(gm.named_buffers()):
        if buffer.device.type == "meta":
            gm.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    gm.recompile()


def _is_meta_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "meta"


def _move_from_meta(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    if not hasattr(value, "fake_mode"):
        value = mode.from_tensor(value)  # Dynamo's own, whose sizes may be symbols
    with mode:
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return moved.requires_grad_(value.requires_grad)
