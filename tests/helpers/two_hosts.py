"""Two hosts on one machine: network namespaces with names of their own, joined by a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = "10.77.0.1", "10.77.0.2"
INTERFACE = "eth0"
PORT = 29400
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SET_NAME = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


class NotAllowed(Exception):
    """This machine, or this user of it, cannot have network namespaces."""


class TwoHosts:
    """`host-0` and `host-1` share files and processors, but reach each other over the cable alone."""

    def __init__(self) -> None:
        self._ip = _find("ip")
        self._unshare = _find("unshare")
        mark = uuid.uuid4().hex[:8]
        self._spaces = [f"seqbraid-{mark}-{host}" for host in (0, 1)]
        try:
            for space in self._spaces:
                self._do("netns", "add", space)
            ends = [("name", INTERFACE, "netns", space) for space in self._spaces]
            self._do("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for space, address in zip(self._spaces, ADDRESSES, strict=True):
                self._do("-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
                self._do("-n", space, "link", "set", "lo", "up")
                self._do("-n", space, "link", "set", INTERFACE, "up")
            subprocess.run(self._within(0, "true"), check=True, capture_output=True, text=True)
        except (subprocess.CalledProcessError, OSError) as error:
            self.close()
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise NotAllowed(f"network namespaces cannot be made here: {said}") from None

    def torchrun(
        self, host: int, arguments: Sequence[str], output: Path, ranks: int, **environment: str
    ) -> subprocess.Popen[bytes]:
        """The torchrun of a host; `host-0` holds the rendezvous, and comes first in the order of ranks."""
        options = [
            "--nnodes=2", f"--nproc-per-node={ranks}", "--max-restarts=0", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", "--rdzv-id=run",
            # Else torchrun would go by the machine's name, which says nothing about a namespace.
            f"--rdzv-conf=is_host={1 - host}", f"--local-addr={ADDRESSES[host]}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
        clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        with output.open("ab") as file:
            return subprocess.Popen(
                self._within(host, *command),
                stdout=file,
                stderr=file,
                env={**clean, "GLOO_SOCKET_IFNAME": INTERFACE, **environment},
            )

    def cut(self) -> None:
        """The cable is pulled out of `host-1`: nobody closes a connection, and nothing arrives any more."""
        self._do("-n", self._spaces[1], "link", "set", INTERFACE, "down")

    def processes(self, host: int) -> list[int]:
        """Everything that runs on a host."""
        return [int(pid) for pid in self._do("netns", "pids", self._spaces[host]).split()]

    def close(self) -> None:
        """End all processes of both hosts, and the hosts."""
        for host, space in enumerate(self._spaces):
            with suppress(subprocess.CalledProcessError):
                for pid in self.processes(host):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.CalledProcessError):
                self._do("netns", "delete", space)

    def _within(self, host: int, *command: str) -> list[str]:
        """A command as it is given on a host, whose name is its own."""
        program = shutil.which(command[0]) or command[0]
        named = [sys.executable, "-c", SET_NAME, f"host-{host}", program, *command[1:]]
        return [self._ip, "netns", "exec", self._spaces[host], self._unshare, "--uts", *named]

    def _do(self, *arguments: str) -> str:
        return subprocess.run([self._ip, *arguments], check=True, capture_output=True, text=True).stdout


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Raises `NotAllowed` where there can be none; leaves neither processes nor namespaces behind."""
    hosts = TwoHosts()
    try:
        yield hosts
    finally:
        hosts.close()


def _find(program: str) -> str:
    if os.geteuid() != 0:
        raise NotAllowed("network namespaces are made by root, and this is another user")
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise NotAllowed(f"network namespaces are made by `{program}`, which is not installed")
    return found
