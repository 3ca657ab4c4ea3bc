"""What runs around a compiled graph: one autograd node, and constants that follow the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fsdp_passes import OverlapOptions
from fsdp_passes.compiled_call import CompiledCall
from fsdp_passes.parameter import FsdpParameter
from fsdp_passes.passes._uses import ParameterUse
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.graphs import sharded_transformer

pytestmark = pytest.mark.usefixtures("eight_fake_ranks")


def all_params() -> list[FsdpParameter]:
    return [param for unit in sharded_transformer()._fsdp_unit.context.units for param in unit.params]


def call_for(params: list[FsdpParameter], inner: Any) -> CompiledCall:
    node = fx.Graph().placeholder("weight")
    uses = [ParameterUse(node, position, param, 0) for position, param in enumerate(params)]
    return CompiledCall(inner, lambda *_: "compiled again", uses, [0], OverlapOptions(), list)


def test_shards_stand_where_the_placeholders_were_behind_one_autograd_node() -> None:
    params = all_params()
    params[0].sharded_param.requires_grad_(False)
    params[0].sync_requires_grad()
    call = call_for(params, lambda *inputs: inputs)
    *shards, label = call(*[param.placeholder for param in params])
    assert label is params[0].unit.label
    assert [shard.data_ptr() for shard in shards] == [param.padded_local.data_ptr() for param in params]
    assert shards[0].grad_fn is None
    assert len({shard.grad_fn for shard in shards[1:]}) == 1
    with torch.no_grad():
        assert all(shard.grad_fn is None for shard in call(*[param.placeholder for param in params]))


def test_a_parameter_that_was_frozen_or_whose_unit_changed_is_compiled_for_again() -> None:
    params = all_params()
    placeholders = [param.placeholder for param in params]
    call = call_for(params, lambda *_: "run")
    assert call(*placeholders) == "run"
    params[1].sharded_param.requires_grad_(False)
    assert call(*placeholders) == "compiled again"
    assert not params[1].placeholder.requires_grad
    params[1].sharded_param.requires_grad_(True)
    call(*placeholders)
    assert call(*placeholders) == "run"
    params[0].unit.reshard_after_forward = not params[0].unit.reshards_after_forward
    assert call(*placeholders) == "compiled again"


def test_a_unit_that_accumulates_is_compiled_for_again_unless_it_is_frozen() -> None:
    params = all_params()
    placeholders = [param.placeholder for param in params]
    unit = params[0].unit
    for param in unit.params:
        param.sharded_param.requires_grad_(False)
        param.sync_requires_grad()
    call = call_for(params, lambda *_: "run")
    unit.syncs_gradients = False
    assert call(*placeholders) == "run"
    params[-1].unit.syncs_gradients = False
    assert call(*placeholders) == "compiled again"


def test_constants_are_kept_until_something_in_them_changes() -> None:
    param = all_params()[0]
    before = param.graph_constants
    assert param.graph_constants is before
    of_unit = param.unit.graph_constants
    param.unit.rename(param.unit.name, is_root=not param.unit.is_root)
    assert param.unit.graph_constants != of_unit
    param.unit.rename(param.unit.name, is_root=not param.unit.is_root)
    assert param.unit.graph_constants == of_unit
    module, name = param.references[0]
    module.to(torch.bfloat16)
    assert param.graph_constants != before, name
