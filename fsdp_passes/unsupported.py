"""The methods of FSDP2 that have no counterpart here: each says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from fsdp_passes.errors import UnsupportedArgumentError


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedArgumentError(name, args[0] if args else next(iter(kwargs.values()), None), instead)

    method.__name__, method.__doc__ = name, f"Raises `UnsupportedArgumentError`. {instead}"
    return method


class UnsupportedMethods:
    """A part of `FsdpModule`: scripts that call one of these stop at once, with the name of what they called."""

    set_custom_all_gather = _refused("set_custom_all_gather", "Leave it out: options={'bucket_mode': ...} chooses one.")
    set_custom_reduce_scatter = _refused(
        "set_custom_reduce_scatter", "Leave it out: options={'bucket_mode': ...} chooses one."
    )
    set_all_reduce_hook = _refused(
        "set_all_reduce_hook",
        "All-reduce the gradients yourself behind backward(): param.grad.to_local() of every parameter.",
    )
    set_post_optim_event = _refused(
        "set_post_optim_event",
        "Leave it out: run the optimizer on the current stream, for which the next gather waits.",
    )
    set_force_sum_reduction_for_comms = _refused(
        "set_force_sum_reduction_for_comms", "set_gradient_divide_factor(world_size) sums and divides afterwards."
    )
    set_reduce_scatter_unused_params = _refused(
        "set_reduce_scatter_unused_params",
        "Let every rank use every trainable parameter: add 0 * param.sum() to the loss where it is not used.",
    )
    set_reduce_scatter_max_input_buffers = _refused(
        "set_reduce_scatter_max_input_buffers", "Leave it out: at most two units' gradients are held."
    )
    set_separate_reduce_scatter_group = _refused(
        "set_separate_reduce_scatter_group",
        "Compile with options={'unify_communication_stream': False}, which does the same.",
    )
    set_allocate_memory_from_process_group_for_comm = _refused(
        "set_allocate_memory_from_process_group_for_comm",
        "Leave it out: communication buffers come from the caching allocator.",
    )
    set_symm_mem_for_comm = _refused(
        "set_symm_mem_for_comm", "Leave it out: communication buffers come from the caching allocator."
    )
