"""Offload with two devices: graphs of fake tensors, whose shards are on the CPU and whose compute is on CUDA."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_passes import fully_shard
from fsdp_passes._torch_compat import local_tensor, replace_local_tensor
from fsdp_passes.division import backend_averages, group_averages
from fsdp_passes.errors import OffloadedDeviceError
from fsdp_passes.gather_ops import ALL_GATHER_AHEAD_OP, ALL_GATHER_OP
from fsdp_passes.home_ops import SEND_HOME
from fsdp_passes.offload import Home, Offloading
from fsdp_passes.ops import HOME, PINNED_HOME, REDUCE_GRAD, UNSHARD
from fsdp_passes.passes.bucket_all_gathers import bucket_all_gathers
from fsdp_passes.passes.bucket_reduce_scatters import bucket_reduce_scatters
from fsdp_passes.unit import unit_of
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import one_rank as one_rank

CUDA = torch.device("cuda", 0)


def _graph(group_name: str, pinned: bool) -> fx.GraphModule:
    """A product with a weight of 10 rows whose 2 padded rows on this rank are on the CPU, and its gradient. Written
    out: autograd itself runs on devices that are there."""
    groups = (8, group_name, group_name)
    how = (torch.float32, torch.float32, True, None, None, None, 1, "", 0, "", 0, CUDA, pinned)
    home = PINNED_HOME if pinned else HOME

    def step(shard: Tensor, x: Tensor) -> Tensor:
        weight = UNSHARD(shard, None, 0, 10, *groups, *how)
        grad = torch.ones_like(x @ weight.t()).t() @ x
        return REDUCE_GRAD(grad, None, 0, 8, group_name, torch.float32, torch.float32, None, 0, home)

    with FakeTensorMode():
        return make_fx(step)(torch.empty(2, 4), torch.empty(3, 4, device=CUDA))


@pytest.mark.parametrize("pinned", [True, False])
def test_gathers_are_on_the_device_and_gradients_go_to_the_cpu(eight_fake_ranks: None, pinned: bool) -> None:
    gm = _graph(torch.distributed.group.WORLD.group_name, pinned)
    (gathered,) = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    (reduced,) = gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert (gathered.meta["val"].device, tuple(gathered.meta["val"].shape)) == (CUDA, (10, 4))
    assert (reduced.meta["val"].device.type, tuple(reduced.meta["val"].shape)) == ("cpu", (2, 4))

    bucket_all_gathers(gm.graph, bucket_mode="coalesced")
    bucket_reduce_scatters(gm.graph, bucket_mode="coalesced")
    gm.graph.lint()
    (start,) = gm.graph.find_nodes(op="call_function", target=ALL_GATHER_OP)
    assert start.kwargs == {"device": CUDA}
    assert [value.device for value in start.meta["val"]] == [CUDA]
    with FakeTensorMode():
        shards = [torch.empty(2, 4)]
        ahead = ALL_GATHER_AHEAD_OP(shards, torch.empty(1), 8, "", torch.float32, False, True, device=CUDA)
    assert [value.device for value in ahead] == [CUDA]
    assert start.args[0][0].meta["val"].device.type == "cpu", "the gather takes the shard where it lives"
    (sent,) = gm.graph.find_nodes(op="call_function", target=SEND_HOME)
    assert sent.args[2] is pinned
    assert [source.meta["val"].device for source in sent.args[0]] == [CUDA]
    (result,) = gm.graph.output_node().args
    assert result.meta["val"].device.type == "cpu"


def test_shards_on_a_device_are_refused_by_name_and_taken_back_from_the_cpu(one_rank: None) -> None:
    model = fully_shard(nn.Linear(4, 2), offload_policy=CPUOffloadPolicy())
    own = local_tensor(model.weight)
    with FakeTensorMode():
        moved = torch.empty(2, 4, device=CUDA)
    replace_local_tensor(model._parameters["weight"], moved)
    with pytest.raises(OffloadedDeviceError, match=r"weight: expected its shards on the CPU.*cuda:0.*device='cpu'"):
        model(torch.ones(1, 4))
    replace_local_tensor(model._parameters["weight"], own.clone())
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 4))


def test_on_a_mesh_of_cpus_nothing_is_pinned(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert Home.of(CPUOffloadPolicy(pin_memory=True), mesh) == Home(torch.device("cpu"), False)
    assert Home.of(None, mesh) is None
    home = Home(CUDA, True)
    assert home.computes_on(torch.device("cpu")) == CUDA
    assert home.computes_on(torch.device("meta")) == torch.device("meta")


def test_a_model_from_meta_gets_its_device_with_its_values(one_rank: None) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    (weight, _) = unit_of(model).params
    assert weight.placeholder.device.type == "meta"
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    assert weight.placeholder.device.type == "cpu"
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 2), 5.0))


def test_the_device_of_the_tensors_decides_whether_a_group_averages(one_rank: None) -> None:
    cpu = torch.device("cpu")
    for config, on_cpu, on_cuda in (
        ("cpu:gloo,cuda:nccl", False, True),
        ("cuda:nccl", False, True),
        ("cpu:gloo,cuda:gloo,mps:gloo", False, False),
    ):
        assert (backend_averages(config, cpu), backend_averages(config, CUDA)) == (on_cpu, on_cuda), config
    assert not group_averages(torch.distributed.group.WORLD.group_name, cpu)


def test_a_landing_that_raises_loses_no_other_and_leaves_nothing() -> None:
    offloading, seen = Offloading(), list[int]()

    def write(index: int) -> None:
        seen.append(index)
        if index in (2, 3):
            raise ValueError(f"landing {index}")

    for index in range(1, 5):
        offloading.land_later(functools.partial(write, index))
    with pytest.raises(ValueError, match="landing 2"):
        offloading.land()
    assert seen == [1, 2, 3, 4]
    offloading.land()
    assert seen == [1, 2, 3, 4]


def test_an_interruption_drops_what_has_not_landed() -> None:
    offloading, seen = Offloading(), list[int]()

    def interrupt() -> None:
        raise KeyboardInterrupt

    offloading.land_later(interrupt)
    offloading.land_later(lambda: seen.append(1))
    with pytest.raises(KeyboardInterrupt):
        offloading.land()
    offloading.land()
    assert seen == []


def test_backwards_that_are_not_the_last_leave_only_their_own_gradients() -> None:
    offloading, seen = Offloading(), list[int]()
    for index in range(20):
        for _ in range(3):
            offloading.land_later(functools.partial(seen.append, index))
        offloading.end_backward(is_last=False)
        assert seen == [earlier for earlier in range(index) for _ in range(3)]
    offloading.end_backward(is_last=True)
    assert seen == [index for index in range(20) for _ in range(3)]


def test_gradients_land_in_order_or_are_dropped() -> None:
    offloading, seen = Offloading(), list[int]()
    offloading.land_later(lambda: seen.append(1))
    offloading.land_later(lambda: seen.append(2))
    offloading.land()
    assert seen == [1, 2]
    offloading.land_later(lambda: seen.append(3))
    offloading.land(is_wanted=False)
    offloading.land()
    assert seen == [1, 2]
