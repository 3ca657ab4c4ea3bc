"""Where this process stands among the ranks, and how a script starts its own."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

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


def _store_of_this_attempt() -> dict[str, Any]:
    """Arguments of `init_process_group` for a run that torchrun has restarted on this machine.

    torchrun lends all attempts the same store, in which the new ranks would find the addresses of the dead ones. On one
    machine the number of restarts tells attempts apart. On several machines each launcher counts for itself: there,
    start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and every attempt has a store of its own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_lent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_lent or attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(address, port, is_master=False))
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": num_ranks_here()}


def join(device_type: str) -> Ranks:
    """Join the process group: gloo on the CPU, NCCL on GPUs, one of them for each rank of a machine."""
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **_store_of_this_attempt())
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **_store_of_this_attempt())
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
