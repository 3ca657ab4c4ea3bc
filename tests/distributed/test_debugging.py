"""The debugging mode finds what it says; and what it looks for does not happen, even with slow communication."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.debug import CheckedInterpreter, debug_flags
from fsdp_passes.errors import OptionValueError, UseBeforeWaitError
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.schedule import bucket_of
from fsdp_passes.watchdog import AWAIT_COLLECTIVE
from tests.distributed.checks import call_of, compiled
from tests.graphs import one_rank as one_rank
from tests.models import Transformer, token_batches
from tests.ranks import RankPool, host_store, launched
from tests.training import assert_same, build, my_share, train

HERE = "tests.distributed.test_debugging"
ROOT = pathlib.Path(__file__).parents[2]


def debugging(value: str) -> Any:
    return unittest.mock.patch.dict(os.environ, FSDP_PASSES_DEBUG=value)


# ---- NaN in released weights -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Keeps, when asked to, its gathered weight behind its forward: a late read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.leaks = False
        self.leaked: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.leaks:
            self.leaked = self.linear.weight.detach()
        return torch.tanh(self.linear(x))


def a_late_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(3)])
    fully_shard(model, units=["*"])
    with debugging("nan"):
        model[0].leaks = True
        out = model(torch.ones(2, 8))
        leaked = model[0].leaked
        assert leaked is not None
        assert leaked.isnan().all()
        assert not out.isnan().any()
        out.sum().backward()


def test_a_released_weight_that_is_read_late_is_nan(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:a_late_read")


def slowed_training(way: str, flags: str) -> None:
    """Rank 1 comes late to everything, so that on rank 0 each collective is on its way for long."""
    model, reference = build(lambda: Transformer(hidden=13))
    fully_shard(model, units=["layers.*"])
    call = call_of(model, way)

    def late(*args: Tensor) -> Tensor:
        time.sleep(0.05 * dist.get_rank())
        loss: Tensor = call(*args)
        time.sleep(0.05 * dist.get_rank())
        return loss

    batches = token_batches(4, 4, 8)
    with debugging(flags):
        found = train(model, batches, sharded=True, call=late)
    assert_same(found, train(reference, batches, sharded=False))


@pytest.mark.parametrize(("way", "flags"), [("fallback", "nan"), ("aot_eager", "nan,eager"), ("inductor", "1")])
def test_slow_communication_never_lets_a_released_weight_into_the_loss(
    two_ranks: RankPool, way: str, flags: str
) -> None:
    two_ranks.run(f"{HERE}:slowed_training", way=way, flags=flags)


def poisoned_graph() -> None:
    """What the graph gathers of units that reshard, looked at when its last node runs: too late."""
    model, _ = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"])
    batch = my_share(token_batches(1, 4, 8)[0])
    late: list[Tensor] = []

    class Late(CheckedInterpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            if n.op == "output":
                late.extend(self.env[result] for wait in self.waits for result in wait.args[0])
            return super().run_node(n)

        def run(self, *inputs: Any, **kwargs: Any) -> Any:
            waits = self.module.graph.find_nodes(op="call_function", target=AWAIT_COLLECTIVE)
            self.waits = [n for n in waits if bucket_of(n).reshard]
            self.garbage_collect_values = False
            return super().run(*inputs, **kwargs)

    with torch.no_grad():
        expected = compiled(model)(*batch)
        torch._dynamo.reset()
        with unittest.mock.patch("fsdp_passes.backend.CheckedInterpreter", Late), debugging("eager,nan"):
            torch.testing.assert_close(compiled(model)(*batch), expected)
    assert len(late) == 2 * len(list(model.layers[0].parameters()))
    assert all(tensor.isnan().all() for tensor in late)


def test_gathered_tensors_of_a_graph_are_filled_behind_their_last_read(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:poisoned_graph")


# ---- node by node ----------------------------------------------------------------------------------------------------


def node_by_node(inner: str) -> int:
    """Number of nodes that ran in Python."""
    model, _ = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"])
    with (
        debugging("eager"),
        record_compilations() as records,
        unittest.mock.patch.object(
            CheckedInterpreter, "run_node", autospec=True, side_effect=CheckedInterpreter.run_node
        ) as run_node,
    ):
        compiled(model, inner)(*my_share(token_batches(1, 4, 8)[0])).backward()
    assert {graph.phase for graph in records[0].graphs} == {"forward", "backward"}
    return int(run_node.call_count)


def test_the_flag_runs_graphs_node_by_node_whatever_the_inner_compiler(two_ranks: RankPool) -> None:
    for inner in ("aot_eager", "inductor", "eager"):
        assert all(count > 50 for count in two_ranks.run(f"{HERE}:node_by_node", inner=inner)), inner


def planted_use_before_wait() -> str:
    model, _ = build(lambda: Transformer(layers=2))
    fully_shard(model, units=["layers.*"])

    def run(self: CheckedInterpreter, *inputs: Any) -> Any:
        graph = self.module.graph  # type: ignore[union-attr]
        wait = next(n for n in graph.nodes if n.target is AWAIT_COLLECTIVE)  # what is still on its way is read
        next(iter(graph.find_nodes(op="output"))).prepend(wait)
        return torch.fx.Interpreter.run(
            CheckedInterpreter(self.module, self.unit_names, poison_released=False), *inputs
        )

    call = compiled(model, "eager")
    with unittest.mock.patch.object(CheckedInterpreter, "run", run), pytest.raises(UseBeforeWaitError) as raised:
        call(*my_share(token_batches(1, 4, 8)[0]))
    for param in model.parameters():
        assert param.grad is None
    return str(raised.value)


def test_a_node_that_reads_before_the_wait_is_named_with_its_unit_and_line(two_ranks: RankPool) -> None:
    for message in two_ranks.run(f"{HERE}:planted_use_before_wait"):
        assert "expected the all_gather of unit 'root' to be awaited before its result is read" in message
        assert "tests/models.py" in message


def read_in_flight(flags: str) -> str:
    """Eager code that reads a weight between the start of its gather and the wait."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, units=["*"])
    model(torch.ones(1, 4)).sum().backward()
    with debugging(flags):
        handle = model[1].unshard(async_op=True)
        assert handle is not None
        try:
            model[1].weight.norm()
        except UseBeforeWaitError as error:
            return str(error)
        finally:
            handle.wait()
            model[1].reshard()
    return ""


def test_an_eager_read_in_flight_is_refused_in_debugging_mode_only(two_ranks: RankPool) -> None:
    for message in two_ranks.run(f"{HERE}:read_in_flight", flags="1"):
        assert message.startswith("1.weight: expected the all-gather of unit '1' to be awaited")
        assert "model[1].weight.norm()" in message
    assert two_ranks.run(f"{HERE}:read_in_flight", flags="0") == ["", ""]


def test_an_unknown_flag_is_refused() -> None:
    with debugging("nans"), pytest.raises(OptionValueError, match="FSDP_PASSES_DEBUG"):
        debug_flags()


@pytest.mark.usefixtures("one_rank")
def test_an_unknown_flag_is_refused_before_a_model_is_sharded_and_before_it_is_compiled() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with debugging("nans"), pytest.raises(OptionValueError, match="FSDP_PASSES_DEBUG"):
        fully_shard(model)
    assert type(model) is nn.Linear
    assert model.weight is weight
    fully_shard(model)
    with debugging("nans"), pytest.raises(OptionValueError, match="FSDP_PASSES_DEBUG"):
        overlap_fsdp(fx.symbolic_trace(nn.ReLU()), [torch.ones(1)])


# ---- everything that was started is awaited --------------------------------------------------------------------------

BETWEEN_GRAPHS = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x, index):
        x = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        if index.item() > 7:
            raise IndexError("planted")
        return x
"""
INSIDE_A_GRAPH = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
    def forward(self, x, index):
        return torch.tanh(x + self.embedding(index))
"""
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from fsdp_passes import fully_shard, overlap_fsdp

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
    def forward(self, x, index):
        for layer in self.layers:
            x = layer(x, index)
        return x

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(Model(), units=["layers.*"])
call = CALL
for index in (1, 2, 99):  # an eager fallback finds it in the first layer, with the second one's weights on their way
    try:
        call(torch.ones(2, 8), torch.tensor([index])).sum().backward()
    except (IndexError, RuntimeError) as error:
        print(index, "planted" in str(error) or "out of range" in str(error) or "out of bounds" in str(error))
dist.destroy_process_group()
"""
CALLS = {
    "fallback": "model",
    "aot_eager": "torch.compile(model, backend=overlap_fsdp, options={'inner': 'aot_eager'})",
    "inductor": "torch.compile(model, backend=overlap_fsdp)",
}


@pytest.mark.parametrize(
    ("where", "way"),
    [(BETWEEN_GRAPHS, "fallback"), (BETWEEN_GRAPHS, "aot_eager"), *[(INSIDE_A_GRAPH, way) for way in CALLS]],
    ids=lambda value: value if value in CALLS else "between" if value == BETWEEN_GRAPHS else "inside",
)
def test_a_process_that_ends_behind_an_exception_leaves_nothing_unawaited(
    tmp_path: pathlib.Path, where: str, way: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("CALL", CALLS[way]).replace("class Model", where + "\nclass Model"))
    store = host_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**launched(store, rank, 2), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=200)
        assert rank.returncode == 0, err
        assert out == "99 True\n"
        assert "collective" not in err, err
