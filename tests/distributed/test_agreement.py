"""Ranks that disagree raise, ranks that are late do not: real compilations on two gloo ranks."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import time
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.errors import ScheduleDisagreementError
from tests.distributed.checks import float_batches
from tests.faults import run
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train, whole

HERE = "tests.distributed.test_agreement"
DIM = 12


def make(layers: int = 4) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(layers)])


class Loss(nn.Module):
    """The mean square of what the layers make."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = make(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def own_group() -> DeviceMesh:
    """Of these ranks, which have agreed on nothing yet: a rank that knows its schedule from an earlier test of the pool
    would not compare it, and wait for the other in its first collective."""
    return DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")


def one_step(options: dict[str, Any], *, layers: int = 4, mesh: DeviceMesh | None = None) -> str:
    """A step with a model of its own; the error's text, "" without one."""
    model, _ = build(lambda: Loss(layers))
    fully_shard(model, mesh=mesh, units=["layers.*"])
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager", **options})
    try:
        call(*my_share(float_batches(1, 4, DIM)[0])).backward()
    except ScheduleDisagreementError as error:
        return str(error)
    return ""


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def different_prefetch() -> str:
    return one_step({"prefetch": 1 + 2 * dist.get_rank()}, layers=5, mesh=own_group())


def test_ranks_that_compiled_for_different_prefetch_both_say_where_they_differ(two_ranks: RankPool) -> None:
    """Gathers are started earlier on one of them, and overtake the reductions of the backward."""
    for text in two_ranks.run(f"{HERE}:different_prefetch"):
        assert re.match(r"backward graph on group '\w+'", text), text
        assert "reduce_scatter (float32, 2 parameters, 624 bytes) of unit 'layers.4' on rank 0" in text
        assert "all_gather (float32, 1 parameters, 576 bytes) of unit 'layers.1' on rank 1" in text


def different_dtypes() -> str:
    model, _ = build(Loss)
    dtype = torch.bfloat16 if dist.get_rank() else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model, mesh=own_group(), units=["layers.*"], mp_policy=policy)
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"})
    with pytest.raises(ScheduleDisagreementError) as raised:
        call(torch.ones(2, DIM, dtype=dtype))
    return str(raised.value)


def test_a_gather_in_another_dtype_is_found_before_anything_is_sent(two_ranks: RankPool) -> None:
    texts = two_ranks.run(f"{HERE}:different_dtypes")
    assert texts[0] == texts[1]
    assert (
        "collective 0 differs: all_gather (float32, 2 parameters, 624 bytes) of unit 'layers.0' on rank 0; " in texts[0]
    )
    assert "all_gather (bfloat16, 2 parameters, 312 bytes) of unit 'layers.0' on rank 1" in texts[0]


# ---- ranks that are late ---------------------------------------------------------------------------------------------


def late() -> list[float]:
    """Rank 1 comes 0.8 s late to the forward, and again to the backward."""
    model, reference = build(lambda: Loss(3))
    fully_shard(model, units=["layers.*"])
    call = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager", "agreement_timeout_s": 60})

    def slow(x: torch.Tensor) -> torch.Tensor:
        pause_s = 0.8 if dist.get_rank() == 1 and not times else 0.0
        begin_s = time.monotonic()
        time.sleep(pause_s)
        loss = call(x)
        time.sleep(pause_s)
        times.append(time.monotonic() - begin_s)
        return loss

    times: list[float] = []
    batches = float_batches(3, 4, DIM)
    assert_same(train(model, batches, sharded=True, call=slow), train(reference, batches, sharded=False))
    return times


def test_a_rank_that_is_merely_late_raises_no_alarm(two_ranks: RankPool) -> None:
    times = two_ranks.run(f"{HERE}:late")
    assert times[0][0] >= 0.7, "the other rank waited before it sent anything"


def absent(wait_s: float) -> tuple[float, str]:
    begin_s = time.monotonic()
    text = one_step({"agreement_timeout_s": wait_s}) if dist.get_rank() == 0 else ""
    return time.monotonic() - begin_s, text


def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    here, other = run(f"{HERE}:absent", 2, timeout_s=100, wait_s=1.0)
    assert (here.error, other.error) == ("", "")
    waited_s, text = here.result
    assert 1.0 <= waited_s < 40.0
    assert "no answer from rank 1 within 1 s" in text
    assert "all_gather (float32, 2 parameters, 624 bytes) of unit 'layers.0'" in text


def switched_off() -> int:
    one_step({"agreement_timeout_s": 0})
    before = store_keys()
    one_step({"agreement_timeout_s": 0})
    return store_keys() - before


def store_keys() -> int:
    """Keys in the store, without the marks that the watchdog leaves there while nothing happens."""
    store = dist.distributed_c10d._get_default_store()
    marks = [f"fsdp_passes/marks/0/1/rank{rank}" for rank in range(dist.get_world_size())]
    while True:
        before = sum(store.check([mark]) for mark in marks)
        num_keys = int(store.num_keys())
        if before == sum(store.check([mark]) for mark in marks):
            return num_keys - before


def keys_after_many_graphs() -> list[int]:
    """The number of keys in the store after one to four models with schedules of their own."""
    found = []
    for layers in range(1, 5):
        assert one_step({}, layers=layers) == ""
        dist.barrier()
        found.append(store_keys())
        dist.barrier()
    return found


def test_keys_in_the_store_do_not_grow_with_the_number_of_graphs(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{HERE}:switched_off") == [0, 0]
    for found in two_ranks.run(f"{HERE}:keys_after_many_graphs"):
        assert max(found) - min(found) <= 5, found


# ---- recompilation at different times (situation 22) -----------------------------------------------------------------


def new_lengths_at_different_steps(dynamic: bool | None) -> None:
    """Rank 0 meets a new number of rows at step 2, rank 1 at step 4; losses and parameters equal the reference's."""
    rows = [[4, 4, 6, 6, 6, 6], [4, 4, 4, 4, 6, 6]]
    model, reference = build(lambda: Loss(3))
    fully_shard(model, units=["layers.*"])
    options = {"inner": "aot_eager", "agreement_timeout_s": 60}
    call = torch.compile(model, backend=overlap_fsdp, dynamic=dynamic, options=options)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for sizes in zip(*rows, strict=True):
        data = [torch.randn(size, DIM, generator=generator) for size in sizes]
        loss = call(data[dist.get_rank()])
        loss.backward()
        expected = [reference(x) for x in data]
        sum(expected).div(2).backward()
        torch.testing.assert_close(loss, expected[dist.get_rank()], rtol=0, atol=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param), reference.get_parameter(name).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dynamic", [None, False])
def test_ranks_may_meet_a_new_length_at_different_steps(two_ranks: RankPool, dynamic: bool | None) -> None:
    two_ranks.run(f"{HERE}:new_lengths_at_different_steps", dynamic=dynamic)


# ---- caches (situation 23) -------------------------------------------------------------------------------------------


def three_steps_with_caches(folder: str, aot_cache: bool) -> tuple[list[float], dict[str, int]]:
    """In new processes; each rank has a cache folder of its own below `folder`."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, str(dist.get_rank()))
    functorch_config.enable_autograd_cache = aot_cache
    inductor_config.cpp.vec_isa_ok = False  # what this CPU can do is asked of the C++ compiler for seconds
    model, _ = build(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))  # one kernel in C++
    fully_shard(model, units=["*"])
    call = torch.compile(model, backend=overlap_fsdp, options={"agreement_timeout_s": 150})
    found = train(model, float_batches(3, 4, DIM), sharded=True, call=lambda x: call(x).square().mean())
    counters = torch._dynamo.utils.counters
    hits = {
        "fx": counters["inductor"]["fxgraph_cache_hit"],
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "rounds": sum(agreed.num_rounds for agreed in agreement_state()),
    }
    return found.losses, hits


def agreement_state() -> list[Any]:
    from fsdp_passes import agreement

    return list(agreement._agreed_by_group.values())


def test_one_rank_may_hit_its_cache_while_the_other_compiles(tmp_path: pathlib.Path) -> None:
    cold: list[float] | None = None
    for aot_cache in (True, True, False):  # the first fills both caches
        outcomes = run(f"{HERE}:three_steps_with_caches", 2, folder=str(tmp_path), aot_cache=aot_cache)
        assert [outcome.error for outcome in outcomes] == ["", ""]
        (losses, warm), (others, wiped) = (outcome.result for outcome in outcomes)
        assert warm["rounds"] == wiped["rounds"] == 2, "forward and backward were compared each time"
        assert wiped["fx"] == wiped["aot"] == 0
        if cold is None:
            cold = losses
        else:
            assert warm["aot" if aot_cache else "fx"] > 0
        assert losses == others == cold
        shutil.rmtree(tmp_path / "1")
