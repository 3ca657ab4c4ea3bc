"""Several NCCL ranks on one GPU: CUDA MPS, so that they run at once, and NCCL's switch that allows it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.launch import signals_ignored
from bench.report import say

# Too many thread blocks of all ranks together can lock NCCL up: 16 in all worked for two and for four ranks.
_ALL_CTAS = 16
# The first release whose communicators may have several ranks on one GPU.
_FIRST_NCCL = (2, 30)
# CUDA's default for a process that has the GPU to itself. A client of MPS gets fewer, and then a kernel of the compute
# stands in one hardware queue behind a collective that waits for the collective ahead of it: an overlap that the
# streams allow does not happen.
_HARDWARE_QUEUES = "8"


class SharedGpuError(Exception):
    """Ranks cannot share a GPU here."""


def nccl_version(library: str) -> tuple[int, int]:
    """(major, minor) of a libnccl.so.2."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except OSError as error:
        raise SharedGpuError(f"Expected --nccl to be a library of NCCL, found {library}: {error}") from error
    return number.value // 10000, number.value % 10000 // 100


def nccl_environment(num_ranks: int, library: str | None) -> dict[str, str]:
    """The variables of each rank. Raises `SharedGpuError` for a library that is too old."""
    if library is not None:
        library = str(Path(library).resolve())
        version = nccl_version(library)
        if version < _FIRST_NCCL:
            raise SharedGpuError(
                f"Expected NCCL 2.30 or newer, found {version[0]}.{version[1]} in {library}: older ones refuse two "
                "ranks on one GPU."
            )
    variables = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": str(max(1, _ALL_CTAS // num_ranks)),
        "NCCL_NVLS_ENABLE": "0",
    }
    return variables | ({"LD_PRELOAD": library} if library else {})


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """Run CUDA MPS with a folder of its own; yields the variables that let a process use it.

    A number of hardware queues that the caller's environment names stays.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    smi = shutil.which("nvidia-smi")
    if program is None and smi is not None:
        beside = Path(smi).resolve().parent / "nvidia-cuda-mps-control"
        program = str(beside) if beside.exists() else None
    if program is None:
        raise SharedGpuError(
            "Expected nvidia-cuda-mps-control on the PATH or beside nvidia-smi, found none: without it the ranks take "
            "turns on the GPU and times mean nothing. It comes with NVIDIA's driver."
        )
    # A short path: the socket in it may have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="mps", dir="/tmp")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    environment = {**os.environ, **variables}
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", _HARDWARE_QUEUES)
    try:
        subprocess.run([program, "-d"], env=environment, check=True, timeout=60)
        say("started CUDA MPS")
        yield {**variables, "CUDA_DEVICE_MAX_CONNECTIONS": queues}
    finally:
        with signals_ignored():
            # It waits for its clients, which are gone by now, and for itself.
            try:
                subprocess.run([program], env=environment, input="quit\n", text=True, capture_output=True, timeout=30)
            except subprocess.TimeoutExpired:
                say("CUDA MPS did not answer; it ends with its last client")
            shutil.rmtree(folder, ignore_errors=True)
