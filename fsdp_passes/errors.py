"""One class per kind of mistake.

Every message says what was expected, what was found and what to do. The parameter or unit comes first, so that the
line is useful even when a log cuts it short.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FsdpError(Exception):
    """Base class of every error that this library raises."""


class NoProcessGroupError(FsdpError, RuntimeError):
    """`fully_shard` was called before `torch.distributed` was initialized."""

    def __init__(self) -> None:
        super().__init__(
            "fully_shard: expected an initialized process group, found none. Call "
            "torch.distributed.init_process_group() first (torchrun sets its environment variables), or pass a mesh "
            "made by init_device_mesh()."
        )


class ProcessGroupGoneError(FsdpError, RuntimeError):
    """A sharded model is to communicate, and its process group was destroyed."""

    def __init__(self, unit: str) -> None:
        super().__init__(
            f"unit {unit!r}: expected the process group over which it was sharded, found that it was destroyed. "
            "Forward, backward and unshard() communicate: call torch.distributed.destroy_process_group() behind them."
        )


class AlreadyShardedError(FsdpError, ValueError):
    """`fully_shard` was called twice on one module."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module}: expected a module that is not yet a unit, found one that fully_shard has already been called "
            "on. Call fully_shard once per module; a nested module can be a unit of its own."
        )


class WrapOrderError(FsdpError, ValueError):
    """A module was sharded after a parent had already taken its parameters."""

    def __init__(self, module: str, parameter: str, owner: str) -> None:
        super().__init__(
            f"{module}: expected children to be sharded before their parents, found that the unit '{owner}' already "
            f"owns its parameter '{parameter}'. Call fully_shard on the innermost modules first and on the root last."
        )


class ForeignDTensorError(FsdpError, ValueError):
    """A parameter is already a DTensor that this library did not make."""

    def __init__(self, parameter: str, found: str, expected: str) -> None:
        super().__init__(
            f"{parameter}: expected a plain tensor to shard on mesh {expected}, found a DTensor on {found}. Shard each "
            "parameter with one library only; to leave this one as it is, pass it in ignored_params. With tensor "
            "parallelism, pass another dimension of the same mesh with named dimensions, for example mesh['dp']."
        )


class ReplacedParameterError(FsdpError, ValueError):
    """Something that is no shard was put in a sharded parameter's place."""

    def __init__(self, parameter: str, shape: object, found: str) -> None:
        super().__init__(
            f"{parameter}: expected the DTensor of shape {shape} that fully_shard made, or one like it in its place, "
            f"found {found}. Replace parameters before fully_shard, or copy values into them. Whole tensors are loaded "
            "with set_model_state_dict(..., options=StateDictOptions(full_state_dict=True))."
        )


class MeshError(FsdpError, ValueError):
    """The mesh has a shape that is not supported."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"mesh: expected a DeviceMesh with one dimension, or two (replicas, shards), found {found}. Take these of "
            "it, for example mesh['shard'] or mesh['replicate', 'shard']."
        )


class PhaseError(FsdpError, RuntimeError):
    """A unit was to enter a phase that cannot follow the one it is in."""

    def __init__(self, unit: str, before: str, after: str) -> None:
        super().__init__(
            f"unit {unit!r}: expected a phase that can follow {before!r}, found {after!r}. A forward or backward of "
            "this unit began while another was running, for instance on another thread."
        )


class UnitInUseError(FsdpError, RuntimeError):
    """Memory was to be released that a running forward or backward still reads."""

    def __init__(self, unit: str, phase: str) -> None:
        super().__init__(
            f"unit {unit!r}: expected reshard() outside of its forward and backward, found its {phase} running. "
            "Its parameters are still read. Call reshard() behind it."
        )


class StaleParametersError(FsdpError, RuntimeError):
    """A backward meets parameters that were written since its forward."""

    def __init__(self, unit: str) -> None:
        super().__init__(
            f"unit {unit!r}: expected the parameters of the forward, found that they were written since (an "
            "optimizer's step between forward and backward?). Gradients would be wrong. Run the backward before it."
        )


class DeviceError(FsdpError, ValueError):
    """Units of one model are on different devices."""

    def __init__(self, unit: str, expected: str, found: str) -> None:
        super().__init__(
            f"unit {unit!r}: expected its parameters on {expected}, as those of the units that ran before, found them "
            f"on {found}. All units under one root share a communication stream: move the model as a whole."
        )


class OffloadedDeviceError(FsdpError, RuntimeError):
    """The shards of an offloaded parameter were moved to a device."""

    def __init__(self, parameter: str, found: str) -> None:
        super().__init__(
            f"{parameter}: expected its shards on the CPU, as offload_policy=CPUOffloadPolicy() has it, found them on "
            f"{found}. Gathered parameters and buffers are on the device by themselves: move the model back with "
            "model.to('cpu'), initialize it with to_empty(device='cpu') or load a state dict that is on the CPU; or "
            "leave offload_policy out."
        )


class NoForwardError(FsdpError, ValueError):
    """A container without a forward was to become a unit."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module}: expected a module with a forward of its own, found a container, whose hooks never run. "
            "Shard its children (units=['<path>.*']), or the module that holds it."
        )


class UnsupportedArgumentError(FsdpError, NotImplementedError):
    """A keyword of FSDP2 that is accepted by name but has no support yet."""

    def __init__(self, argument: str, found: object, instead: str) -> None:
        super().__init__(f"{argument}: found {found!r}, which is not supported. {instead}")


class UnsupportedParameterError(FsdpError, ValueError):
    """A parameter that cannot be sharded by rows."""

    def __init__(self, parameter: str, found: str, instead: str) -> None:
        super().__init__(
            f"{parameter}: expected a parameter that can be split along dimension 0, found {found}. {instead}"
        )


class ShardPlacementError(FsdpError, ValueError):
    """`shard_placement_fn` names a placement that the parameter cannot have."""

    def __init__(self, parameter: str, found: str, expected: str) -> None:
        super().__init__(
            f"{parameter}: expected shard_placement_fn to return {expected}, found {found}. Let it return None for "
            "this parameter, which shards it along dimension 0."
        )


class IntegerParameterError(FsdpError, ValueError):
    """A parameter of an integer dtype asks for a gradient."""

    def __init__(self, parameter: str, dtype: object) -> None:
        super().__init__(
            f"{parameter}: expected a floating-point dtype because the parameter requires a gradient, found {dtype}. "
            "Freeze it with requires_grad_(False), or store it as a buffer."
        )


class ComplexParameterError(FsdpError, NotImplementedError):
    """Compiled code reads a parameter of complex numbers."""

    def __init__(self, parameter: str, dtype: object) -> None:
        super().__init__(
            f"{parameter}: expected parameters of real numbers in compiled code, found {dtype}, which collectives in "
            "graphs do not take. Train without torch.compile, or keep the parameter as pairs of real numbers and read "
            "it through torch.view_as_complex."
        )


class ForwardModeError(FsdpError, NotImplementedError):
    """Compiled code is called with tensors that carry tangents of forward-mode differentiation."""

    def __init__(self, unit: str) -> None:
        super().__init__(
            f"unit {unit!r}: expected inputs of compiled code without tangents, found some of "
            "torch.autograd.forward_ad, which compiled code does not carry on. Call the model uncompiled there, or use "
            "torch.func.jvp, in which it runs uncompiled."
        )


class CapturedParameterError(FsdpError, ValueError):
    """A module keeps a second reference to a parameter, which sharding could not replace."""

    def __init__(self, parameter: str, module: str, attribute: str) -> None:
        super().__init__(
            f"{parameter}: expected the module's parameter table to hold its only reference, found another one in the "
            f"attribute '{attribute}' of {module}, which would go on reading the unsharded weight. Read the parameter "
            "by its name instead, or pass it in ignored_params."
        )


class UnitPatternError(FsdpError, ValueError):
    """A pattern in `units=` names no module."""

    def __init__(self, pattern: str, available: Sequence[str]) -> None:
        shown = ", ".join(available[:12]) + (", …" if len(available) > 12 else "")
        super().__init__(
            f"units: expected every pattern to match a module, found no match for '{pattern}'. Modules with "
            f"parameters: {shown}. '*' matches within one part of a path, '**' any number of parts."
        )


class UnknownOptionError(FsdpError, ValueError):
    """An option of the backend that does not exist."""

    def __init__(self, name: str, valid: Iterable[str]) -> None:
        names = sorted(valid)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(f"{name}: expected one of the options {', '.join(names)}, found '{name}'.{hint}")


class OptionValueError(FsdpError, ValueError):
    """An option of the backend has a value outside its range."""

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(f"{name}: expected {expected}, found {found!r}.")


class TraceFileError(FsdpError, ValueError):
    """A file that was to be read as a trace is none."""

    def __init__(self, path: object, found: str, instead: str) -> None:
        super().__init__(f"{path}: expected a Chrome trace of torch.profiler, found {found}. {instead}")


class MutatedParameterError(FsdpError, RuntimeError):
    """Gathered values of a parameter were written, by a forward or behind `unshard()`; they are lost when released."""

    def __init__(self, parameter: str) -> None:
        super().__init__(
            f"{parameter}: expected a parameter that is only read while gathered, found that it is modified in "
            "place: by the forward (an embedding with max_norm, for instance), or by hand behind unshard(). The change "
            "would be lost when the gathered weight is released. Modify the sharded parameter, as an optimizer does: "
            "outside of the forward, and behind reshard() where unshard() was called."
        )


class ScheduleError(FsdpError, AssertionError):
    """The schedule of a graph, or the final order of its kernels, breaks an invariant."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(
            f"{where}: expected a schedule that keeps every invariant, found {len(problems)} violation(s):\n{listed}\n"
            "This is a defect of fsdp_passes or of an Inductor option that reorders kernels; please report it with "
            "the graph. options={'verify': False} runs the graph unchecked."
        )


class ScheduleDisagreementError(FsdpError, RuntimeError):
    """Ranks are about to run graphs whose collectives do not belong together, or some rank runs none.

    Attributes:
        missing_ranks: global ranks that have not said what they run.
    """

    def __init__(self, message: str, missing_ranks: Sequence[int] = ()) -> None:
        self.missing_ranks = tuple(missing_ranks)
        super().__init__(message)

    @classmethod
    def differs(
        cls, where: str, place: int, sides: Sequence[tuple[str, Sequence[int]]], missing_ranks: Sequence[int]
    ) -> ScheduleDisagreementError:
        """`place`: index of the first collective that differs. `sides`: what is started there, and by which ranks."""
        found = "; ".join(f"{what} on {_ranks(ranks)}" for what, ranks in sides)
        return cls(
            f"{where}: expected every rank to start the same collectives in the same order, found that collective "
            f"{place} differs: {found}. Compile the same model with the same options and releases on every rank, and "
            "let no rank take a branch of its own.",
            missing_ranks,
        )

    @classmethod
    def no_answer(
        cls, where: str, missing_ranks: Sequence[int], timeout_s: float, first: str
    ) -> ScheduleDisagreementError:
        """`first`: the collective that the graph would start first."""
        return cls(
            f"{where}: expected every rank to be about to run it, found no answer from {_ranks(missing_ranks)} within "
            f"{timeout_s:g} s; the first collective would be the {first}. Such a rank has ended, has left the loop, "
            "runs other code, or is still compiling: see its log. options={'agreement_timeout_s': ...} waits longer.",
            missing_ranks,
        )


class CollectiveError(FsdpError, RuntimeError):
    """A collective failed: a rank has ended, or did not take part in it within the process group's timeout.

    Attributes:
        unit: name of the unit whose collective it was.
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        waited_s: seconds until the process group gave up.
        missing_ranks: global ranks that have ended or are somewhere else; () when they are not known.
    """

    def __init__(
        self, unit: str, collective: str, waited_s: float, found: str, missing_ranks: Sequence[int], error: Exception
    ) -> None:
        """`found`: what the other ranks do. `error`: what the process group raised."""
        self.unit, self.collective, self.waited_s = unit, collective, waited_s
        self.missing_ranks = tuple(missing_ranks)
        super().__init__(
            f"unit {unit!r}: expected every rank to take part in its {collective}, waited {waited_s:.1f} s and found: "
            f"{found}. See that rank's log; all ranks must run as many steps, in an evaluation too. "
            "options={'collective_timeout_s': ...} or model.set_collective_timeout(...) waits longer. The process "
            f"group says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16]) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class CompileCacheError(FsdpError, RuntimeError):
    """Inductor's cache folder cannot be written to: it is read-only, or the disk is full."""

    def __init__(self, folder: str, error: OSError) -> None:
        super().__init__(
            f"compile cache {folder}: expected a folder in which this process can create and write files, found: "
            f"{error}. Generated code goes through it. Make room or give write permission there, or set the "
            "environment variable TORCHINDUCTOR_CACHE_DIR to another folder. Other ranks that did compile wait for "
            "this one until agreement_timeout_s."
        )


class UseBeforeWaitError(FsdpError, RuntimeError):
    """A collective's result is read while the collective may still write it."""

    def __init__(self, reader: str, collective: str, unit: str, where: str) -> None:
        super().__init__(
            f"{reader}: expected the {collective} of unit '{unit}' to be awaited before its result is read, found it "
            f"still on its way. Wait for it first. The reader:\n{where}"
        )


class NotAUnitError(FsdpError, ValueError):
    """A method that works on units was given another module."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module}: expected a module that fully_shard was called on, found one that is no unit. Call fully_shard "
            "on it, or name the unit that owns its parameters."
        )


class PrefetchError(FsdpError, ValueError):
    """Something else than units of one model was chosen to be gathered ahead."""

    def __init__(self, unit: str, expected: str, found: str, instead: str) -> None:
        super().__init__(f"unit {unit!r}: expected {expected} to gather ahead, found {found}. {instead}")


class PickledModuleError(FsdpError, NotImplementedError):
    """A sharded module was to be pickled."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"{module}: expected state_dict() to be saved, found the sharded module itself. It holds process groups, "
            "which live in one run only. Save the state with torch.distributed.checkpoint and load it into a model "
            "that is built and sharded anew."
        )


class ExportedModuleError(FsdpError, NotImplementedError):
    """A sharded module was to be exported."""

    def __init__(self) -> None:
        super().__init__(
            "torch.export: expected a model that is not sharded, found one whose parameters are gathered while it "
            "runs. Export a model that was built anew, with the values of get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True))."
        )


class CudaGraphsWarning(UserWarning):
    """CUDA graphs were asked for; the code of a sharded model is compiled without them."""


class OneQueueWarning(UserWarning):
    """The GPU has one hardware queue: collectives hide behind compute only by chance."""


class NothingShardedWarning(UserWarning):
    """A model without sharded parameters was compiled with `overlap_fsdp`."""


class ForeignBackendWarning(UserWarning):
    """A sharded model was compiled with a backend that does not gather its parameters."""


class ScheduleWarning(UserWarning):
    """A schedule computes the right values but hides less communication, or holds more memory, than it should."""


class UncheckedGraphsWarning(UserWarning):
    """NaN in released weights was asked for, and compiled graphs do not have it."""


class HardwareError(FsdpError, ValueError):
    """A description of hardware that does not fit."""

    def __init__(self, where: str, found: str, expected: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}.")


class ExplainError(FsdpError, RuntimeError):
    """`explain` cannot show what was asked for."""


class CostValueError(FsdpError, ValueError):
    """A cost is asked for at a size that it does not know, or that is out of range."""

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(f"{name}: expected {expected}, found {found}.")
