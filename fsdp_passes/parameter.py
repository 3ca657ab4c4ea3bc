"""FsdpParameter: the sharded, placeholder and unsharded faces of one parameter."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_passes._torch_compat import local_tensor, replace_local_tensor, without_version_bump
from fsdp_passes.errors import MutatedParameterError, OffloadedDeviceError, ReplacedParameterError
from fsdp_passes.layout import TensorParallel, part_of, scattered_from_whole, sharded_dtensor, whole_from_gathered
from fsdp_passes.mesh import num_replicas, num_shards, replica_group, shard_group, shard_index
from fsdp_passes.offload import Home

if TYPE_CHECKING:
    from fsdp_passes.unit import FsdpUnit


class GradientSink(enum.Enum):
    """Where a compiled graph sends a gradient."""

    SHARD = "reduced, to the sharded parameter"
    WHOLE = "as it is, to a tensor of the whole shape"
    PARTIAL = "reduced over the shards and not over the replicas, to a tensor that adds up such gradients"


def check_replacement(param: torch.Tensor, ours: torch.Tensor, name: str) -> None:
    """Raise `ReplacedParameterError` unless `param` may take the place of our DTensor."""
    if not isinstance(param, DTensor):
        raise ReplacedParameterError(name, tuple(ours.shape), f"a whole tensor of shape {tuple(param.shape)}")
    assert isinstance(ours, DTensor)
    if param.shape != ours.shape or param.placements != ours.placements:
        found = f"one of shape {tuple(param.shape)} as {param.placements}"
        raise ReplacedParameterError(name, tuple(ours.shape), found)


class FsdpParameter:
    """One parameter and its three faces.

    sharded      `DTensor(Shard(0))` in `module._parameters[name]`: what optimizers and checkpoints see. Its local rows
                 are a view of `padded_local`, which has ceil(dim0 / world) rows on every rank, so that every rank
                 compiles the same graph and no collective needs padding of its own. Along another `shard_dim` the
                 parts are equal, and each has all rows.
    placeholder  an `nn.Parameter` of the full shape in the compute dtype without storage: what Dynamo traces.
    unsharded    the same object as the placeholder while its storage holds the gathered values.
    """

    def __init__(
        self,
        param: nn.Parameter,
        name: str,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        shard_dim: int = 0,
        home: Home | None = None,
    ) -> None:
        self.name = name
        self.mesh = mesh
        # None: shards are where the parameter is computed with.
        self.home = home
        self.unit: FsdpUnit
        # Every (module, attribute) under which the parameter is known; more than one for tied parameters. The first
        # is where the current DTensor is read from, since `load_state_dict(assign=True)` and `to_empty` replace it.
        self.references: list[tuple[nn.Module, str]] = []
        self.world_size = num_shards(mesh)
        self.group_name: str = shard_group(mesh).group_name
        self.num_replicas = num_replicas(mesh)
        replicas = replica_group(mesh)
        self.replica_group_name: str = "" if replicas is None else replicas.group_name
        # A DTensor of tensor parallelism: what this rank has of it is the parameter to shard.
        self.tensor_parallel = TensorParallel.of(param)
        values = param.detach() if self.tensor_parallel is None else local_tensor(param).detach()
        self.full_shape = values.shape
        self.rows = values.shape[0]
        self.shard_dim = shard_dim
        self.mp_policy = mp_policy
        # The sum of this rank's gradients since gradient sync was switched off, full shape, in the reduction's dtype.
        self._accumulated_grad: torch.Tensor | None = None
        self._partial: nn.Parameter | None = None
        # This rank's rows among a part of the ranks, between forward and backward, in the compute dtype.
        self.kept_part: torch.Tensor | None = None
        self._gathered_address = 0  # of the placeholder's storage, as the context knows it
        self.num_adoptions = 0  # how often another DTensor took our place
        self._set_dtypes(param.dtype)

        rank = shard_index(mesh)
        self.padded_local = self._at_home(part_of(values, self.world_size, rank, shard_dim))
        self.shard_shape = self.padded_local.shape
        self.rows_per_rank = self.shard_shape[0]
        first = 0 if shard_dim else min(rank * self.rows_per_rank, self.rows)
        self.local_rows = min(first + self.rows_per_rank, self.rows) - first
        local = self.padded_local[: self.local_rows]
        sharded = sharded_dtensor(local, self.full_shape, mesh, shard_dim, self.tensor_parallel)
        self.adopted_param = nn.Parameter(sharded, requires_grad=param.requires_grad)
        self._adopted_local: torch.Tensor | None = local_tensor(self.adopted_param)
        self.placeholder = self._make_placeholder(self._device_of_gathered(values.device), param.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpParameter:
        """Another parameter with the same values, in the same group; nothing of it is gathered."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(self.__dict__, _accumulated_grad=None, _partial=None, _adopted_local=None)
        new.kept_part, new._gathered_address = None, 0
        for name in ("unit", "references", "adopted_param"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        # The placeholder has no values to copy. The shard takes those of the copied DTensor: `shard` adopts it, since
        # `_adopted_local` is none of its own.
        new.placeholder = new._make_placeholder(self.placeholder.device, self.placeholder.requires_grad)
        return new

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        """Integers and complex numbers are never cast."""
        self._graph_constants: tuple[object, ...] | None = None
        self._partial = None
        self.orig_dtype = dtype
        policy = self.mp_policy
        self.param_dtype = (policy.param_dtype or dtype) if dtype.is_floating_point else dtype
        self.reduce_dtype = (policy.reduce_dtype or self.param_dtype) if dtype.is_floating_point else dtype

    def _make_placeholder(self, device: torch.device, requires_grad: bool) -> nn.Parameter:
        data = torch.empty(self.full_shape, dtype=self.param_dtype, device=device)
        if device.type != "meta":
            data.untyped_storage().resize_(0)
        placeholder = nn.Parameter(data, requires_grad=requires_grad)
        placeholder._fsdp_parameter = self  # type: ignore[attr-defined]
        self._seen_version = placeholder._version
        return placeholder

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """Shape of what an all-gather makes: the shards of all ranks, one behind the other; padding comes last."""
        return (self.rows_per_rank * self.world_size, *self.shard_shape[1:])

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered tensor, padding included, in the compute dtype."""
        return math.prod(self.gathered_shape) * self.param_dtype.itemsize

    def face(self) -> torch.Tensor:
        """What the module's code reads while the parameter is whole."""
        if self.tensor_parallel is None:
            return self.placeholder
        with torch.enable_grad():  # who reads it under `no_grad` may compute with it outside of that
            return self.tensor_parallel.wrap(self.placeholder)

    def traced_face(self) -> torch.Tensor:
        """What the module's code reads while it is traced: a view, made in the graph (see `passes/unwrap_reads.py`).

        The compiler takes the placeholder itself from where it was found, whenever code outside of the graph gets it:
        returned, left in an object, handed to a function that is not traced. It is empty there, and reading it ends the
        process. What the graph has made comes out of the graph.
        """
        view = self.placeholder.view_as(self.placeholder)
        return view if self.tensor_parallel is None else self.tensor_parallel.wrap(view)

    @property
    def qualified_name(self) -> str:
        """`<unit>.<name>`, for messages."""
        return f"{self.unit.name}.{self.name}" if self.unit.name else self.name

    @property
    def sharded_param(self) -> nn.Parameter:
        """The DTensor that the module holds now."""
        module, name = self.references[0]
        param = module._parameters[name]
        assert param is not None
        return param

    def shard(self) -> torch.Tensor:
        """This rank's padded shard, shape (rows_per_rank, *rest), in the original dtype.

        Picks up a DTensor that replaced ours (`load_state_dict(assign=True)`, `to_empty`, `.to(dtype)`): its rows are
        copied into a padded buffer once, and from then on the DTensor is a view of that buffer again.
        """
        self.adopt_current()
        return self.padded_local

    def adopt_current(self) -> nn.Parameter:
        """The DTensor that the module holds now; afterwards its rows are those of `padded_local`."""
        module, name = self.references[0]
        param = module._parameters[name]
        assert param is not None
        if param is not self.adopted_param or local_tensor(param) is not self._adopted_local:
            check_replacement(param, self.adopted_param, self.qualified_name)
            self._adopt(param)
        return param

    def _adopt(self, param: nn.Parameter) -> None:
        local = local_tensor(param)  # type: ignore[arg-type]
        self.num_adoptions += 1
        if self.home is not None and local.device.type not in ("cpu", "meta"):
            raise OffloadedDeviceError(self.qualified_name, str(local.device))
        padded = self._at_home(local.new_zeros(self.shard_shape))
        padded[: self.local_rows].copy_(local.detach())
        device = self._device_of_gathered(local.device)
        if device != self.placeholder.device or local.dtype != self.orig_dtype:
            # The module moved (meta -> cuda, cpu -> cuda) or was cast: what Dynamo traces and guards must follow.
            self._set_dtypes(local.dtype)
            self.placeholder = self._make_placeholder(device, param.requires_grad)
            if self._gathered_address:
                self._note_address()  # the old placeholder's memory is gone
        self.padded_local = padded
        with torch.no_grad():
            replace_local_tensor(param, padded[: self.local_rows])
        self._adopted_local = local_tensor(param)  # type: ignore[arg-type]
        self.adopted_param = param
        for module, name in self.references:  # `to_empty` makes a new tensor for each reference of a tied parameter
            module._parameters[name] = param

    def _at_home(self, padded: torch.Tensor) -> torch.Tensor:
        """`padded` where shards live; itself where it is there already, and on meta, where there are no values."""
        if self.home is None or padded.device.type == "meta" or (padded.device.type == "cpu" and not self.home.pinned):
            return padded
        return self.home.zeros(padded.shape, padded.dtype).copy_(padded)

    def _device_of_gathered(self, shard_device: torch.device) -> torch.device:
        return shard_device if self.home is None else self.home.computes_on(shard_device)

    def sync_requires_grad(self) -> bool:
        """Make the placeholder follow the sharded parameter. True when it had to be changed."""
        wanted = self.sharded_param.requires_grad
        if self.placeholder.requires_grad == wanted:
            return False
        self.placeholder.requires_grad_(wanted)
        return True

    # ---- the unsharded face, for eager code --------------------------------------------------------------------------

    @property
    def values_version(self) -> tuple[int, ...]:
        """Changes whenever the shard's values may have: an optimizer's step, another DTensor in our place.

        Three counters, since a write through the DTensor does not reach its local tensor's counter, nor one through
        the local tensor the padded one's. Writes through `.data` have no counter at all: see `release_kept`.
        """
        padded, param = self.shard(), self.sharded_param
        return self.num_adoptions, param._version, local_tensor(param)._version, padded._version

    @property
    def graph_constants(self) -> tuple[object, ...]:
        """What a compiled graph takes for constant and no guard looks at; with `FsdpUnit.graph_constants`, it serves
        only parameters that agree.

        Read for every parameter on every call: kept until dtypes change.
        """
        if self._graph_constants is None:
            dtypes = (self.orig_dtype, self.param_dtype, self.reduce_dtype)
            self._graph_constants = (
                self.group_name,
                self.replica_group_name,
                self.shard_dim,
                self.rows,
                self.home,
                *dtypes,
            )
        return self._graph_constants

    def gradient_sink(self, *, is_last: bool) -> GradientSink:
        """Where a compiled graph sends the gradient.

        `is_last`: whether it is made at the end of the graph's backward, where the graph has nothing left that could
        hide its reduction.
        """
        if not self.placeholder.requires_grad:
            return GradientSink.SHARD
        return GradientSink.WHOLE if is_last else self.unit.gradient_sink

    def sink(self, kind: GradientSink) -> nn.Parameter | None:
        """The tensor without storage that a graph takes for its gradient; None where that is the shard."""
        if kind is GradientSink.SHARD:
            return None
        return self.placeholder if kind is GradientSink.WHOLE else self.partial

    @property
    def partial(self) -> nn.Parameter:
        """Takes gradients that are not reduced over the replicas: a parameter of the padded shard's shape in the
        reduction's dtype without storage, whose `.grad` is their sum."""
        if self._partial is None:
            data = torch.empty(self.padded_local.shape, dtype=self.reduce_dtype, device=self.placeholder.device)
            if data.device.type != "meta":
                data.untyped_storage().resize_(0)
            self._partial = nn.Parameter(data)
        return self._partial

    @property
    def partial_grad(self) -> torch.Tensor | None:
        """The sum of gradients that wait for the all-reduce over the replicas, shape (rows_per_rank, *rest), in the
        reduction's dtype."""
        return None if self._partial is None else self._partial.grad

    @partial_grad.setter
    def partial_grad(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            self.unit.accumulating_partially.discard(self)
            if self._partial is not None:
                self._partial.grad = None
        else:
            self.unit.accumulating_partially.add(self)
            self.partial.grad = grad

    @property
    def accumulated_grad(self) -> torch.Tensor | None:
        """The whole gradient of backwards without gradient sync, in the reduction's dtype."""
        return self._accumulated_grad

    @accumulated_grad.setter
    def accumulated_grad(self, grad: torch.Tensor | None) -> None:
        self._accumulated_grad = grad
        if grad is None:
            self.unit.accumulating.discard(self)
        else:
            self.unit.accumulating.add(self)

    def gathered_copy(self) -> torch.Tensor:
        """A copy of the gathered values as an all-gather makes them, shape `gathered_shape`."""
        if self.shard_dim:
            return scattered_from_whole(self.placeholder.detach(), self.world_size, self.shard_dim).clone()
        return self._stored(self.gathered_shape).clone()

    def _stored(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The placeholder's storage as one contiguous tensor, which may have more rows than the placeholder."""
        flat = torch.empty(0, dtype=self.param_dtype, device=self.placeholder.device)
        stride = torch.empty(shape, device="meta").stride()
        return flat.set_(self.placeholder.untyped_storage(), 0, shape, stride)  # type: ignore[call-overload,no-any-return]

    def gather_buffer(self, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Give the placeholder storage and return what to gather into: that storage, or where parts along another
        dimension come in, a tensor of their own, which `take_gathered` moves there.

        The placeholder keeps its object, shape and version counter: views of it that autograd saved in the forward
        read the values that the backward's gather writes here.

        `kept`: what this rank sends in place of its shard (see `keep_part`); its ranks' rows are padded otherwise.
        """
        shape = self.gathered_shape
        if kept is not None:
            shape = (kept.shape[0] * self.unit.kept_world_size, *kept.shape[1:])
        num_bytes = max(math.prod(shape), math.prod(self.gathered_shape)) * self.param_dtype.itemsize
        with without_version_bump(self.placeholder):
            self.placeholder.untyped_storage().resize_(num_bytes)
        self._note_address()
        if self.shard_dim and kept is None:
            return torch.empty(shape, dtype=self.param_dtype, device=self.placeholder.device)
        return self._stored(shape)

    def take_gathered(self, gathered: torch.Tensor) -> None:
        """What `gather_buffer` returned has its values: let the placeholder have them."""
        if gathered.untyped_storage().data_ptr() != self.placeholder.untyped_storage().data_ptr():
            whole = whole_from_gathered(gathered, self.world_size, self.shard_dim)
            with torch.no_grad(), without_version_bump(self.placeholder):
                self.placeholder.copy_(whole)

    def check_unwritten(self) -> None:
        """Raise `MutatedParameterError` if somebody wrote into the gathered values; gathers leave the counter alone."""
        version = self.placeholder._version
        if version != self._seen_version:
            self._seen_version = version
            raise MutatedParameterError(self.qualified_name)

    def keep_part(self) -> None:
        """Keep this rank's rows of the gathered values as one of the unit's `kept_world_size` ranks, for a gather over
        these in the backward."""
        unit = self.unit
        assert unit.kept_group is not None
        self.kept_part = part_of(self.placeholder.detach(), unit.kept_world_size, unit.kept_group.rank())

    def release(self) -> None:
        """Drop the gathered storage. The caller has made sure that no stream reads it any more."""
        self.placeholder.untyped_storage().resize_(0)
        self._note_address()

    def _note_address(self) -> None:
        addresses = self.unit.context.gathered_addresses
        addresses.discard(self._gathered_address)
        self._gathered_address = self.placeholder.untyped_storage().data_ptr()
        if self._gathered_address:
            addresses.add(self._gathered_address)


def fsdp_parameter_of(tensor: object) -> FsdpParameter | None:
    """The FsdpParameter behind a placeholder, found by the object itself."""
    return getattr(tensor, "_fsdp_parameter", None) if isinstance(tensor, torch.Tensor) else None


def fsdp_parameters_at(tensors: Sequence[Any], positions: Sequence[int]) -> list[FsdpParameter]:
    """The same for the placeholders at `positions`; nothing else may be there."""
    return [tensors[position]._fsdp_parameter for position in positions]
