"""The text of every error: what was expected, what was found, what to do."""

from __future__ import annotations

import inspect

import pytest
from expecttest import assert_expected_inline

from fsdp_passes import errors
from fsdp_passes.errors import FsdpError
from tests.graphs import folded

EXAMPLES: dict[type[FsdpError], tuple[object, ...]] = {
    errors.NoProcessGroupError: (),
    errors.ProcessGroupGoneError: ("layers.0",),
    errors.AlreadyShardedError: ("Block",),
    errors.WrapOrderError: ("Linear", "weight", "layers.0"),
    errors.ForeignDTensorError: ("head.weight", "mesh (4,) as (Replicate(),)", "(2,)"),
    errors.NoForwardError: ("layers (ModuleList)",),
    errors.PhaseError: ("layers.0", "backward", "forward"),
    errors.UnitInUseError: ("layers.0", "forward"),
    errors.StaleParametersError: ("layers.0",),
    errors.OffloadedDeviceError: ("layers.0.weight", "cuda:0"),
    errors.DeviceError: ("layers.0", "cuda:0", "cpu"),
    errors.MeshError: ("one with 3 dimensions, ('replicate', 'shard', 'tensor')",),
    errors.UnsupportedArgumentError: ("dp_mesh_dims", "shard", "Pass mesh['shard']."),
    errors.UnsupportedParameterError: ("scale", "a scalar", "Give it the shape (1,)."),
    errors.ShardPlacementError: ("head.weight", "Shard(dim=1)", "a dimension of its shape (8, 5) that 2 ranks divide"),
    errors.IntegerParameterError: ("table", "torch.int64"),
    errors.CapturedParameterError: ("weight_ih_l0", "lstm", "_flat_weights"),
    errors.UnitPatternError: ("blocks.*", [f"layers.{i}" for i in range(20)]),
    errors.UnknownOptionError: ("prefech", ["verify", "prefetch"]),
    errors.OptionValueError: ("prefetch", 0, "an integer of at least 1"),
    errors.TraceFileError: ("rank0.json", "an empty file", "Record it again."),
    errors.MutatedParameterError: ("layers.0.weight",),
    errors.ReplacedParameterError: ("head.weight", (8, 4), "a whole tensor of shape (8, 4)"),
    errors.ComplexParameterError: ("filter.weight", "torch.complex64"),
    errors.ForwardModeError: ("layers.0",),
    errors.ScheduleError: ("forward graph of units root", ["all_gather 0 (unit 0): is started but never awaited", "b"]),
    errors.ScheduleDisagreementError: ("forward graph on group '0': ranks differ", (1,)),
    errors.CollectiveError: (
        *("layers.0", "all_gather", 30.0, "rank 1 gives no sign of life", (1,)),
        RuntimeError("Timed out"),
    ),
    errors.CompileCacheError: ("/caches/inductor", OSError(28, "No space left on device")),
    errors.UseBeforeWaitError: ("aten.mm", "all_gather", "layers.0", "  model.py:3"),
    errors.NotAUnitError: ("Linear",),
    errors.PrefetchError: ("layers.0", "a list of modules", "a Linear", "Pass [module]."),
    errors.PickledModuleError: ("Linear",),
    errors.ExportedModuleError: (),
    errors.HardwareError: ("hardware", "'h1000'", "one of a100, h100"),
    errors.ExplainError: ("Linear: expected a sharded model, found none.",),
    errors.CostValueError: ("length", 0, "a number of at least 1"),
}


def test_every_class_has_an_example_here_and_every_error_is_an_fsdp_error() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    warnings = {value for value in classes if issubclass(value, Warning)}
    names = {value.__name__ for value in warnings}
    assert names == {
        "CudaGraphsWarning",
        "ForeignBackendWarning",
        "NothingShardedWarning",
        "OneQueueWarning",
        "ScheduleWarning",
        "UncheckedGraphsWarning",
    }
    assert classes - warnings - {FsdpError} == EXAMPLES.keys()
    assert all(issubclass(value, FsdpError) for value in EXAMPLES)


@pytest.mark.parametrize("error", EXAMPLES)
def test_errors_are_also_of_the_builtin_kind_that_fits(error: type[FsdpError]) -> None:
    builtin = (ValueError, RuntimeError, NotImplementedError, AssertionError)
    assert issubclass(error, builtin)
    assert (error.__doc__ or "").strip()
    with pytest.raises(FsdpError):
        raise error(*EXAMPLES[error])


def test_golden_texts() -> None:
    texts = "\n".join(f"[{error.__name__}]\n{error(*arguments)}" for error, arguments in EXAMPLES.items())
    assert_expected_inline(
        folded(texts.replace("…", "...")),  # expecttest writes ASCII only
        """\
[NoProcessGroupError]
fully_shard: expected an initialized process group, found none. Call torch.distributed.init_process_group() first
        (torchrun sets its environment variables), or pass a mesh made by init_device_mesh().
[ProcessGroupGoneError]
unit 'layers.0': expected the process group over which it was sharded, found that it was destroyed. Forward,
        backward and unshard() communicate: call torch.distributed.destroy_process_group() behind them.
[AlreadyShardedError]
Block: expected a module that is not yet a unit, found one that fully_shard has already been called on. Call
        fully_shard once per module; a nested module can be a unit of its own.
[WrapOrderError]
Linear: expected children to be sharded before their parents, found that the unit 'layers.0' already owns its
        parameter 'weight'. Call fully_shard on the innermost modules first and on the root last.
[ForeignDTensorError]
head.weight: expected a plain tensor to shard on mesh (2,), found a DTensor on mesh (4,) as (Replicate(),). Shard
        each parameter with one library only; to leave this one as it is, pass it in ignored_params. With tensor
        parallelism, pass another dimension of the same mesh with named dimensions, for example mesh['dp'].
[NoForwardError]
layers (ModuleList): expected a module with a forward of its own, found a container, whose hooks never run. Shard
        its children (units=['<path>.*']), or the module that holds it.
[PhaseError]
unit 'layers.0': expected a phase that can follow 'backward', found 'forward'. A forward or backward of this unit
        began while another was running, for instance on another thread.
[UnitInUseError]
unit 'layers.0': expected reshard() outside of its forward and backward, found its forward running. Its parameters
        are still read. Call reshard() behind it.
[StaleParametersError]
unit 'layers.0': expected the parameters of the forward, found that they were written since (an optimizer's step
        between forward and backward?). Gradients would be wrong. Run the backward before it.
[OffloadedDeviceError]
layers.0.weight: expected its shards on the CPU, as offload_policy=CPUOffloadPolicy() has it, found them on cuda:0.
        Gathered parameters and buffers are on the device by themselves: move the model back with model.to('cpu'),
        initialize it with to_empty(device='cpu') or load a state dict that is on the CPU; or leave offload_policy
        out.
[DeviceError]
unit 'layers.0': expected its parameters on cuda:0, as those of the units that ran before, found them on cpu. All
        units under one root share a communication stream: move the model as a whole.
[MeshError]
mesh: expected a DeviceMesh with one dimension, or two (replicas, shards), found one with 3 dimensions,
        ('replicate', 'shard', 'tensor'). Take these of it, for example mesh['shard'] or mesh['replicate', 'shard'].
[UnsupportedArgumentError]
dp_mesh_dims: found 'shard', which is not supported. Pass mesh['shard'].
[UnsupportedParameterError]
scale: expected a parameter that can be split along dimension 0, found a scalar. Give it the shape (1,).
[ShardPlacementError]
head.weight: expected shard_placement_fn to return a dimension of its shape (8, 5) that 2 ranks divide, found
        Shard(dim=1). Let it return None for this parameter, which shards it along dimension 0.
[IntegerParameterError]
table: expected a floating-point dtype because the parameter requires a gradient, found torch.int64. Freeze it with
        requires_grad_(False), or store it as a buffer.
[CapturedParameterError]
weight_ih_l0: expected the module's parameter table to hold its only reference, found another one in the attribute
        '_flat_weights' of lstm, which would go on reading the unsharded weight. Read the parameter by its name
        instead, or pass it in ignored_params.
[UnitPatternError]
units: expected every pattern to match a module, found no match for 'blocks.*'. Modules with parameters: layers.0,
        layers.1, layers.2, layers.3, layers.4, layers.5, layers.6, layers.7, layers.8, layers.9, layers.10,
        layers.11, .... '*' matches within one part of a path, '**' any number of parts.
[UnknownOptionError]
prefech: expected one of the options prefetch, verify, found 'prefech'. Did you mean 'prefetch'?
[OptionValueError]
prefetch: expected an integer of at least 1, found 0.
[TraceFileError]
rank0.json: expected a Chrome trace of torch.profiler, found an empty file. Record it again.
[MutatedParameterError]
layers.0.weight: expected a parameter that is only read while gathered, found that it is modified in place: by the
        forward (an embedding with max_norm, for instance), or by hand behind unshard(). The change would be lost
        when the gathered weight is released. Modify the sharded parameter, as an optimizer does: outside of the
        forward, and behind reshard() where unshard() was called.
[ReplacedParameterError]
head.weight: expected the DTensor of shape (8, 4) that fully_shard made, or one like it in its place, found a whole
        tensor of shape (8, 4). Replace parameters before fully_shard, or copy values into them. Whole tensors are
        loaded with set_model_state_dict(..., options=StateDictOptions(full_state_dict=True)).
[ComplexParameterError]
filter.weight: expected parameters of real numbers in compiled code, found torch.complex64, which collectives in
        graphs do not take. Train without torch.compile, or keep the parameter as pairs of real numbers and read it
        through torch.view_as_complex.
[ForwardModeError]
unit 'layers.0': expected inputs of compiled code without tangents, found some of torch.autograd.forward_ad, which
        compiled code does not carry on. Call the model uncompiled there, or use torch.func.jvp, in which it runs
        uncompiled.
[ScheduleError]
forward graph of units root: expected a schedule that keeps every invariant, found 2 violation(s):
  - all_gather 0 (unit 0): is started but never awaited
  - b
This is a defect of fsdp_passes or of an Inductor option that reorders kernels; please report it with the graph.
        options={'verify': False} runs the graph unchecked.
[ScheduleDisagreementError]
forward graph on group '0': ranks differ
[CollectiveError]
unit 'layers.0': expected every rank to take part in its all_gather, waited 30.0 s and found: rank 1 gives no sign
        of life. See that rank's log; all ranks must run as many steps, in an evaluation too.
        options={'collective_timeout_s': ...} or model.set_collective_timeout(...) waits longer. The process group
        says: Timed out
[CompileCacheError]
compile cache /caches/inductor: expected a folder in which this process can create and write files, found: [Errno
        28] No space left on device. Generated code goes through it. Make room or give write permission there, or
        set the environment variable TORCHINDUCTOR_CACHE_DIR to another folder. Other ranks that did compile wait
        for this one until agreement_timeout_s.
[UseBeforeWaitError]
aten.mm: expected the all_gather of unit 'layers.0' to be awaited before its result is read, found it still on its
        way. Wait for it first. The reader:
  model.py:3
[NotAUnitError]
Linear: expected a module that fully_shard was called on, found one that is no unit. Call fully_shard on it, or name
        the unit that owns its parameters.
[PrefetchError]
unit 'layers.0': expected a list of modules to gather ahead, found a Linear. Pass [module].
[PickledModuleError]
Linear: expected state_dict() to be saved, found the sharded module itself. It holds process groups, which live in
        one run only. Save the state with torch.distributed.checkpoint and load it into a model that is built and
        sharded anew.
[ExportedModuleError]
torch.export: expected a model that is not sharded, found one whose parameters are gathered while it runs. Export a
        model that was built anew, with the values of get_model_state_dict(model,
        options=StateDictOptions(full_state_dict=True)).
[HardwareError]
hardware: expected one of a100, h100, found 'h1000'.
[ExplainError]
Linear: expected a sharded model, found none.
[CostValueError]
length: expected a number of at least 1, found 0.""",
    )


def test_a_schedule_error_holds_the_problems() -> None:
    assert errors.ScheduleError("here", ["first", "second"]).problems == ("first", "second")


def test_long_lists_of_modules_are_cut_and_short_ones_shown_whole() -> None:
    assert "layers.11, …. '*'" in str(errors.UnitPatternError("c", [f"layers.{i}" for i in range(13)]))
    assert "Modules with parameters: a, b. '*'" in str(errors.UnitPatternError("c", ["a", "b"]))
