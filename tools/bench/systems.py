"""The systems that are compared: each one trains the same model on the same batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.communication import BACKENDS_OWN, OURS, Collectives, CommunicationAlone
from bench.models import Shape
from bench.simple_fsdp import shard_by_parametrization
from fsdp_passes import fully_shard, overlap_fsdp

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass
class Setting:
    """What all systems of one measurement share.

    Attributes:
        shape: the model and the batch of one rank.
        mesh: all ranks.
        reduce_dtype: of the gradients' reduce-scatter.
        optimizer: "none": a step is forward and backward; "adamw": and a fused AdamW step on this rank's shards.
    """

    shape: Shape
    mesh: DeviceMesh
    device: torch.device
    reduce_dtype: torch.dtype
    optimizer: str = "none"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        # Inputs come in the compute's dtype; casting them would also round the angles of the rotary positions.
        return MixedPrecisionPolicy(
            param_dtype=self.shape.compute_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )


class System:
    """One way to train `model`.

    Attributes:
        call: computes the loss of a batch; the compiled model or the model itself.
    """

    def __init__(self, setting: Setting, model: nn.Module, call: Callable[..., Tensor]) -> None:
        self.setting, self.model, self.call = setting, model, call
        self.optimizer = None
        if setting.optimizer == "adamw":
            # A rate so small that losses stay comparable over the timed steps.
            self.optimizer = torch.optim.AdamW(
                self.trained(), lr=1e-8, weight_decay=0.0, fused=setting.device.type == "cuda"
            )

    def trained(self) -> list[Tensor]:
        """What the optimizer steps: this rank's shards."""
        return list(self.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """The step that is timed; returns the loss, detached."""
        loss = self.call(*batch)
        loss.backward()
        if self.optimizer is not None:
            self.hand_out_gradients()
            self.optimizer.step()
        self.clear_gradients()
        return loss.detach()

    def hand_out_gradients(self) -> None:
        """Give `trained()` their gradients; sharded parameters have them already."""

    def clear_gradients(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def train_step(self, batch: Batch, lr: float | None) -> tuple[Tensor, float]:
        """One step of plain gradient descent, to check the values: the loss, and the rate that was used."""
        assert lr is not None
        loss = self.call(*batch)
        loss.backward()
        torch.optim.SGD(self.model.parameters(), lr=lr).step()
        self.clear_gradients()
        return loss.detach(), lr


class ComputeAlone(System):
    """The whole model on each rank, compiled, without communication: the floor of a step's time.

    The fp32 masters are there until `drop_masters`; only `train_step` needs them.
    """

    def __init__(self, setting: Setting) -> None:
        model = setting.shape.make(setting.device)
        self.collectives = Collectives(setting.mesh)
        with torch.no_grad():
            for param in model.parameters():
                # The same on real ranks; on emulated ones the weights that all sharded systems compute with.
                param.copy_(self.collectives.gather(self.collectives.own_rows(param)))
        self.masters = [param.detach().clone() for param in model.parameters()]
        _cast_parameters(model, setting.shape.compute_dtype)
        self._shares: list[Tensor] = []
        if setting.optimizer == "adamw":
            self._shares = [self.collectives.own_rows(master).clone() for master in self.masters]
        super().__init__(setting, model, torch.compile(model))

    def trained(self) -> list[Tensor]:
        """As many elements as a sharded system's optimizer steps; they are not written back to the whole weights."""
        return self._shares

    def hand_out_gradients(self) -> None:
        for share, param in zip(self._shares, self.model.parameters(), strict=True):
            assert param.grad is not None
            share.grad = self.collectives.own_rows(param.grad).to(share.dtype)

    def train_step(self, batch: Batch, lr: float | None) -> tuple[Tensor, float]:
        """As the base class, on the ranks' mean gradient. Without `lr`: one that lowers the loss by about a tenth."""
        loss = self.call(*batch)
        loss.backward()
        grads = []
        for param in self.model.parameters():
            assert param.grad is not None
            rows = self.collectives.mean_of_own_rows(param.grad.to(self.setting.reduce_dtype))
            grads.append(self.collectives.gather(rows).float())
            param.grad = None
        if lr is None:
            mean_loss = self.collectives.mean(loss.detach().float())
            lr = 0.1 * mean_loss.item() / sum(float(grad.square().sum()) for grad in grads)
        with torch.no_grad():
            for master, grad, param in zip(self.masters, grads, self.model.parameters(), strict=True):
                master.sub_(grad, alpha=lr)
                param.copy_(master)
        return loss.detach(), lr

    def drop_masters(self) -> None:
        self.masters = []


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: the table of angles stays in fp32, as under FSDP."""
    for param in model.parameters():
        param.data = param.data.to(dtype)


# ---- the sharded systems ---------------------------------------------------------------------------------------------


def _fsdp2(setting: Setting, *, compile_layers: bool, keep_last: bool = False) -> System:
    model: Any = setting.shape.make(setting.device)
    for layer in model.layers:
        reshard = not (keep_last and layer is model.layers[-1])
        fsdp2.fully_shard(layer, mesh=setting.mesh, mp_policy=setting.policy, reshard_after_forward=reshard)
        if compile_layers:
            layer.compile()
    fsdp2.fully_shard(model, mesh=setting.mesh, mp_policy=setting.policy)
    return System(setting, model, model)


def _simple_fsdp(setting: Setting, *, options: dict[str, Any]) -> System:
    model = shard_by_parametrization(
        setting.shape.make(setting.device),
        setting.mesh,
        param_dtype=setting.shape.compute_dtype,
        reduce_dtype=setting.reduce_dtype,
    )
    return System(setting, model, torch.compile(model, fullgraph=True, options=options or None))


def inductor_overlap_options() -> dict[str, Any]:
    """Inductor's own bucketing and overlap scheduling, as far as this release has them."""
    from torch._inductor import config

    wanted = {
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "aten_distributed_optimizations.collective_bucketing": True,
        "aten_distributed_optimizations.insert_overlap_deps": True,
    }
    known = config.get_config_copy()
    return {name: value for name, value in wanted.items() if name in known}


def _ours(setting: Setting, *, options: dict[str, Any] | None, keep_last: bool = False) -> System:
    model: Any = setting.shape.make(setting.device)
    for layer in model.layers:
        reshard = not (keep_last and layer is model.layers[-1])
        fully_shard(layer, mesh=setting.mesh, mp_policy=setting.policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=setting.mesh, mp_policy=setting.policy)
    call = model if options is None else torch.compile(model, backend=overlap_fsdp, options=options)
    return System(setting, model, call)


BUILDERS: dict[str, Callable[[Setting], Any]] = {
    "compute": ComputeAlone,
    "communication": lambda s: CommunicationAlone(s.shape, s.mesh, s.device, s.reduce_dtype, starts=BACKENDS_OWN),
    "communication_ours": lambda s: CommunicationAlone(s.shape, s.mesh, s.device, s.reduce_dtype, starts=OURS),
    "fsdp2_eager": lambda s: _fsdp2(s, compile_layers=False),
    "fsdp2": lambda s: _fsdp2(s, compile_layers=True),
    "fsdp2_last_kept": lambda s: _fsdp2(s, compile_layers=True, keep_last=True),
    "simple_fsdp": lambda s: _simple_fsdp(s, options={}),
    "simple_fsdp_overlap": lambda s: _simple_fsdp(s, options=inductor_overlap_options()),
    "eager": lambda s: _ours(s, options=None),
    "compiled": lambda s: _ours(s, options={}),
    "compiled_packed": lambda s: _ours(s, options={"bucket_mode": "packed"}),
    "compiled_two_streams": lambda s: _ours(s, options={"unify_communication_stream": False}),
    "compiled_saved": lambda s: _ours(s, options={"recompute_elementwise": False}),
    "compiled_last_kept": lambda s: _ours(s, options={}, keep_last=True),
    "compiled_prefetch2": lambda s: _ours(s, options={"prefetch": 2}),
}


def destroy() -> None:
    """Forget compiled code and the default group."""
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
