"""What passes share: making nodes with a value and a bucket, and whose group a collective is on."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fsdp_passes._torch_compat import FakeTensorMode, detect_fake_mode
from fsdp_passes.gather_ops import ALL_GATHER_AHEAD_OP, ALL_GATHER_OP
from fsdp_passes.home_ops import SEND_HOME
from fsdp_passes.mesh import REDUCE_GROUP_SUFFIX
from fsdp_passes.ops import PINNED_HOME, c10d
from fsdp_passes.reduce_ops import REDUCE_SCATTER_OP
from fsdp_passes.schedule import BUCKET_META, FINISH, ROLE_META, WAIT, Bucket

aten = torch.ops.aten
prims = torch.ops.prims


class BucketBuilder:
    """Inserts the nodes of one bucket, each with its fake value, its bucket and role, and `source`'s provenance."""

    def __init__(self, graph: fx.Graph, bucket: Bucket, source: fx.Node) -> None:
        self.graph = graph
        self.bucket = bucket
        self.source = source
        mode = detect_fake_mode([source.meta["val"]])
        assert mode is not None, f"{source.name} has no fake value"
        self.fake_mode: FakeTensorMode = mode

    def call(self, role: str, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        """Insert `target(*args)` at the graph's current insertion point."""
        values = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.fake_mode:
            value = target(*values[0], **values[1])
        return self._insert(role, value, target, args, kwargs, name)

    def results(self, start: fx.Node, num_results: int) -> list[fx.Node]:
        """Each result of `start`, behind its own wait. Their values are known: computing them once more would take half
        of the time of all bucketing."""
        values = start.meta["val"]
        items = [self._insert(WAIT, values[i], operator.getitem, (start, i)) for i in range(num_results)]
        return [self.wait(item) for item in items]

    def wait(self, result: fx.Node) -> fx.Node:
        """`result` behind its wait."""
        return self._insert(WAIT, result.meta["val"], c10d.wait_tensor.default, (result,))

    def _insert(
        self,
        role: str,
        value: Any,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = value
        for key in ("stack_trace", "nn_module_stack", "seq_nr", "from_node", "partitioner_tag"):
            if key in self.source.meta:
                node.meta[key] = self.source.meta[key]
        node.meta[BUCKET_META] = self.bucket
        node.meta[ROLE_META] = role
        return node

    def reorder(
        self, role: str, node: fx.Node, shape: list[Any], source: int, destination: int, result: torch.Size
    ) -> fx.Node:
        """`node` seen in `shape`, its dimension `source` moved to `destination`, as a contiguous tensor of the shape
        `result`: how shards along another dimension than 0 come together, and apart."""
        order = [dim for dim in range(len(shape)) if dim != source]
        order.insert(destination, source)
        node = self.call(role, aten.view.default, node, shape)
        node = self.call(role, aten.permute.default, node, order)
        node = self.call(role, aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(role, aten.view.default, node, list(result))

    def cast(self, role: str, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` in `dtype`; the node itself when it already is."""
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(role, prims.convert_element_type.default, node, dtype)

    def send_home(self, grads: list[fx.Node], label: fx.Node | None, homes: list[str]) -> list[fx.Node]:
        """Finished gradients where they belong: those with a home are sent to the CPU, together."""
        results = list(grads)
        for home in sorted(set(homes) - {""}):
            chosen = [index for index, own in enumerate(homes) if own == home]
            sent = self.call(FINISH, SEND_HOME, [grads[index] for index in chosen], label, home == PINNED_HOME)
            for item, index in enumerate(chosen):
                results[index] = self.call(FINISH, operator.getitem, sent, item)
        return results


_STARTS = (ALL_GATHER_OP, ALL_GATHER_AHEAD_OP, REDUCE_SCATTER_OP)


def group_of_start(node: fx.Node) -> str | None:
    """The group that a node starts a collective on, under the name of the mesh's group; None for other nodes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace != "_c10d_functional" and target not in _STARTS:
        return None
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "group_name":
            name = node.args[index] if index < len(node.args) else node.kwargs.get("group_name")
            return str(name).removesuffix(REDUCE_GROUP_SUFFIX)
    return None  # wait_tensor
