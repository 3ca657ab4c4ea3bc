"""The parts of the measurement tools: statistics, profiles, tables, settings, ranks and hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import network, one_gpu
from bench.bandwidth import split_elements
from bench.config import Config
from bench.launch import rank_environment, run_ranks
from bench.mps import SharedGpuError, multi_process_service, nccl_environment
from bench.profile import analyze, overlap, union
from bench.report import JsonFile, table
from bench.statistics import LossMismatch, Summary, check_losses, in_turn, slowest_rank, summarize
from bench.systems import BUILDERS
from bench.systems_names import SYSTEMS, parse_systems

ROOT = Path(__file__).parent.parent
TOOLS = ("bench_two_hosts", "bench_one_gpu", "bench_compile", "bench_gpus")


def test_a_summary_leaves_no_sample_out() -> None:
    assert summarize([3.0, 1.0, 100.0, 2.0]) == Summary(median_ms=2.5, min_ms=1.0, max_ms=100.0, num_samples=4)
    with pytest.raises(ValueError, match="Expected at least one sample"):
        summarize([])


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    assert slowest_rank([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_systems_take_turns() -> None:
    assert list(in_turn(["a", "b"], 2)) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_equal_losses_pass_and_the_largest_difference_is_told() -> None:
    worst = check_losses({"compute": [2.0, 1.0], "ours": [2.0, 1.00005]}, "compute", 1e-4)
    assert worst == {"compute": 0.0, "ours": pytest.approx(5e-5)}


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_a_wrong_loss_is_refused(wrong: float) -> None:
    with pytest.raises(LossMismatch, match=r"within 0.0001; found ours"):
        check_losses({"compute": [2.0, 1.0], "ours": [2.0, wrong]}, "compute", 1e-4)


def test_losses_that_do_not_move_check_no_gradients() -> None:
    with pytest.raises(LossMismatch, match="the gradients were not checked"):
        check_losses({"compute": [2.0, 2.0]}, "compute", 1e-4)


def test_spans_are_united_and_overlap() -> None:
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)]) == [(0.0, 4.0), (5.0, 6.0)]
    assert overlap([(0.0, 4.0), (5.0, 6.0)], [(1.0, 2.0), (3.0, 5.5)]) == pytest.approx(1.0 + 1.0 + 0.5)


def _event(name: str, begin_us: float, end_us: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin_us, "dur": end_us - begin_us}


def test_a_profile_tells_exposed_from_hidden_communication() -> None:
    profile = analyze(
        [
            _event("ncclDevKernel_AllGather_RING_LL", 0, 3000),  # 1 ms alone, then hidden
            _event("nvjet_tst_256x128", 1000, 5000),
            _event("triton_poi_fused_flash_attention", 5000, 6000),  # a fused kernel, no attention
            _event("emulated_collective", 5500, 7000),  # half a millisecond hidden, 1 ms alone
            _event("Memcpy DtoD", 8000, 9000, "gpu_memcpy"),  # after 1 ms of nothing
            _event("FSDP:layers.0:forward_compute", 0, 9000, "gpu_user_annotation"),
            _event("aten::mm", 0, 9000, "cpu_op"),
            {"ph": "M", "cat": "kernel", "name": "process_name"},
        ]
    )
    assert (profile.exposed_ms, profile.communication_ms) == (2.0, 4.5)
    assert (profile.compute_ms, profile.matmul_ms, profile.idle_ms) == (6.0, 4.0, 1.0)
    assert (profile.num_kernels, profile.num_communication_kernels) == (4, 2)


def test_a_profile_of_nothing_is_zero() -> None:
    assert analyze([]).idle_ms == 0.0


def test_a_table_lines_up() -> None:
    assert table(["system", "ms"], [["ours", "9.50"], ["FSDP2", "10.25"]]).splitlines() == [
        "| system |    ms |",
        "| ------ | ----: |",
        "| ours   |  9.50 |",
        "| FSDP2  | 10.25 |",
    ]


def test_results_are_written_again_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    document: dict[str, list[int]] = {"results": []}
    output = JsonFile(str(path), document)
    for value in (1, 2):
        document["results"].append(value)
        output.save()
        assert json.loads(path.read_text())["results"][-1] == value
    assert [found.name for found in path.parent.iterdir()] == ["results.json"]


def test_settings_survive_the_way_to_the_ranks() -> None:
    config = Config(backend="emulated", device="cpu", shapes=["tiny"], bandwidths_gb_per_s=[340.0, 45.0])
    assert Config.from_json(config.to_json()) == config


def test_every_system_has_a_name_and_a_builder() -> None:
    assert BUILDERS.keys() == SYSTEMS.keys()
    assert parse_systems("compiled, fsdp2,compiled") == ["compute", "compiled", "fsdp2"]
    with pytest.raises(ValueError, match="Expected systems out of compute, communication"):
        parse_systems("fsdp3")


def test_a_layer_is_split_into_all_of_its_elements() -> None:
    for num_elements in (1000, 62_504, 54_000_000):
        parts = split_elements(num_elements)
        assert sum(parts) == num_elements
        assert min(parts) >= 8
    with pytest.raises(ValueError, match="Expected at least 72 elements"):
        split_elements(64)


def test_quick_runs_are_smaller_and_say_what_they_are() -> None:
    quick = one_gpu.config_of(one_gpu._parse(["--emulate", "8", "--quick", "--bandwidth", "100"]))
    assert (quick.world_size, quick.bandwidths_gb_per_s, quick.shapes) == (8, [100.0], ["llama_2b"])
    assert quick.title == "8 emulated ranks"
    full = one_gpu.config_of(one_gpu._parse(["--ranks", "2"]))
    assert set(quick.systems) < {*full.systems, "simple_fsdp_overlap"}
    assert len(full.shapes) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --ranks --emulate is required"),
        (["--emulate", "1"], "expected at least 2 ranks, found 1"),
        (["--ranks", "2", "--systems", "none"], "Expected systems out of"),
        (["--emulate", "8", "--systems", "compiled_two_streams"], "needs a second link"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        one_gpu._parse(arguments)
    assert message in capsys.readouterr().err


def test_ranks_on_one_gpu_share_its_thread_blocks() -> None:
    assert nccl_environment(2, None)["NCCL_MAX_CTAS"] == "8"
    assert nccl_environment(4, None)["NCCL_MAX_CTAS"] == "4"
    with pytest.raises(SharedGpuError, match="Expected --nccl to be a library of NCCL"):
        nccl_environment(2, "/nowhere/libnccl.so.2")


@pytest.mark.parametrize(("setting", "expected"), [(None, "8"), ("32", "32")])
def test_a_rank_under_mps_has_the_hardware_queues_of_a_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: str
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", setting)
    with multi_process_service() as variables:
        assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


def _run(*sources: str, time_limit_s: float = 30.0) -> int:
    commands = [[sys.executable, "-c", source] for source in sources]
    environments = [rank_environment(rank, len(sources), "127.0.0.1", 1, rank) for rank in range(len(sources))]
    return run_ranks(commands, environments, time_limit_s=time_limit_s)


def test_ranks_know_who_they_are_and_find_the_package() -> None:
    check = "import os, bench, fsdp_passes; assert os.environ['RANK'] == os.environ['LOCAL_RANK'] == '{}'"
    assert _run(check.format(0), check.format(1)) == 0


def test_no_rank_outlives_one_that_failed_or_the_limit(tmp_path: Path) -> None:
    stay = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    for fail, limit_s, status in (("import time; time.sleep(1); exit(3)", 30.0, 3), (stay, 2.0, 124)):
        begin_s = time.monotonic()
        assert _run(fail, stay, time_limit_s=limit_s) == status
        assert time.monotonic() - begin_s < 20
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def _can_make_hosts() -> bool:
    try:
        network.check_tools()
        network._run("ip", "netns", "add", "fsdp_bench_try")
        network._run("ip", "netns", "del", "fsdp_bench_try")
    except network.NetworkError:
        return False
    return True


def _fail_between_hosts(shown: list[str]) -> None:
    with network.two_hosts(mbit_per_s=500, delay_ms=0):
        shown.append(network._run(*network.inside(0, "tc", "qdisc", "show", "dev", network.INTERFACES[0])))
        raise KeyError


def test_hosts_are_removed_whatever_happens() -> None:
    if not _can_make_hosts():
        pytest.skip("needs root and network namespaces")
    network.remove_hosts()
    # What a killed run leaves behind is in nobody's way.
    network._run("ip", "netns", "add", network.NAMESPACES[1])
    network._run("ip", "link", "add", network.INTERFACES[0], "type", "veth", "peer", "name", network.INTERFACES[1])
    shown: list[str] = []
    with pytest.raises(KeyError):
        _fail_between_hosts(shown)
    assert "tbf" in shown[0]
    assert "rate 500Mbit" in shown[0]
    assert not set(network.NAMESPACES) & set(network._run("ip", "netns", "list").split())
    links = network._run("ip", "-o", "link")
    assert network.INTERFACES[0] not in links


def test_a_command_that_fails_says_what_it_needs() -> None:
    with pytest.raises(network.NetworkError, match=r"Expected `false` to work.*many containers forbid them"):
        network._run("false")


@pytest.mark.parametrize("tool", TOOLS)
def test_each_tool_explains_itself(tool: str) -> None:
    assert os.access(ROOT / "tools" / tool, os.X_OK)
    done = subprocess.run([sys.executable, ROOT / "tools" / tool, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"tools/{tool}" in done.stdout
