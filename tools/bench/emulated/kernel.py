"""The one kernel of an emulated collective: copy, then hold the multiprocessors until the modelled time is over."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BLOCK = 8192
NUM_WARPS = 16

ALL_GATHER, REDUCE_SCATTER, SCALE = 0, 1, 2


@triton.jit(do_not_specialize=["num_entries", "duration_ns", "rank", "scale", "never"])
def emulated_collective(
    table,
    num_entries,
    duration_ns,
    rank,
    scale,
    never,
    KIND: tl.constexpr,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_TIMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Carry out one collective, grouped or not, on all its tensors.

    Args:
        table: int64[num_entries, 3]: address of the input, address of the output, elements of one rank's part.
        duration_ns: how long each thread block stays, measured by the GPU's nanosecond clock from its own start.
        rank: the part of a reduce-scatter's input that the output gets.
        scale: factor of every output value (with IS_SCALED).
        never: 0. A value that the compiler does not know keeps the reads of the other ranks' parts in the code: a real
            reduce-scatter reads its whole input, and that traffic competes with the compute's.
        IS_ALIGNED: addresses are multiples of 16 bytes and parts of 16 elements: wide loads and stores.
    """
    if IS_TIMED:
        start = globaltimer()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    entry = 0
    while entry < num_entries:  # `range` of an argument fails in the interpreter with numpy 2.4
        source = tl.load(table + entry * 3).to(tl.pointer_type(DTYPE))
        target = tl.load(table + entry * 3 + 1).to(tl.pointer_type(DTYPE))
        numel = tl.load(table + entry * 3 + 2)
        if IS_ALIGNED:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
            numel = tl.multiple_of(numel, 16)
        first = program.to(tl.int64) * BLOCK
        while first < numel:
            index = first + tl.arange(0, BLOCK)
            mask = index < numel
            if KIND == 1:
                value = tl.load(source + rank * numel + index, mask=mask)
                for other in tl.static_range(WORLD):
                    unused = tl.load(source + other * numel + index, mask=mask)
                    value = tl.where(never == other + 1, unused, value)
            else:
                value = tl.load(source + index, mask=mask)
            if IS_SCALED:
                value = (value * scale).to(DTYPE)
            if KIND == 0:
                for other in tl.static_range(WORLD):
                    tl.store(target + other * numel + index, value, mask=mask)
            else:
                tl.store(target + index, value, mask=mask)
            first += num_programs * BLOCK
        entry += 1
    if IS_TIMED:
        now = globaltimer()
        while now - start < duration_ns:
            now = globaltimer()
