"""A run on two hosts, one of which is cut off from the other in the middle of a step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.helpers.two_hosts import NotAllowed, TwoHosts, two_hosts

from .faults import ended, last_named
from .job import Job, lives
from .kills import Kill, Pace, kill_all

STEP_LIMIT_S = 30
"""How long a step may take, which is how long it takes to see that a host is gone."""
SIGN = "has sent no heartbeat"


def why_no_hosts() -> str:
    """Why there can be no network namespaces here; empty where there can."""
    try:
        with two_hosts():
            return ""
    except NotAllowed as error:
        return str(error)


def cut_a_host(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """All is killed; the run goes on on two hosts, one of which is cut off: both end, and say why."""
    job.latest = pace.steps // 2  # so that there are steps left for the two hosts
    kill_all(job, chance, pace)
    arguments = job.command[job.command.index("seqbraid") - 1 :]
    outputs = [job.run.with_suffix(f".host-{host}.txt") for host in (0, 1)]
    job.since = time.time()
    with two_hosts() as hosts:
        more = [*arguments, f"--timeouts.step={STEP_LIMIT_S}"]
        agents = [hosts.torchrun(host, more, outputs[host], 1, **job.mark) for host in (0, 1)]
        _wait(job, lambda: job.step() > 0 or agents[0].poll() is not None)
        time.sleep(chance.uniform(0, pace.step_s))
        hosts.cut()
        cut_after = job.step()
        _wait(job, lambda: agents[0].poll() is not None and _ranks_are_gone(hosts, agents[1].pid))
        status = agents[0].returncode
    said = outputs[0].read_text()
    reason = ended(job.run)
    what = f"host-1 cut off after step {cut_after}, status {status}, {reason} with {last_named(job.run)}"
    if reason == ("finished", pace.steps):  # before the cut
        return Kill(what, False, starts=2)
    good = status != 0 and reason[0] == "failed" and SIGN in said
    if good:
        for path in outputs:
            path.unlink()
    return Kill(what, good, starts=2, problem="" if good else f"a success, or without a word: {said[-3000:]}")


def _ranks_are_gone(hosts: TwoHosts, agent: int) -> bool:
    """Whether nothing runs on the host that was cut off but its torchrun, which waits for the rendezvous."""
    return not any(lives(pid) for pid in hosts.processes(1) if pid != agent)


def _wait(job: Job, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + job.limit_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"the two hosts have not come so far in {job.limit_s:.0f} s")
        time.sleep(0.02)
