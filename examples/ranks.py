"""Where this process stands among the ranks, and how a script starts its own."""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process: its rank, how many there are, and its device."""

    rank: int
    num_ranks: int
    device: torch.device


def is_under_torchrun() -> bool:
    """Whether somebody started this process as one of several ranks."""
    return "RANK" in os.environ


def num_ranks_here() -> int:
    """How many ranks were started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(script: str, argv: list[str], num_ranks: int) -> int:
    """Run `script argv...` as `num_ranks` ranks on this machine, as torchrun would; the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # torchrun's own default is one thread a rank.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    try:
        torchrun(["--standalone", f"--nproc-per-node={num_ranks}", "--", script, *argv])
    except ChildFailedError as error:
        return max(1, error.get_first_failure()[1].exitcode)
    return 0


def join(device_type: str) -> Ranks:
    """Join the process group: gloo on the CPU, NCCL on GPUs, one of them for each rank of a machine."""
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
