"""The methods that FSDP2 gives to modules, each against FSDP2 itself on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_passes import fully_shard
from fsdp_passes.errors import OptionValueError, UnsupportedArgumentError
from fsdp_passes.fsdp_module import FsdpModule
from fsdp_passes.pipeline import record_compilations
from fsdp_passes.unsupported import UnsupportedMethods
from tests.distributed.checks import WAYS, call_of, collectives, kinds, recorded_regions
from tests.models import Transformer, token_batches
from tests.profiles import cpu_profile
from tests.ranks import RankPool
from tests.training import build, my_share, whole

HERE = "tests.distributed.test_fsdp2_methods"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def pair(policy: MixedPrecisionPolicy | None = None) -> tuple[Any, Any]:
    """One model sharded by us and its twin by FSDP2. 61 rows do not divide by two."""
    model, twin = build(lambda: Transformer(layers=2, hidden=61))
    policy = policy or MixedPrecisionPolicy()
    fully_shard(model, units=["layers.*"], mp_policy=policy)
    for module in (*twin.layers, twin):
        fsdp2.fully_shard(module, mp_policy=policy)
    return model, twin


def assert_same_grads(model: nn.Module, twin: nn.Module, what: str, atol: float = 1e-5) -> None:
    for (name, param), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), f"{what}, {name}"
        if param.grad is not None:
            assert param.grad.dtype == expected.grad.dtype
            torch.testing.assert_close(
                whole(param.grad), whole(expected.grad), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


def num_reductions(step: Callable[[], None]) -> int:
    """Reduce-scatters of compiled code and of eager code while `step` runs."""
    with cpu_profile() as profiler:
        step()
    names = [event.name for event in profiler.events()]
    compiled = [name for name in names if name.startswith("_c10d_functional::reduce_scatter")]
    return len(compiled) + sum(name.startswith("FSDP:") and name.endswith(":reduce_scatter") for name in names)


# ---- gradient sync ---------------------------------------------------------------------------------------------------


def accumulation(way: str, how: str, policy: MixedPrecisionPolicy | None) -> None:
    """Steps of three micro-batches, of which the last reduces, around a step of one: two graphs and no more."""
    model, twin = pair(policy)
    call = call_of(model, way)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, twin)]
    batches = iter(token_batches(10, 4, 8))
    num_units = 3
    atol = 1e-5 if policy is None or way != "inductor" else 2e-3
    with record_compilations() as records:
        for step, num_batches in enumerate((3, 1, 3, 3)):
            for micro in range(num_batches):
                is_last = micro == num_batches - 1
                batch = my_share(next(batches))
                twin.set_requires_gradient_sync(is_last)
                twin(*batch).backward()
                if how == "flag":
                    model.set_requires_gradient_sync(is_last)
                    call(*batch).backward()
                elif is_last:
                    call(*batch).backward()
                else:
                    with model.no_sync():
                        call(*batch).backward()
                    assert all(param.grad is None for param in model.parameters())
            assert_same_grads(model, twin, f"step {step}", atol=atol)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(records) == (0 if way == "fallback" else 2), [record.unit_names for record in records]

    batch = my_share(token_batches(1, 4, 8)[0])

    def step() -> None:
        call(*batch).backward()

    with model.no_sync():
        assert num_reductions(step) == 0
    assert num_reductions(step) == num_units


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["flag", "no_sync"])
def test_micro_batches_without_gradient_sync_are_reduced_once_and_equal_fsdp2(
    two_ranks: RankPool, how: str, way: str
) -> None:
    two_ranks.run(f"{HERE}:accumulation", way=way, how=how, policy=None)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_gradients_are_accumulated_in_the_reduce_dtype(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:accumulation", way=way, how="flag", policy=BF16)


def test_inductor_compiles_the_graph_without_reductions(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:accumulation", way="inductor", how="no_sync", policy=None)


def sync_of_one_layer(way: str) -> None:
    """Only layer 0 accumulates; layer 1 and the root reduce every micro-batch."""
    model, twin = pair()
    call = call_of(model, way)
    batches = token_batches(2, 4, 8)
    for batch, is_last in zip(batches, (False, True), strict=True):
        for module, run in ((model, call), (twin, twin)):
            module.layers[0].set_requires_gradient_sync(is_last, recurse=False)
            run(*my_share(batch)).backward()
        assert_same_grads(model, twin, f"is_last={is_last}")


@pytest.mark.parametrize("way", WAYS)
def test_gradient_sync_can_be_off_for_one_unit(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:sync_of_one_layer", way=way)


def compiled_layers_accumulate() -> None:
    """Layers compiled on their own, whose one artifact serves both; each has its own flag."""
    model, twin = pair()
    for layer in model.layers:
        layer.compile(**{"backend": "overlap_fsdp", "options": {"inner": "aot_eager"}})
    for step, batch in enumerate(token_batches(4, 4, 8)):
        for module in (model, twin):
            module.set_requires_gradient_sync(step % 2 == 1)
            module(*my_share(batch)).backward()
        assert_same_grads(model, twin, f"micro-batch {step}")


def test_layers_compiled_on_their_own_accumulate(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:compiled_layers_accumulate")


def dropped_by_an_exception() -> None:
    """What was accumulated belongs to the step that failed."""
    model, twin = pair()
    batch, other = (my_share(batch) for batch in token_batches(2, 4, 8))
    with model.no_sync():
        model(*batch).backward()
        handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(*other)
        handle.remove()
    model(*other).backward()
    twin(*other).backward()
    assert_same_grads(model, twin, "after the exception")


def test_an_exception_drops_what_was_accumulated(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:dropped_by_an_exception")


def reductions_left_on_their_way(way: str) -> None:
    model, twin = pair()
    call = call_of(model, way)
    for batch, is_last in zip(token_batches(3, 4, 8), (False, False, True), strict=True):
        for module, run in ((model, call), (twin, twin)):
            module.set_is_last_backward(is_last)
            run(*my_share(batch)).backward()
        if not is_last and way == "fallback":
            assert len(model._fsdp_unit.context.started_reductions) > 0
    assert_same_grads(model, twin, "after the last backward")


@pytest.mark.parametrize("way", WAYS)
def test_backwards_that_are_not_the_last_leave_reductions_on_their_way(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:reductions_left_on_their_way", way=way)


def divided(way: str) -> None:
    """The factor of a unit is its own; switching it is not stale in a compiled graph. FSDP2 itself cannot do this over
    gloo, so its mean is scaled."""
    model, twin = pair()
    call = call_of(model, way)
    for step, batch in enumerate(token_batches(3, 4, 8)):
        if step == 1:
            for unit in (*model.layers, model):
                unit.set_gradient_divide_factor(8.0)
        elif step == 2:
            model.layers[1].set_gradient_divide_factor(3.0)
        call(*my_share(batch)).backward()
        twin(*my_share(batch)).backward()
        for name, param in twin.named_parameters():
            factor = 2.0 if step == 0 else 3.0 if step == 2 and name.startswith("layers.1.") else 8.0
            param.grad.mul_(2 / factor)
        assert_same_grads(model, twin, f"step {step}")
        for module in (model, twin):
            module.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_divided_by_the_factor_that_is_set(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:divided", way=way)


# ---- what stays gathered ---------------------------------------------------------------------------------------------


def kept_behind_the_backward(way: str) -> None:
    model, twin = pair()
    call = call_of(model, way)
    batches = [my_share(batch) for batch in token_batches(3, 4, 8)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, twin)]

    def run(batch: Any, is_last: bool) -> int:
        twin.set_reshard_after_backward(is_last)
        twin(*batch).backward()
        model.set_reshard_after_backward(is_last)
        with recorded_regions() as seen:
            call(*batch).backward()
        return sum(name.endswith(":all_gather") for name in seen)

    gathers = [run(batches[0], False), run(batches[1], True)]
    assert_same_grads(model, twin, "two micro-batches")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    gathers.append(run(batches[2], False))
    for optimizer in optimizers:
        optimizer.step()  # written while gathered
        optimizer.zero_grad()
    for unit in (*twin.layers, twin):
        unit.reshard()  # FSDP2 does not see that they were written
    gathers.append(run(batches[0], True))
    assert_same_grads(model, twin, "after a step")
    if way == "fallback":
        # Three units are gathered in the forward, two layers again in the backward. The second micro-batch finds all
        # three gathered; the last one was written since.
        assert gathers == [5, 2, 5, 5], gathers
        assert all(param.placeholder.untyped_storage().size() == 0 for unit in units_of(model) for param in unit.params)


def units_of(model: nn.Module) -> list[Any]:
    return model._fsdp_unit.context.units


@pytest.mark.parametrize("way", WAYS)
def test_parameters_stay_gathered_behind_the_backward_until_they_are_written(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:kept_behind_the_backward", way=way)


def kept_behind_the_forward(way: str) -> None:
    model, twin = pair()
    call = call_of(model, way)
    batches = [my_share(batch) for batch in token_batches(2, 4, 8)]
    seen = []
    with record_compilations() as records:
        for reshard, batch in zip((True, False), batches, strict=True):
            for module, run in ((model, call), (twin, twin)):
                module.set_reshard_after_forward(reshard)
                with recorded_regions() as regions:
                    run(*batch).backward()
                seen += [sum(name.endswith(":all_gather") for name in regions)] if module is model else []
            assert_same_grads(model, twin, f"reshard={reshard}")
    if way == "fallback":
        assert seen == [6, 3]
    else:
        regathers = [kinds(collectives(record, "backward")).count("all_gather") for record in records]
        assert regathers[0] >= 3, "a root that reshards is gathered again too"
        assert regathers[1:] == [0]


@pytest.mark.parametrize("way", WAYS)
def test_resharding_behind_the_forward_can_be_switched(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:kept_behind_the_forward", way=way)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).square().mean()


def embedding_without_a_gather_in_the_backward(way: str) -> None:
    model, twin = build(Lookup)
    fully_shard(model, units=["embed"])
    fsdp2.fully_shard(twin.embed)
    fsdp2.fully_shard(twin)
    call = call_of(model, way)
    tokens = torch.arange(6) + 5 * torch.distributed.get_rank()
    for module, run in ((model, call), (twin, twin)):
        module.embed.set_unshard_in_backward(False)
        with recorded_regions() as seen:
            run(tokens).backward()
        if module is model and way == "fallback":
            assert [name for name in seen if name.endswith(":all_gather")].count("FSDP:embed:all_gather") == 1
    assert_same_grads(model, twin, "embedding")


@pytest.mark.parametrize("way", WAYS)
def test_an_embedding_need_not_be_gathered_for_its_backward(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:embedding_without_a_gather_in_the_backward", way=way)


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_every_public_method_of_fsdp2_is_there() -> None:
    theirs = {name for name, value in vars(FSDPModule).items() if callable(value) and not name.startswith("_")}
    assert theirs - set(dir(FsdpModule)) == set()


def refused(name: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(UnsupportedArgumentError, match=name):
        getattr(model, name)(True)


@pytest.mark.parametrize("name", [name for name in vars(UnsupportedMethods) if not name.startswith("_")])
def test_methods_without_a_counterpart_name_themselves_and_say_what_to_do(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(f"{HERE}:refused", name=name)


def bad_values() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(OptionValueError, match="factor above 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(OptionValueError, match="True or False"):
        model.set_reshard_after_forward(2)
    model.set_requires_all_reduce(False)  # no replicas: nothing changes, as in FSDP2
    model.reset_iter_state()


def test_values_out_of_range_are_refused(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:bad_values")


# ---- ignored parameters ----------------------------------------------------------------------------------------------


def ignored(way: str) -> None:
    """The ignored head stays whole; its gradient is this rank's own, as with FSDP2."""
    model, twin = build(Lookup)
    fully_shard(model, ignored_params=set(model.head.parameters()))
    fsdp2.fully_shard(twin, ignored_params=set(twin.head.parameters()))
    tokens = torch.arange(6) + 5 * torch.distributed.get_rank()
    for run in (call_of(model, way), twin):
        run(tokens).backward()
    assert type(model.head.weight) is nn.Parameter
    assert_same_grads(model, twin, "ignored head")


@pytest.mark.parametrize("way", WAYS)
def test_ignored_parameters_stay_as_they_are(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:ignored", way=way)
