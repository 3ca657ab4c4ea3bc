"""Train a GPT of about 10 M parameters on the sources of the Python standard library.

    python examples/train_gpt.py --steps 30                      # two ranks on this machine, sharded and compiled
    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 30 # the same
    python examples/train_gpt.py --steps 30 --reference          # one process, not sharded: the same losses

With `--checkpoint DIR` a run that was stopped or killed goes on from its newest checkpoint when started again; under
`torchrun --max-restarts 2` that happens by itself when a rank dies (on several machines, see `ranks.join`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import checkpoint
import ranks
from fsdp_passes import fully_shard, overlap_fsdp
from gpt import GPT, HEAD_DIM
from text import Batches, read_stdlib

try:
    from tqdm import tqdm
except ImportError:
    sys.exit("train_gpt.py: error: tqdm is missing. Run: pip install -e '.[examples]'")

WARMUP_STEPS = 10  # of the learning rate: Adam's first steps go by the sign of the gradients alone


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a GPT on the sources of the Python standard library, sharded over several ranks."
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--compile", dest="way", action="store_const", const="compile", help="sharded, compiled (default)"
    )
    ways.add_argument("--eager", dest="way", action="store_const", const="eager", help="sharded, not compiled")
    ways.add_argument(
        "--reference", dest="way", action="store_const", const="reference", help="one process, no sharding"
    )
    parser.set_defaults(way="compile")
    parser.add_argument("--ranks", type=int, help="ranks to start on this machine (default: one for each GPU, or 2)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a global batch, over all ranks")
    parser.add_argument("--seq", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=320, help=f"width, a multiple of {HEAD_DIM}")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bfloat16; float32 weights and sums")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save there, and go on from what is there")
    parser.add_argument(
        "--save-every", "--checkpoint-every", type=int, metavar="N", help="steps between checkpoints (default: 50)"
    )
    # Not "--log": torchrun takes that for an abbreviation of its own options, even behind the script's name.
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="write a JSON line for each step")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line and fill in what depends on the machine; a combination that cannot work ends here."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device on this machine. Use --device cpu.")
    started = ranks.num_ranks_here() if ranks.is_under_torchrun() else None
    wanted = started if args.ranks is None else args.ranks
    if args.way == "reference":
        if wanted not in (None, 1):
            parser.error(f"--reference is one process, not {wanted} ranks. Leave out --ranks and start it with python.")
        if args.bf16:
            parser.error("--bf16 is the mixed precision of sharded parameters; --reference has none. Leave one out.")
    elif started is not None and wanted != started:
        parser.error(f"--ranks {wanted}, but torchrun started {started}. Leave out --ranks under torchrun.")
    if args.save_every is not None and args.checkpoint is None:
        parser.error("--save-every needs --checkpoint DIR.")
    args.save_every = 50 if args.save_every is None else args.save_every
    default = torch.cuda.device_count() if args.device == "cuda" else 2
    args.ranks = 1 if args.way == "reference" else wanted if wanted is not None else default
    for name in ("ranks", "steps", "batch", "seq", "layers", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    if args.dim < HEAD_DIM or args.dim % HEAD_DIM:
        parser.error(f"--dim must be a multiple of {HEAD_DIM}, got {args.dim}.")
    if args.batch % args.ranks:
        parser.error(f"--batch {args.batch} cannot be split evenly over {args.ranks} ranks.")
    return args


def shard(model: nn.Module, args: argparse.Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    """Shard the model, every block a unit of its own; what to call instead of it."""
    mesh = init_device_mesh(args.device, (args.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
    for layer in model.layers.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model if args.way == "eager" else torch.compile(model, backend=overlap_fsdp)


def train(args: argparse.Namespace, here: ranks.Ranks) -> None:
    """Train up to `args.steps` steps, from the newest checkpoint if there is one."""
    torch.manual_seed(args.seed)  # the same whole model on every rank; each then keeps its shards of it
    model = GPT(args.dim, args.layers, args.seq).to(here.device)
    num_params = sum(param.numel() for param in model.parameters())
    call = model if args.way == "reference" else shard(model, args)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.95))
    batches = Batches(read_stdlib(), args.batch, args.seq, args.seed)

    history: list[dict[str, Any]] = []  # what the log holds: one entry for each step so far
    shape = {"dim": args.dim, "layers": args.layers, "seq": args.seq}
    if args.checkpoint is not None:
        found = checkpoint.load_newest(args.checkpoint, model, optimizer, shape)
        history = found["history"] if found else []
    is_first = here.rank == 0
    if is_first:
        ways = {"compile": "sharded, compiled", "eager": "sharded, not compiled", "reference": "not sharded"}
        print(f"{num_params / 1e6:.1f} M parameters, {here.num_ranks} rank(s) on {here.device.type}, {ways[args.way]}")
        if history:
            rest = "nothing is left to do" if len(history) >= args.steps else "going on from there"
            print(f"{args.checkpoint} holds step {len(history)}: {rest}")
    # A killed run may have logged steps behind its last checkpoint: they will come again.
    log = args.log_file.open("w", buffering=1) if is_first and args.log_file is not None else None
    for entry in history if log else ():
        print(json.dumps(entry), file=log)

    bar = tqdm(total=args.steps, initial=len(history), unit="step", disable=not is_first, mininterval=0.5)
    for step in range(len(history), args.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        tokens, targets = (t.to(here.device) for t in batches.at(step, here.rank, here.num_ranks))
        loss = call(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if here.num_ranks > 1:
            dist.all_reduce(mean)
        entry = {"step": step + 1, "loss": mean.item() / here.num_ranks}
        entry["tokens_per_s"] = round(args.batch * args.seq / (time.perf_counter() - begin), 1)
        history.append(entry)
        bar.set_postfix_str(f"loss {entry['loss']:.4f}, {entry['tokens_per_s']:,.0f} tokens/s", refresh=False)
        bar.update()
        if log:
            print(json.dumps(entry), file=log)
        if args.checkpoint is not None and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            progress = {"step": step + 1, "shape": shape, "history": history}
            checkpoint.save(args.checkpoint, progress, model, optimizer)
    bar.close()
    if log:
        log.close()
    if is_first:
        print(summary(history))


def summary(history: list[dict[str, Any]]) -> str:
    """First and last loss, and the median speed, which leaves the compilation out."""
    first, last = history[0], history[-1]
    speed = statistics.median(entry["tokens_per_s"] for entry in history)
    return (
        f"step {first['step']}: loss {first['loss']:.6f}\n"
        f"step {last['step']}: loss {last['loss']:.6f}   median {speed:,.0f} tokens/s"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the example; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    is_reference = args.way == "reference"
    if not is_reference and not ranks.is_under_torchrun():
        return ranks.start(__file__, argv, args.ranks)
    here = ranks.Ranks(0, 1, torch.device(args.device)) if is_reference else ranks.join(args.device)
    try:
        train(args, here)
    except checkpoint.CheckpointError as error:  # on every rank
        if here.rank == 0 or isinstance(error, checkpoint.DamagedCheckpointError):
            print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    if not is_reference:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
