"""A run under torchrun, and the processes that it is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from seqbraid.train.log import read_log

MARKER = "SEQBRAID_CHAOS"
"""In the environment of everything that a run starts, so that what outlives it is found."""
RANKS = 2


class Ended(Exception):
    """The run was over before the moment came."""


class Job:
    """A torchrun and everything below it."""

    def __init__(self, command: list[str], run: Path, limit_s: float) -> None:
        self.command, self.run, self.limit_s = command, run, limit_s
        self.marker = uuid.uuid4().hex
        self.since = 0.0
        """When the ranks of now were started, or a little before."""
        self.latest = 0
        """The last step after which to kill something, so that there are steps left for the next kill."""
        self.output = run.with_suffix(".txt")
        self.start()

    @property
    def mark(self) -> dict[str, str]:
        """What all processes of this trial have in their environment."""
        return {MARKER: self.marker}

    def start(self) -> None:
        """Give the command."""
        self.since, self.end = time.time(), time.monotonic() + self.limit_s
        with self.output.open("ab") as output:
            environment = {**os.environ, **self.mark}
            self.torchrun = subprocess.Popen(self.command, stdout=output, stderr=output, env=environment)

    def wait(self) -> int:
        """Its exit status."""
        return self.torchrun.wait(max(1.0, self.end - time.monotonic()))

    def ticks(self, pause_s: float) -> Iterator[None]:
        """Yield now and then, as long as the run lasts and has time left."""
        while self.torchrun.poll() is None:
            if time.monotonic() > self.end:
                raise TimeoutError(f"the run has not ended in {self.limit_s:.0f} s")
            yield
            time.sleep(pause_s)
        raise Ended

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        found = {}
        for pid in children(self.torchrun.pid):
            for entry in environment_of(pid):
                if entry.startswith("LOCAL_RANK=") and lives(pid):
                    found[int(entry.split("=")[1])] = pid
        return [found[rank] for rank in sorted(found)]

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        ranks = self.ranks()
        if len(ranks) < RANKS:
            raise Ended
        return ranks[number]

    def step(self) -> int:
        """The last step that the ranks of now have logged; 0 where they have not yet."""
        with suppress(FileNotFoundError):
            steps = [
                r["step"] for r in read_log(self.run / "log.jsonl") if "loss" in r and r["time"] > self.since
            ]
            return max(steps, default=0)
        return 0

    def await_ranks(self, other_than: list[int]) -> list[int]:
        """Until torchrun has started all ranks, others than these."""
        for _ in self.ticks(0.01):
            now = self.ranks()
            if len(now) == RANKS and not set(now) & set(other_than):
                return now
        raise AssertionError("unreachable")

    def await_step(self, step: int) -> int:
        """Until a step, or a later one, is in the log; gives that one."""
        for _ in self.ticks(0.002):
            if (now := self.step()) >= step:
                return now
        raise AssertionError("unreachable")

    def survivors(self) -> list[int]:
        """The processes of this trial that there are."""
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in pids if f"{MARKER}={self.marker}" in environment_of(pid) and lives(pid)]

    def clear(self) -> None:
        """End whatever of this trial is left."""
        for pid in self.survivors():
            kill(pid)
        self.torchrun.wait()


def kill(pid: int) -> bool:
    """SIGKILL; whether the process was there."""
    alive = lives(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return alive


def workers(rank: int) -> list[int]:
    """The data workers of a rank: children of the server that forks them."""
    servers = [pid for pid in children(rank) if any("forkserver" in part for part in command_of(pid))]
    return [worker for server in servers for worker in children(server) if lives(worker)]


def children(pid: int) -> list[int]:
    """The processes whose parent this is."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [child for child in pids if _stat(child)[1:2] == [str(pid)]]


def state(pid: int) -> str:
    """R for running, S for asleep, Z for dead, …; empty where there is none."""
    return "".join(_stat(pid)[:1])


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is not dead."""
    return state(pid) not in ("", "Z", "X")


def environment_of(pid: int) -> list[str]:
    """The environment that a process was started with."""
    return _strings(pid, "environ")


def command_of(pid: int) -> list[str]:
    """The command line of a process."""
    return _strings(pid, "cmdline")


def _strings(pid: int, name: str) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    return []


def _stat(pid: int) -> list[str]:
    """State, parent, …; what stands before them may have spaces and brackets in it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
