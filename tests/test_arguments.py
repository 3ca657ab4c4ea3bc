"""The named arguments are those of the operators' schemas."""

from __future__ import annotations

import pytest

from fsdp_passes.arguments import ReduceGrad, ReduceReplicas, Unshard
from fsdp_passes.ops import REDUCE_GRAD, REDUCE_REPLICAS, UNSHARD


@pytest.mark.parametrize(
    ("kind", "op"), [(Unshard, UNSHARD), (ReduceGrad, REDUCE_GRAD), (ReduceReplicas, REDUCE_REPLICAS)]
)
def test_names_and_defaults_are_the_schema_s(kind: type, op: object) -> None:
    schema = op._schema.arguments  # type: ignore[attr-defined]
    assert kind._fields == tuple(argument.name for argument in schema)  # type: ignore[attr-defined]
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    assert kind._field_defaults == defaults  # type: ignore[attr-defined]
