"""FsdpUnit: what one `fully_shard` call owns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_passes.errors import ProcessGroupGoneError
from fsdp_passes.mesh import num_replicas, send_to_replicas
from fsdp_passes.parameter import FsdpParameter, GradientSink
from fsdp_passes.regions import new_label

if TYPE_CHECKING:
    from fsdp_passes.context import FsdpContext, Phase
    from fsdp_passes.scalar import FsdpScalar

ROOT_LABEL = "root"

# What a copy shares with the original, and what it copies; all the rest begins as in a new unit.
_SETTINGS = {"mesh", "mp_policy", "reshard_after_forward", "name", "is_root", "syncs_gradients", "unshards_in_backward"}
_SETTINGS |= {"reshards_after_backward", "divide_factor", "reduces_replicas", "kept_group"}
_COPIED = ("module", "params", "scalars", "borrows_from", "forward_prefetch", "backward_prefetch")


@dataclasses.dataclass(eq=False)
class FsdpUnit:
    """A module, the parameters that one all-gather brings together for it, and how they are treated.

    Attributes:
        module: the module that `fully_shard` was called on.
        params: the parameters that this unit owns, in module order, each once.
        name: path of `module` in the outermost sharded module; "" for that module itself.
        is_root: whether no sharded module contains this one.
        reshard_after_forward: None leaves the choice to `reshards_after_forward`.
        kept_group: the ranks over which parameters stay sharded between forward and backward; None: all.
        context: shared with the root and every unit nested in it.
        label: this unit's identity as data for compiled graphs (see `regions.new_label`).
    """

    module: nn.Module
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None
    params: list[FsdpParameter]
    context: FsdpContext
    name: str = ""
    is_root: bool = True
    kept_group: dist.ProcessGroup | None = None
    # What the eager fallback knows of the unit. The versions of the shards that were gathered (None: not gathered): an
    # optimizer's step changes them, and the gathered values are then old; and those of the last forward, and of what a
    # forward kept on fewer ranks. The wait of a
    # gather on its way. The parameters whose gradients are complete in this backward, whether they are reduced, and
    # whether the gradients of the unit's inputs are made. The units to gather ahead, None for the order seen before.
    # Whether a compiled forward of the unit has begun and not ended: eager code that runs meanwhile runs behind a graph
    # break.
    gathered_versions: list[tuple[int, ...]] | None = None
    forward_versions: list[tuple[int, ...]] | None = None
    kept_versions: list[tuple[int, ...]] | None = None
    pending_gather: Callable[[], None] | None = None
    ready_grads: set[FsdpParameter] = dataclasses.field(default_factory=set)
    accumulating: set[FsdpParameter] = dataclasses.field(default_factory=set)  # parameters with `accumulated_grad`
    # Parameters with `partial_grad`: it waits for the all-reduce over the replicas.
    accumulating_partially: set[FsdpParameter] = dataclasses.field(default_factory=set)
    are_grads_reduced: bool = False
    has_input_grads: bool = False
    forward_prefetch: list[FsdpUnit] | None = None
    backward_prefetch: list[FsdpUnit] | None = None
    is_in_compiled_forward: bool = False
    # Whether its forward runs between two graphs and no eager code has read a parameter yet: the forward may still turn
    # out to be compiled.
    may_run_eagerly: bool = False
    # Whether a method of its module runs that gathers like a forward, and so for forwards inside of it.
    is_in_method: bool = False
    # Whether the user's `unshard()` gathered it and `reshard()` did not come yet.
    is_held: bool = False
    # Whether a backward left it gathered on purpose, for the forward that follows.
    is_kept: bool = False
    # Units that own a parameter to which a module of this unit refers too (a tied head): the fallback gathers them with
    # this one.
    borrows_from: list[FsdpUnit] = dataclasses.field(default_factory=list)
    # Whether activation checkpointing runs its forward again, in a backward.
    is_recomputed: bool = False
    # How many regions of profilers were open where its forward began: one that raises leaves its own open.
    num_regions_around: int = 0
    # What the methods of `FsdpModule` set. Whether a backward reduces the gradients or only adds them up, whether it
    # reduces them over the replicas too, whether it gathers the parameters, and whether it releases them; what the sum
    # over the ranks is divided by, None for their number.
    syncs_gradients: bool = True
    reduces_replicas: bool = True
    unshards_in_backward: bool = True
    reshards_after_backward: bool = True
    divide_factor: float | None = None
    # Parameters without dimensions: in no gather, since every rank has them whole.
    scalars: list[FsdpScalar] = dataclasses.field(default_factory=list)
    label: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.label = new_label(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpUnit:
        """A unit of its own with the same settings: graphs must not take it for the original. It rests."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        fields = {
            field.name: field for field in dataclasses.fields(self) if field.name not in (*_COPIED, "context", "label")
        }
        for name, field in fields.items():
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            setattr(new, name, getattr(self, name) if name in _SETTINGS else made)
        for name in _COPIED:
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.context = copy.deepcopy(self.context, memo)
        new.context.units = [memo[id(unit)] for unit in self.context.units if id(unit) in memo]
        new.label = new_label(new)
        return new

    @property
    def is_unsharded(self) -> bool:
        """Whether eager code may read the whole parameters now."""
        return self.gathered_versions is not None and self.pending_gather is None

    @property
    def kept_world_size(self) -> int:
        """Ranks in `kept_group`; 0 without one."""
        return 0 if self.kept_group is None else self.kept_group.size()

    @property
    def reshards_after_forward(self) -> bool:
        """Whether gathered parameters are dropped between forward and backward; by default all units but the root,
        whose parameters would be gathered again at once."""
        return (not self.is_root) if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def graph_constants(self) -> tuple[object, ...]:
        """What a compiled graph takes for constant of a unit; see `FsdpParameter.graph_constants`."""
        return self.reshards_after_forward, self.kept_world_size, self.divide_factor

    @property
    def accumulates_grads(self) -> bool:
        """Whether the next backward's gradients are added to others before they are reduced: gradient sync is off, or
        it was, and what was accumulated is reduced together with them."""
        return not self.syncs_gradients or bool(self.accumulating)

    @property
    def gradient_sink(self) -> GradientSink:
        """Where compiled graphs send gradients that they could reduce."""
        if self.accumulates_grads:
            return GradientSink.WHOLE
        if (not self.reduces_replicas or self.accumulating_partially) and num_replicas(self.mesh) > 1:
            return GradientSink.PARTIAL
        return GradientSink.SHARD

    @property
    def display_name(self) -> str:
        """The name in labels and messages."""
        return self.name or ROOT_LABEL

    def is_borrowed_in(self, phase: Phase) -> bool:
        """Whether a unit in `phase` reads a parameter of this one."""
        context = self.context
        return any(self in other.borrows_from and context.phase(other) is phase for other in context.units)

    def check_group(self) -> None:
        """Raise `ProcessGroupGoneError` when the unit cannot communicate any more."""
        if not dist.is_initialized():
            raise ProcessGroupGoneError(self.display_name)

    def sync_replicas(self) -> None:
        """Overwrite the parameters of all replicas with those of the first. Every rank calls it."""
        with torch.no_grad():
            shards = [param.shard() for param in self.params] + [scalar.shard() for scalar in self.scalars]
            send_to_replicas(shards, self.mesh)

    def rename(self, name: str, *, is_root: bool) -> None:
        """Called when a surrounding module is sharded: only then is the path from the root known."""
        self.name = name
        self.is_root = is_root


def unit_of(module: nn.Module) -> FsdpUnit | None:
    """The unit whose `fully_shard` call was on this very module."""
    return module.__dict__.get("_fsdp_unit")
