"""The moments at which something is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .job import RANKS, Job, kill, state, workers

EVERY = 3
"""Steps between the checkpoints of a trial."""
EVAL_EVERY = 4
"""Steps between its evaluations, where it has any."""


@dataclass(frozen=True)
class Pace:
    """How long things last in the uninterrupted run; the moments of kills are drawn from that."""

    steps: int
    start_s: float
    """From the command to the first step in the log."""
    step_s: float
    longest_s: float
    """The longest step, which is one with an evaluation where there are any."""
    save_s: float
    """How long a `.tmp` folder is there."""
    file_bytes: int
    """What a rank writes in a save."""


@dataclass
class Kill:
    """A signal that was sent."""

    what: str
    """To whom, and in the middle of what."""
    hit: bool
    """Whether it came at the moment that was meant."""
    seconds: float | None = None
    """Until torchrun had started the ranks anew."""
    starts: int = 1
    """How often the run went on from a checkpoint since."""
    problem: str = ""
    """What was wrong with how the run took it."""


def kill_at_step(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A rank, some time in the step after a logged one."""
    target = some_step(job, chance, pace)
    job.await_step(target)
    time.sleep(chance.uniform(0, pace.step_s))
    rank = chance.randrange(RANKS)
    killed = kill(job.rank(rank))
    now = job.step()
    return Kill(f"rank {rank} after step {now}", killed and now <= target + 1)


def kill_at_save(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A rank, at a random time of a save, or just when a certain file of it appears."""
    target = -(-some_step(job, chance, pace) // EVERY) * EVERY
    folder = job.run / "checkpoints"
    fresh, final = folder / f"step-{target:08d}.tmp", folder / f"step-{target:08d}"
    moments: list[tuple[Callable[[], bool], int, float]] = [
        (fresh.exists, chance.randrange(RANKS), chance.uniform(0, pace.save_s)),
        (fresh.exists, chance.randrange(RANKS), chance.uniform(0, 0.2 * pace.save_s)),
        # The first rank publishes.
        (chance.choice([fresh / "index.json", fresh / "state.json", fresh / "complete.json"]).exists, 0, 0.0),
        (final.exists, 0, 0.0),
    ]
    came, rank, delay = chance.choice(moments)
    job.await_step(target - 1)  # what a kill before has left of this save is gone by then
    pid = job.rank(rank)
    for _ in job.ticks(0.0005):
        if came():
            break
    time.sleep(delay)
    killed = kill(pid)
    stage = stage_of_save(folder, final.name, pace.file_bytes)
    return Kill(f"rank {rank}, save {target}: {stage}", killed and stage not in ("not begun", "published"))


def stage_of_save(folder: Path, name: str, file_bytes: int) -> str:
    """How far a save has come."""
    with suppress(FileNotFoundError):
        files = {path.name: path.stat().st_size for path in (folder / f"{name}.tmp").iterdir()}
        if "complete.json" in files:
            return "before the rename"
        if "index.json" in files:
            return "publishing"
        whole = [size for size in files.values() if size >= file_bytes]
        return "written" if len(whole) == RANKS else "writing"
    if not (folder / name).exists():
        return "not begun"
    with suppress(FileNotFoundError):
        if (folder / "last").read_text().strip() == name:
            return "published"
    return "before the pointer"


def kill_at_prefetch(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A rank, or its worker, while the worker encodes rows of steps to come."""
    job.await_step(some_step(job, chance, pace))
    rank = chance.randrange(RANKS)
    pid = job.rank(rank)
    worker = workers(pid)[0]
    calm = 0
    for _ in job.ticks(0.001):
        calm = 0 if state(worker) == "R" else calm + 1
        if calm == 0 and chance.random() < 0.2:
            break
        if calm > 3000:  # it has nothing to do any more
            return Kill(f"rank {rank}, but its worker was idle", kill(pid) and False)
    whom = chance.choice((f"rank {rank}", f"worker of rank {rank}"))
    busy = state(worker) == "R"
    killed = kill(pid if whom.startswith("rank") else worker)
    return Kill(f"{whom} while it encoded", killed and busy)


def kill_at_evaluation(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A rank, while it evaluates: one more step is done than the log has."""
    target = -(-some_step(job, chance, pace) // EVAL_EVERY) * EVAL_EVERY
    now = job.await_step(target - 1)
    time.sleep(chance.uniform(0.5 * pace.step_s, 0.75 * pace.longest_s))
    rank = chance.randrange(RANKS)
    killed = kill(job.rank(rank))
    return Kill(f"rank {rank}, evaluation at {target}", killed and job.step() == now == target - 1)


def kill_at_start(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A rank that has just been started: while it imports, loads or resumes."""
    ranks = job.await_ranks([])
    time.sleep(chance.uniform(0, pace.start_s))
    rank = chance.randrange(RANKS)
    killed = kill(ranks[rank])
    now = job.step()
    return Kill(f"rank {rank} after step {now}" if now else f"rank {rank} in its start", killed and now == 0)


def kill_all(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """Torchrun and the ranks, some time in a step; their workers are to end by themselves."""
    job.await_step(some_step(job, chance, pace))
    time.sleep(chance.uniform(0, pace.step_s))
    pids = [job.torchrun.pid, *job.ranks()]
    chance.shuffle(pids)
    killed = [kill(pid) for pid in pids]
    job.wait()
    return Kill(f"all after step {job.step()}", all(killed))


def some_step(job: Job, chance: random.Random, pace: Pace) -> int:
    """A step that is still to come, and not the last."""
    first = min(job.await_step(1) + 1, pace.steps - 1)
    return chance.randint(first, max(first, job.latest))
