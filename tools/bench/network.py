"""Two hosts in one machine: network namespaces, joined by a pair of interfaces with a limited rate."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.launch import signals_ignored

# Fixed names, so that what a killed run left behind is found and removed by the next.
NAMESPACES = ("fsdp_bench_0", "fsdp_bench_1")
INTERFACES = ("fsdpb0", "fsdpb1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")

# Bytes that may pass at once before the limit holds: 1 to 4 ms at 1 to 4 Gbit/s, and more than the largest packet that
# the kernel hands over in one piece (64 KB), which a smaller bucket would drop.
_BURST_BYTES = 512 * 1024


class NetworkError(Exception):
    """The two hosts could not be made."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(
            f"Expected `{' '.join(command)}` to work, found: {done.stderr.strip() or done.stdout.strip()}. Network "
            "namespaces need Linux, root (CAP_NET_ADMIN and CAP_SYS_ADMIN), the kernel's veth and sch_tbf, and "
            "sch_netem for --delay-ms; many containers forbid them. Run the tool on a machine that allows them."
        )
    return done.stdout


def remove_hosts() -> None:
    """Remove the namespaces of this or an earlier run, and with them their interfaces."""
    existing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    for name in NAMESPACES:
        if name in existing:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    for interface in INTERFACES:  # one that was never moved into its namespace
        subprocess.run(["ip", "link", "del", interface], capture_output=True)


def check_tools() -> None:
    """Raises `NetworkError` when this machine or user cannot do it."""
    if not sys.platform.startswith("linux"):
        raise NetworkError(f"Expected Linux, found {sys.platform}: network namespaces exist nowhere else.")
    missing = [name for name in ("ip", "tc", "taskset") if shutil.which(name) is None]
    if missing:
        raise NetworkError(
            f"Expected the programs ip, tc and taskset, found no {', '.join(missing)}. Install iproute2 and util-linux."
        )
    if os.geteuid() != 0:
        raise NetworkError("Expected to run as root, which makes network namespaces; start the tool with sudo.")


@contextmanager
def two_hosts(*, mbit_per_s: float, delay_ms: float) -> Iterator[None]:
    """The namespaces, with `mbit_per_s` in each direction and `delay_ms` one way. Removed whatever happens."""
    check_tools()
    remove_hosts()
    try:
        for name in NAMESPACES:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", INTERFACES[0], "type", "veth", "peer", "name", INTERFACES[1])
        for name, interface, address in zip(NAMESPACES, INTERFACES, ADDRESSES, strict=True):
            _run("ip", "link", "set", interface, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", interface)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", interface, "up")
            limit = ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", str(_BURST_BYTES), "latency", "100ms")
            _run(*inside, "tc", "qdisc", "add", "dev", interface, "root", "handle", "1:", *limit)
            if delay_ms > 0:
                # Room for what is on its way: rate times delay, in packets of 1500 bytes, twice.
                packets = max(1000, int(2 * mbit_per_s * 1e6 * delay_ms * 1e-3 / 8 / 1500))
                later = ("netem", "delay", f"{delay_ms:g}ms", "limit", str(packets))
                _run(*inside, "tc", "qdisc", "add", "dev", interface, "parent", "1:1", "handle", "10:", *later)
        yield
    finally:
        with signals_ignored():
            remove_hosts()


def inside(host: int, *command: str, core: int | None = None) -> list[str]:
    """`command` in the namespace of a host, on one core."""
    pinned = ["taskset", "-c", str(core)] if core is not None else []
    return ["ip", "netns", "exec", NAMESPACES[host], *pinned, *command]


_RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
"""
_SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
chunk, sent, begin = bytes(1 << 20), 0, time.monotonic()
while time.monotonic() - begin < 1.0:
    connection.sendall(chunk)
    sent += len(chunk)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(sent * 8e-6 / (time.monotonic() - begin))
"""


def measure_mbit_per_s(sender: int) -> float:
    """What one TCP connection from `sender` to the other host reaches in about a second."""
    receiver = 1 - sender
    address, port = ADDRESSES[receiver], "29600"
    receive = subprocess.Popen(
        inside(receiver, sys.executable, "-c", _RECEIVE, address, port), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receive.stdout is not None
        receive.stdout.readline()
        return float(_run(*inside(sender, sys.executable, "-c", _SEND, address, port)))
    finally:
        receive.kill()
        receive.wait()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
