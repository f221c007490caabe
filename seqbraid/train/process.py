"""Which process on which machine: so that one that is gone is not taken for another."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def machine() -> str:
    """This machine since it was started, and the space in which its process ids count."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts += [boot.read_text().strip(), os.readlink(space)]
    return " ".join(parts)


def started(pid: int) -> str:
    """When a process of this machine was started, as its kernel counts; empty where it is gone or dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        try:  # not Linux: whether it is there has to do
            os.kill(pid, 0)
        except OSError as error:
            return "" if isinstance(error, ProcessLookupError) else "unknown"
        return "unknown"
    return "" if stat[0] in "ZX" else stat[19]


def launcher() -> str:
    """The torchrun agent that has started this process; empty where none has."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    pid = os.getppid()
    return f"{machine()} {pid} {started(pid)}"
