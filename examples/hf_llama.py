"""Train a Llama of Hugging Face's `transformers`, built from a small configuration, on Python's standard library.

    torchrun --nproc-per-node 2 examples/hf_llama.py --steps 20
    torchrun --nproc-per-node 2 examples/hf_llama.py --steps 20 --eager          # not compiled
    torchrun --nproc-per-node 2 examples/hf_llama.py --steps 20 --accumulate 4   # four micro-batches, one reduction
    torchrun --nproc-per-node 4 examples/hf_llama.py --steps 20 --mesh 2x2       # two replicas of two shards
    python examples/hf_llama.py --steps 20 --reference                           # one process, not sharded

All of them print the same losses. Nothing is downloaded: weights are random, tokens are bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import ranks
from fsdp_passes import fully_shard, overlap_fsdp
from text import Batches, read_stdlib

SEED = 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; a combination that cannot work ends here."""
    parser = argparse.ArgumentParser(description="Train a small Llama of transformers, sharded over several ranks.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, help="ranks to start on this machine, without torchrun (default: 2)")
    parser.add_argument(
        "--mesh", type=mesh_shape, metavar="RxS", help="R replicas over S ranks each (default: 1 x all)"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over ranks and micro-batches")
    parser.add_argument("--seq", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="width, a multiple of 32")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor", help="who runs the graphs")
    parser.add_argument("--eager", action="store_true", help="sharded, not compiled")
    parser.add_argument("--reference", action="store_true", help="one process, not sharded")
    args = parser.parse_args(argv)
    if args.ranks is None:
        args.ranks = math.prod(args.mesh) if args.mesh else 2
    for name in ("steps", "ranks", "batch", "seq", "layers", "accumulate"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}.")
    if args.dim < 32 or args.dim % 32:
        parser.error(f"--dim must be a multiple of 32, got {args.dim}.")
    if args.reference and (args.eager or args.bf16 or ranks.is_under_torchrun()):
        parser.error("--reference is one process without sharding: start it with python, without --eager and --bf16.")
    num_ranks = 1 if args.reference else ranks.num_ranks_here() if ranks.is_under_torchrun() else args.ranks
    if args.mesh and math.prod(args.mesh) != num_ranks:
        parser.error(f"--mesh {args.mesh[0]}x{args.mesh[1]} needs {math.prod(args.mesh)} ranks, got {num_ranks}.")
    if args.batch % (num_ranks * args.accumulate):
        parser.error(f"--batch {args.batch} cannot be split into {num_ranks} rank(s) x {args.accumulate} part(s).")
    return args


def mesh_shape(text: str) -> tuple[int, int]:
    """(2, 4) for "2x4"."""
    replicas, separator, shards = text.partition("x")
    if not (separator and replicas.isdecimal() and shards.isdecimal() and int(replicas) and int(shards)):
        raise argparse.ArgumentTypeError(f"expected replicas x shards, for example 2x4, got {text!r}")
    return int(replicas), int(shards)


def make_llama(args: argparse.Namespace) -> nn.Module:
    """The model, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    heads = args.dim // 32
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.dim,
        intermediate_size=3 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def shard(model: nn.Module, args: argparse.Namespace, num_ranks: int) -> Callable[..., Any]:
    """Every decoder layer becomes a unit of its own; what to call instead of the model."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else None
    shape, names = (args.mesh, ("replicate", "shard")) if args.mesh else ((num_ranks,), ("shard",))
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=names)
    fully_shard(model, mesh=mesh, mp_policy=policy, units=["model.layers.*"])
    return model if args.eager else torch.compile(model, backend=overlap_fsdp, options={"inner": args.inner})


def reduces_once(
    model: nn.Module, args: argparse.Namespace, *, is_last: bool
) -> contextlib.AbstractContextManager[None]:
    """Around a micro-batch: gradients are reduced over all ranks behind the last one only. With replicas, each
    micro-batch is reduced over the shards, so that no rank keeps whole gradients."""
    if args.mesh:
        model.set_requires_all_reduce(is_last)
    return contextlib.nullcontext() if args.mesh or args.reference or is_last else model.no_sync()


def train(args: argparse.Namespace, here: ranks.Ranks) -> None:
    """Train, and print the mean loss over the ranks in each step."""
    model = make_llama(args).to(here.device)
    call = model if args.reference else shard(model, args, here.num_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = Batches(read_stdlib(), args.batch, args.seq, SEED)
    if here.rank == 0:
        way = "not sharded" if args.reference else "sharded, not compiled" if args.eager else "sharded, compiled"
        mesh = f" as {args.mesh[0]} replicas over {args.mesh[1]} shards" if args.mesh else ""
        millions = sum(param.numel() for param in model.parameters()) / 1e6
        print(f"{millions:.1f} M parameters, {here.num_ranks} rank(s){mesh} on {here.device.type}, {way}")
    for step in range(args.steps):
        tokens = batches.at(step, here.rank, here.num_ranks)[0].to(here.device)
        total = torch.zeros((), device=here.device)
        parts = tokens.chunk(args.accumulate)
        for part in parts:
            with reduces_once(model, args, is_last=part is parts[-1]):
                loss: Tensor = call(input_ids=part, labels=part).loss / args.accumulate
                loss.backward()
            total += loss.detach().float()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if here.num_ranks > 1:
            dist.all_reduce(total)
        if here.rank == 0:
            print(f"step {step + 1}: loss {total.item() / here.num_ranks:.5f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the example; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("hf_llama.py: error: transformers is missing. Run: pip install -e '.[examples]'", file=sys.stderr)
        return 2
    if args.reference:
        train(args, ranks.Ranks(0, 1, torch.device(args.device)))
        return 0
    if not ranks.is_under_torchrun():
        return ranks.start(__file__, argv, args.ranks)
    train(args, ranks.join(args.device))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
