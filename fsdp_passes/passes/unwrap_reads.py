"""Let the operators of a traced graph read parameters themselves, and only what leaves the graph a view of them."""

from __future__ import annotations

from torch import fx, nn

from fsdp_passes._torch_compat import where_autograd_is_off


def unwrap_reads(gm: fx.GraphModule) -> int:
    """Take away the views in whose guise traced code reads parameters (see `FsdpParameter.traced_face`), also in the
    bodies of operators that take code, which are changed in place. Those that the graph returns stay: their values are
    the gathered ones, and their gradient comes back. Where one was read in a `no_grad`, it moves ahead of that: the
    parameter itself would have a gradient there too.

    Requires: a graph straight from Dynamo. Does nothing in a second run.
    Returns: number of views that are gone.
    """
    num_gone = 0
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            num_gone += _unwrap(part)
    return num_gone


def _unwrap(gm: fx.GraphModule) -> int:
    output = gm.graph.output_node()
    off = where_autograd_is_off(gm.graph)
    num_gone = 0
    for view in gm.graph.find_nodes(op="call_method", target="view_as"):
        param, like = view.args
        if param is not like or not isinstance(param.meta.get("example_value"), nn.Parameter):
            continue
        view.replace_all_uses_with(param, delete_user_cb=lambda user: user is not output)
        switch = off.get(view)
        if not view.users:
            gm.graph.erase_node(view)
            num_gone += 1
        elif switch is not None:
            switch.prepend(view)
    gm.recompile()
    return num_gone
