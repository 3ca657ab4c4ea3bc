"""What a first user of `explain` and of the command line runs into: a second call, a script as target, mistakes."""

from __future__ import annotations

import logging
import pathlib
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fsdp_passes import explain, fully_shard
from fsdp_passes.__main__ import main
from fsdp_passes._torch_compat import init_fake_process_group
from fsdp_passes.inspect import commands
from fsdp_passes.inspect.commands import is_colour_wanted

TARGETS = """
    import sys
    import torch
    from torch import nn
    from fsdp_passes import fully_shard

    def tiny():
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
        return fully_shard(nn.Sequential(layers, nn.Linear(8, 1)), units=["0.*"]), (torch.ones(4, 8),)

    def ends():
        sys.exit("no data here")

    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            sys.exit("no data there")

    def forward_ends():
        return fully_shard(Ends()), (torch.ones(1, 4),)

    def frozen():
        return fully_shard(nn.Linear(4, 4).requires_grad_(False)), (torch.ones(1, 4),)

    def wrong_shape():
        return fully_shard(nn.Linear(4, 4)), (torch.ones(1, 5),)
"""


@pytest.fixture(autouse=True)
def module_of_targets(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "first_targets.py").write_text(textwrap.dedent(TARGETS))
    (tmp_path / "a_script.py").write_text("raise SystemExit(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    torch._dynamo.reset()
    yield
    sys.modules.pop("first_targets", None)


def test_a_model_is_explained_again_with_other_sizes() -> None:
    """Dynamo makes a size that differs from the last time a symbol; predictions need numbers."""
    init_fake_process_group(8)
    try:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 1))
        fully_shard(model, units=["0"])
        for batch in (4, 6, 9):
            explanation = explain(model, torch.ones(batch, 8))
            heavy = [step.cost for step in explanation.graphs[0].model.steps if step.cost and step.cost.is_heavy]
            assert [cost.flops for cost in heavy] == [2 * batch * 8 * 16, 2 * batch * 16]
            assert str(explanation.cost.graphs[0].flops) == "288*batch"
    finally:
        torch.distributed.destroy_process_group()


def mistake(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake is told in."""
    assert main(command.split()) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("tracing"))
    assert not torch.distributed.is_initialized()
    assert not line.endswith("..")
    return line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain a_script:f", "importing 'a_script' ended the program (SystemExit: 2). Put what a script does behind"),
        ("explain first_targets:ends", "the factory ended the program (SystemExit: no data here). Let it return"),
        ("explain first_targets:forward_ends", "tracing the model raised SystemExit: no data there. --traceback shows"),
        ("diff first_targets:tiny --pass annotate_regions --hardware h200", "unrecognized arguments: --hardware h200"),
        ("explain ./some/first_targets.py:tiny", "found that of a file. Did you mean some.first_targets:tiny?"),
        ("explain first_targets:tiny --hardware abacus", "found 'abacus'."),
        ("diff first_targets:tiny --pass bucket_all_gathers --context -1", "expected a number of lines of at least 0"),
    ],
)
def test_a_mistake_says_what_to_do(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in mistake(command, capsys)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain no_such:f --html /no/such/x.html", "found no folder /no/such"),
        ("explain no_such:f --json /", "/: expected a file that can be written, found a folder"),
        ("scale no_such:f --html /no/such/x.html", "found no folder /no/such"),
        ("trace no_such.json --json /no/such/x.json", "found no folder /no/such"),
        ("trace /", "/: expected a trace file of torch.profiler, found a folder. Check the path"),
        ("explain no_such:f --hardware abacus", "hardware: expected one of a100, h100, h200"),
        (
            "explain no_such:f --hardware no_such.json",
            "no_such.json: expected a JSON object, found a file that cannot be",
        ),
        ("diff no_such:f --pass nothing", "--pass nothing: expected one of bucket_all_gathers"),
    ],
)
def test_what_is_known_at_once_is_said_before_the_work(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A large model takes a minute to trace: the target is not even looked for."""
    assert message in mistake(command, capsys)


def test_a_shape_that_does_not_fit_is_told_without_pytorchs_log(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        assert "[1, 5] X [4, 4]" in mistake("explain first_targets:wrong_shape", capsys)
    finally:
        log.removeHandler(handler)
    assert logged == []
    assert handler.filters == []


def test_verify_calls_units_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "first_targets:tiny"]) == 0
    assert "note: all_gather 0 (unit 0.0): nothing in this graph hides it" in capsys.readouterr().out


def test_a_pass_that_changes_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    command = "diff first_targets:tiny --pass bucket_reduce_scatters --phase forward"
    assert main(command.split()) == 0
    assert capsys.readouterr().out == "forward: bucket_reduce_scatters changes nothing\n"


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_is_coloured_unless_it_cannot_or_shall_not(
    variables: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not is_colour_wanted()  # a pipe or a file
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert is_colour_wanted() == is_coloured


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["trace", "--quiet", "tests/data/fsdp2_two_ranks.json.gz"]) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == "fsdp_passes: No space left on device. Make room, or write elsewhere.\n"


def test_a_phase_that_has_no_graph_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "first_targets:frozen", "--pass", "bucket_reduce_scatters", "--phase", "backward"]) == 0
    assert capsys.readouterr().out == "backward: there is no such graph, since nothing that is trained needs one\n"


def test_a_range_of_ranks_ends_where_it_was_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "first_targets:frozen", "--world-size", "8..24"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[0].isdecimal()] == ["8", "16", "24"]


def test_an_interrupted_command_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "explain", interrupt)
    assert main(["verify", "first_targets:tiny"]) == 130
