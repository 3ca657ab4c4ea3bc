"""What somebody meets who tries the library for the first time: patterns, mistakes around a run, the command line."""

from __future__ import annotations

import pathlib
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_passes import errors, fully_shard, overlap_fsdp
from fsdp_passes.__main__ import main
from fsdp_passes.inspect.trace import trace_report
from fsdp_passes.options import RESERVED_INDUCTOR_OPTIONS, OverlapOptions
from fsdp_passes.pipeline import PASS_NAMES
from fsdp_passes.streams import warn_of_one_queue
from fsdp_passes.unit import unit_of
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import one_rank as one_rank
from tests.graphs import process_group, transformer_record
from tests.inspect.traces import two_layers

ROOT = pathlib.Path(__file__).parent.parent


class Model(nn.Module):
    """Containers of every kind around linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3)})
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(8))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x + self.shifts[0])


def factory() -> tuple[nn.Module, tuple[Tensor]]:
    """A target of the command line."""
    return fully_shard(Model(), units=["layers.*"]), (torch.ones(2, 8),)


def unit_names(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if unit_of(module) is not None]


# ---- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_fake_ranks")
class TestPatterns:
    def test_wildcards_pass_over_containers(self) -> None:
        linears = ["layers.0", "layers.0.0", "layers.1", "layers.1.0", "heads.a"]
        assert unit_names(fully_shard(Model(), units=["**"])) == ["", *linears]
        assert unit_names(fully_shard(Model(), units=["*.*"])) == ["", "layers.0", "layers.1", "heads.a"]

    @pytest.mark.parametrize(
        ("pattern", "container"),
        [("layers", "ModuleList"), ("heads", "ModuleDict"), ("shifts", "ParameterList"), ("shift*", "ParameterList")],
    )
    def test_a_pattern_that_names_nothing_but_a_container(self, pattern: str, container: str) -> None:
        with pytest.raises(errors.NoForwardError, match=rf"{container}\): expected a module with a forward"):
            fully_shard(Model(), units=[pattern])

    def test_a_container_with_a_forward_is_a_module_like_any_other(self) -> None:
        class Called(nn.ModuleList):
            def forward(self, x: Tensor) -> Tensor:
                return self[0](x)

        model = nn.Sequential(Called([nn.Linear(8, 8)]))
        assert unit_names(fully_shard(model, units=["*"])) == ["", "0"]

    def test_one_pattern_needs_no_list(self) -> None:
        assert unit_names(fully_shard(Model(), units="layers.*")) == ["", "layers.0", "layers.1"]


# ---- around a run ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_fake_ranks")
def test_one_hardware_queue_is_warned_of_once_and_only_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no mesh of GPUs: what `fully_shard` calls is called by hand as it would be."""
    kinds: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("fsdp_passes.sharding.warn_of_one_queue", kinds.append)
        fully_shard(nn.Linear(8, 8))
    assert kinds == ["cpu"]

    def texts(setting: str, *device_types: str) -> list[str]:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", setting)
        warn_of_one_queue.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for device_type in device_types:
                warn_of_one_queue(device_type)
        warn_of_one_queue.cache_clear()
        return [str(one.message) for one in caught if one.category is errors.OneQueueWarning]

    (text,) = texts("1", "cpu", "cuda", "cuda")
    assert text.startswith("CUDA_DEVICE_MAX_CONNECTIONS: expected it to be unset, or 2 or more, found 1.")
    assert texts("8", "cuda") == texts("1", "cpu") == []


def test_a_process_group_that_is_gone() -> None:
    message = r"unit '0': expected the process group .* found that it was destroyed\. .* behind them"
    with process_group("gloo", dist.HashStore(), 1):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=["*"], reshard_after_forward=False)
        step = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
        x = torch.ones(2, 4)
        step(x)
        loss = model(x).sum()
        dist.destroy_process_group()
        with pytest.raises(errors.ProcessGroupGoneError, match="unit '1'"):
            loss.backward()  # nothing to gather, gradients to reduce
        for call in (model, step, model[0], lambda x: model[0].unshard()):
            with pytest.raises(errors.ProcessGroupGoneError, match=message):
                call(x)
        model.state_dict()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("nvtx", [True, False])
@pytest.mark.parametrize(("units", "message"), [(["*"], "unit '2': expected the process"), ([], "unit 'root'")])
def test_a_process_group_that_is_gone_before_a_compiled_backward(units: list[str], message: str, nvtx: bool) -> None:
    """It begins with a gather, or has nothing but gradients to reduce."""
    with process_group("gloo", dist.HashStore(), 1):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), units=units)
        step = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager", "nvtx": nvtx})
        step(torch.ones(2, 4)).sum().backward()  # which compiles it
        loss = step(torch.ones(2, 4)).sum()
        dist.destroy_process_group()
        with pytest.raises(errors.ProcessGroupGoneError, match=message):
            loss.backward()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_process_group_that_is_gone_before_a_backward_is_compiled(inner: str) -> None:
    options: dict[str, object] = {"inner": inner}
    if inner == "inductor":
        options["inductor"] = {"force_disable_caches": True}  # a graph out of the cache is not compiled
    with process_group("gloo", dist.HashStore(), 1):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), units=["*"])
        loss = torch.compile(model, backend=overlap_fsdp, options=options)(torch.ones(2, 4)).sum()
        dist.destroy_process_group()
        with pytest.raises(errors.ProcessGroupGoneError, match=r"^unit '[02]': expected the process"):
            loss.backward()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    def test_gradients_by_autograd_grad(self) -> None:
        """docs/fsdp2.md says so: in compiled code sharded ones, in the fallback an error for parameters."""
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=["*"])
        step = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
        params = list(model.parameters())
        x = torch.ones(2, 4, requires_grad=True)
        found = torch.autograd.grad(step(x).sum(), params)
        assert all(isinstance(grad, DTensor) for grad in found)
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(model(x).sum(), params)
        (for_input,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(for_input, torch.autograd.grad(step(x).sum(), x)[0])
        model(x).sum().backward()
        torch.testing.assert_close([param.grad for param in params], list(found))

    def test_keys_of_the_compiled_model(self) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
        step = torch.compile(model, backend=overlap_fsdp)
        assert list(step.state_dict()) == ["_orig_mod.0.weight", "_orig_mod.0.bias"]
        assert list(get_model_state_dict(step)) == list(model.state_dict()) == ["0.weight", "0.bias"]


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_help_of_diff_lists_the_passes_and_that_of_trace_speaks_of_traces(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["diff", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ", ".join(PASS_NAMES) in text
    assert "TARGET is module:factory" in text
    assert main(["trace", "--help"]) == 0
    text = capsys.readouterr().out
    assert "TARGET" not in text
    assert "prof.step()" in text
    assert re.findall("python -m fsdp_passes .*", text) == [
        "python -m fsdp_passes trace [-h] [--json FILE] [--html FILE] [--quiet]",
        "python -m fsdp_passes trace rank0.json.gz rank1.json.gz",
    ]


def test_the_passes_by_name_are_those_that_run() -> None:
    with process_group("fake", FakeStore(), 8):
        for graph in transformer_record().graphs:
            assert list(graph.passes) == ["insert_unshard", *PASS_NAMES]


def test_a_hint_that_asks_ends_with_its_question_mark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "tests.test_first_steps:factori"]) == 2
    assert capsys.readouterr().err.endswith("found none. Did you mean tests.test_first_steps:factory?\n")


@pytest.mark.parametrize("has_marks", [True, False])
def test_a_trace_without_marks_of_steps_says_so(tmp_path: pathlib.Path, has_marks: bool) -> None:
    trace = two_layers()
    if not has_marks:
        trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep")]
    report = trace_report([trace.write(tmp_path / "trace.json")])
    assert ("No step is marked in the trace" in report.text()) is not has_marks


# ---- the README ------------------------------------------------------------------------------------------------------


def test_the_readme_names_every_option_and_reserved_name() -> None:
    text = (ROOT / "README.md").read_text()
    for name in OverlapOptions.__dataclass_fields__:
        assert f"| `{name}` |" in text
    for name in RESERVED_INDUCTOR_OPTIONS:
        assert f"`{name}`" in text
