"""The measured systems on two gloo ranks: the same training as the unsharded model, and a whole measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import RankPool
from tests.training import recorded_collectives

MODULE = "tests.distributed.test_bench_systems"


def _setting(shape: str):  # type: ignore[no-untyped-def]
    from bench.models import SHAPES
    from bench.systems import Setting

    cpu = torch.device("cpu")
    return Setting(SHAPES[shape], init_device_mesh("cpu", (dist.get_world_size(),)), cpu, torch.float32)


def losses_equal_the_whole_model_s(shape: str, names: list[str]) -> None:
    """Three steps of gradient descent; the reference trains unsharded on the ranks' mean gradients."""
    from bench.systems import BUILDERS

    setting = _setting(shape)
    batch = setting.shape.batch_of(dist.get_rank(), setting.device)
    losses: dict[str, list[float]] = {}
    lr = None
    for name in names:
        system = BUILDERS[name](setting)
        losses[name] = []
        for _ in range(3):
            loss, lr = system.train_step(batch, lr)
            losses[name].append(loss.item())
    expected = losses[names[0]]
    assert abs(expected[-1] - expected[0]) > 1e-2
    for name, found in losses.items():
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def gradients_equal_the_whole_model_s() -> int:
    """The compiled parametrization; returns the number of all-gathers of a step."""
    from bench.communication import Collectives
    from bench.simple_fsdp import shard_by_parametrization

    setting = _setting("tiny")
    batch = setting.shape.batch_of(dist.get_rank(), setting.device)
    reference = setting.shape.make(setting.device)
    reference(*batch).backward()
    model = shard_by_parametrization(setting.shape.make(setting.device), setting.mesh)
    assert all(param.to_local().shape[0] * 2 == param.shape[0] for param in model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(*batch).backward()
    collectives = Collectives(setting.mesh)
    sharded = {
        name.replace("parametrizations.", "").replace(".original", ""): param
        for name, param in model.named_parameters()
    }
    for name, param in reference.named_parameters():
        expected = collectives.mean_of_own_rows(param.grad)
        torch.testing.assert_close(sharded[name].grad.to_local(), expected, rtol=1e-5, atol=1e-7)
    with recorded_collectives() as names:
        compiled(*batch).backward()
    return sum("all_gather" in name for name in names)


def the_whole_measurement(output: str) -> None:
    from bench.worker import Config, Worker

    config = Config(backend="gloo", device="cpu", shapes=["tiny"], rounds=2, warmup=1, output=output, title="trial")
    config.systems = ["compute", "communication", "fsdp2_eager", "eager"]
    assert Worker(config, group_exists=True).run() == 0


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("tiny", ["compute", "fsdp2_eager", "eager", "simple_fsdp"]),
        ("tiny_llama", ["compute", "fsdp2_eager", "eager"]),
    ],
)
def test_each_system_trains_as_the_whole_model(two_ranks: RankPool, shape: str, names: list[str]) -> None:
    two_ranks.run(f"{MODULE}:losses_equal_the_whole_model_s", shape=shape, names=names)


def test_the_parametrization_gathers_again_in_the_backward(two_ranks: RankPool) -> None:
    # Three blocks of a norm and two linear layers. A backward reads every weight matrix again; whether it reads biases
    # and norms depends on what the partitioner recomputes.
    num_params, num_matrices = 3 * 6, 3 * 2
    for num_gathers in two_ranks.run(f"{MODULE}:gradients_equal_the_whole_model_s"):
        assert num_params + num_matrices <= num_gathers <= 2 * num_params


def test_a_measurement_writes_a_row_for_each_system(two_ranks: RankPool, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    two_ranks.run(f"{MODULE}:the_whole_measurement", output=str(output))
    (result,) = json.loads(output.read_text())["results"]
    assert [row["system"] for row in result["rows"]] == ["compute", "communication", "fsdp2_eager", "eager"]
    for row in result["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
    assert result["rows"][0]["to_compute"] == 1.0
    losses = [measured["losses"] for name, measured in result["systems"].items() if name != "communication"]
    assert all(found == pytest.approx(losses[0], rel=1e-5) for found in losses)
