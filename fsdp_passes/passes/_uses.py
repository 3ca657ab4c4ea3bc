"""ParameterUse: what finding a parameter tells those who insert its communication."""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_passes.parameter import FsdpParameter, GradientSink


@dataclasses.dataclass(frozen=True)
class ParameterUse:
    """A placeholder of the traced graph that is the full-shaped stand-in of a sharded parameter.

    Attributes:
        node: the placeholder.
        position: its index among the graph's inputs.
        param: the parameter that was found there while compiling. At run time the same position may hold the
            parameter of another unit: one graph can serve every layer with the same code.
        unit_index: index of the parameter's unit among the units of this graph, in order of first use.
        is_last: whether its gradient is left to be reduced behind the graph, while the next one computes.
        sink: where the graph sends its gradient, as things were while compiling.
    """

    node: fx.Node
    position: int
    param: FsdpParameter
    unit_index: int
    is_last: bool = False
    sink: GradientSink = GradientSink.SHARD
