"""Two hosts on one Linux machine: namespaces with a name, an address and a cable between them; loopback where none can be made.

    with two_hosts() as (a, b):
        agent = a.start([sys.executable, ...], environment, stdout=file)  # as on a machine of its own
        kill(agent)  # with all that it has started

Each host knows the names ``node-a`` and ``node-b``, and reaches nothing else: no other machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

NAMES = ("node-a", "node-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Host:
    """address: under which the other host reaches this one; interface: which gloo and NCCL take; enter: what a command begins with"""

    name: str
    address: str
    interface: str
    enter: tuple[str, ...]

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        set_here = {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        return subprocess.Popen([*self.enter, *command], env={**environment, **set_here}, text=True, **options)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command prints that must succeed."""
        env = os.environ if environment is None else environment
        done = subprocess.run([*self.enter, *command], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout


@cache
def namespaces_work() -> bool:
    """Whether this machine lets us make network namespaces and a cable between them."""
    if not sys.platform.startswith("linux"):
        return False
    cable = "ip link add eth0 type veth peer name eth1 && hostname node-a"
    try:
        tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", cable], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    if not namespaces_work():
        yield Host("localhost", "127.0.0.1", "lo", ()), Host("localhost", "127.0.0.1", "lo", ())
        return
    with ExitStack() as stack:
        known = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".hosts"))
        known.write("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in zip(NAMES, ADDRESSES, strict=True)))
        known.flush()
        hosts, pids = [], []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            setup = f"hostname {name} && mount --bind {known.name} /etc/hosts && ip link set lo up && echo ready && exec cat"
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(holder)  # its exit closes `cat`'s input, and with the last process the namespaces go
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            pids.append(str(holder.pid))
            enter = ("nsenter", "--target", str(holder.pid), "--net", "--uts", "--mount", f"--wd={Path.cwd()}")
            hosts.append(Host(name, address, "eth0", enter))
        first, second = hosts
        first.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", pids[1])
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        yield first, second


def kill(process: subprocess.Popen[Any]) -> None:
    """SIGKILL to a process and all that it has started: torchrun's ranks have sessions of their own, and outlive it otherwise."""
    doomed = [process.pid]
    for pid in doomed:  # it grows
        doomed += [child for child, parent in _parents() if parent == pid]
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _parents() -> Iterator[tuple[int, int]]:
    """Each process of this machine and its parent."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = status.read_text().rpartition(")")[2].split()  # a name before it may hold anything
            yield int(status.parent.name), int(fields[1])


__all__ = ["Host", "kill", "namespaces_work", "two_hosts"]
