"""The emulated collective's kernel in Triton's interpreter, on the CPU; run by test_bench_emulated.py in a process of
its own, since the interpreter is chosen when Triton is imported."""

from __future__ import annotations

import torch
import triton.language as tl

from bench.emulated.kernel import ALL_GATHER, REDUCE_SCATTER, SCALE, emulated_collective

WORLD, RANK, BLOCK = 4, 1, 64


def launch(kind: int, rows: list[tuple[int, int, int]], scale: float, dtype: tl.dtype, is_aligned: bool) -> None:
    table = torch.tensor(rows, dtype=torch.int64)
    emulated_collective[(3,)](
        table,
        len(rows),
        0,
        RANK,
        scale,
        0,
        KIND=kind,
        WORLD=WORLD,
        DTYPE=dtype,
        IS_ALIGNED=is_aligned,
        IS_SCALED=scale != 1,
        IS_TIMED=False,
        BLOCK=BLOCK,
    )


def main() -> None:
    parts = [torch.randn(256), torch.randn(48), torch.randn(1008)]  # more than, less than, and no multiple of a block
    wholes = [torch.zeros(part.numel() * WORLD) for part in parts]
    rows = [(part.data_ptr(), whole.data_ptr(), part.numel()) for part, whole in zip(parts, wholes, strict=True)]
    launch(ALL_GATHER, rows, 1.0, tl.int32, True)
    assert all(torch.equal(whole, part.repeat(WORLD)) for part, whole in zip(parts, wholes, strict=True))

    wholes = [torch.randn(part.numel() * WORLD) for part in parts]
    rows = [(whole.data_ptr(), part.data_ptr(), part.numel()) for part, whole in zip(parts, wholes, strict=True)]
    launch(REDUCE_SCATTER, rows, float(WORLD), tl.float32, True)
    assert all(torch.equal(part, whole.chunk(WORLD)[RANK] * WORLD) for part, whole in zip(parts, wholes, strict=True))

    odd = torch.randn(7 * WORLD).bfloat16()
    part = torch.zeros(7).bfloat16()
    launch(REDUCE_SCATTER, [(odd.data_ptr(), part.data_ptr(), part.nbytes)], 1.0, tl.int8, False)
    assert torch.equal(part, odd[7:14])

    value = torch.randn(100)
    expected = value * WORLD
    launch(SCALE, [(value.data_ptr(), value.data_ptr(), 100)], float(WORLD), tl.float32, False)
    assert torch.equal(value, expected)
    print("equal")


if __name__ == "__main__":
    main()
