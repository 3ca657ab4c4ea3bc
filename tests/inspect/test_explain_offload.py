"""`explain` and `scale` of parameters that live on the CPU: the copies in the schedule, and whose memory it is."""

from __future__ import annotations

import itertools
import json
import pathlib

import jsonschema
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_passes import explain, fully_shard
from fsdp_passes.inspect.explain import ExplainedGraph
from fsdp_passes.inspect.scale import ADAM_COPIES, scale, scale_text
from tests.graphs import TinyTransformer
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.inspect.test_explain import SCHEMA

pytestmark = pytest.mark.usefixtures("eight_fake_ranks")


def offloaded(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = TinyTransformer()
    return fully_shard(model, units=["layers.*"], offload_policy=CPUOffloadPolicy())


def copies(graph: ExplainedGraph, kind: str) -> list[tuple[str, int]]:
    return [(event.unit, event.bytes) for event in graph.schedule if event.kind == kind]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_gather_is_behind_a_copy_and_each_reduction_ahead_of_one(device: str) -> None:
    model = offloaded(device)
    explanation = explain(model, torch.arange(4, device=device))
    forward, backward = explanation.graphs
    for graph in explanation.graphs:
        for before, event in itertools.pairwise(graph.schedule):
            if event.kind == "start" and event.collective == "all_gather":
                assert (before.kind, before.unit, before.bytes * 8) == ("copy_to_device", event.unit, event.bytes)
            if event.kind == "copy_to_cpu":
                assert (before.kind, before.unit, before.bytes) == ("wait", event.unit, event.bytes * 8)
        reduced = [event for event in graph.schedule if event.kind == "wait" and event.collective == "reduce_scatter"]
        assert len(copies(graph, "copy_to_cpu")) == len(reduced)
    assert not copies(forward, "copy_to_cpu")
    # Every shard goes to the device in the forward, and every gradient home in the backward.
    for graph, kind in ((forward, "copy_to_device"), (backward, "copy_to_cpu")):
        assert sum(num_bytes for _, num_bytes in copies(graph, kind)) == explanation.sharded_bytes, kind
    assert explanation.offloaded_bytes == explanation.sharded_bytes > 0
    text = str(explanation)
    assert "MiB are on the CPU, as are their gradients; the times are without the copies" in text
    assert f"  copies: {len(copies(forward, 'copy_to_device'))} of shards to the device" in text


def test_shards_on_the_device_are_not_copied() -> None:
    model = fully_shard(TinyTransformer(), units=["layers.*"])
    explanation = explain(model, torch.arange(4))
    assert explanation.offloaded_bytes == 0
    assert not any(event.kind.startswith("copy") for graph in explanation.graphs for event in graph.schedule)
    assert "copies" not in str(explanation)


def test_gradients_of_replicas_go_home_behind_the_all_reduce() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(TinyTransformer(), mesh=mesh, units=["layers.*"], offload_policy=CPUOffloadPolicy())
    explanation = explain(model, torch.arange(4))
    backward = explanation.graphs[1].schedule
    behind = [before.collective for before, event in itertools.pairwise(backward) if "to_cpu" in event.kind]
    assert behind == ["all_reduce"] * len(behind) != []
    assert sum(event.bytes for event in backward if event.kind == "copy_to_cpu") == explanation.sharded_bytes


def test_json_follows_the_schema(tmp_path: pathlib.Path) -> None:
    explanation = explain(offloaded(), torch.arange(4))
    explanation.to_json(tmp_path / "explanation.json")
    data = json.loads((tmp_path / "explanation.json").read_text())
    jsonschema.validate(data, json.loads(SCHEMA.read_text()))
    assert data["offloaded_bytes"] == data["sharded_bytes"]


def test_state_on_the_cpu_is_not_counted_as_the_devices() -> None:
    explanation = explain(offloaded(), torch.arange(4))
    (point,) = scale(explanation, [8])
    assert (point.state_bytes, point.offloaded_bytes) == (0, ADAM_COPIES * explanation.sharded_bytes)
    assert "On the CPU, and not in the state above: " in scale_text(explanation, [point])
    (on_device,) = scale(explain(fully_shard(TinyTransformer(), units=["layers.*"]), torch.arange(4)), [8])
    assert (on_device.state_bytes, on_device.offloaded_bytes) == (point.offloaded_bytes, 0)
    assert on_device.unsharded_bytes == point.unsharded_bytes
