"""A process ends when gloo's threads are at rest, not before.

A thread of gloo first wakes up whoever waits for a collective, and only then lets go of the collective's
tensors; for those that Python knows it needs the GIL. Where the interpreter has begun to end by then, Python
(before 3.14) ends the thread by force, in the middle of a destructor, which C++ answers with `terminate`: the
process aborts after all of its work is done. Destroying the process groups is not enough: a group's threads
live as long as anything refers to it, such as a mesh or a sharded model (pytorch/pytorch#190489).
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

THREADS = Path("/proc/self/task")
NAME = "pt_gloo_runloop"
"""What torch calls the threads that run gloo's collectives."""
WINDOW_S = 0.02
"""Longer than Python lets a thread wait for the GIL without waking it up (5 ms)."""
LIMIT_S = 10.0
"""A thread may be in a collective that will never be done, because another rank is gone."""


def wait_for_gloo(limit_s: float = LIMIT_S) -> None:
    """Until every thread of gloo sleeps and nothing has woken it up for a while.

    Meanwhile the GIL is free, so that a thread that needs it for what it lets go gets it.
    """
    end = time.monotonic() + limit_s
    before: dict[str, tuple[str, str]] = {}
    while (now := _gloo_threads()) and time.monotonic() < end:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now
        time.sleep(WINDOW_S)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """By thread: its state, and how often it went to sleep; none where the system does not tell."""
    found = {}
    for status in THREADS.glob("*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:  # the thread has just ended
            continue
        if fields["Name"] == NAME:
            found[status.parent.name] = (fields["State"][0], fields.get("voluntary_ctxt_switches", ""))
    return found


# Registered before anything of the user's, so that it runs after that: exit handlers run in reverse.
atexit.register(wait_for_gloo)
