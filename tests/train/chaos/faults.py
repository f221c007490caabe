"""What is not a kill: signals that ask, two runs in a folder, files that are gone, a disk that is full."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

from .job import RANKS, Ended, Job, workers
from .kills import Kill, Pace, kill_all, some_step

UNSAVED, PREEMPTED = "unsaved", "preempted"


def interrupt(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """SIGINT to torchrun, as Ctrl-C does."""
    return _ask(job, chance, pace, signal.SIGINT)


def hang_up(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """SIGHUP to torchrun, as a terminal that is closed does."""
    return _ask(job, chance, pace, signal.SIGHUP)


def stop_all(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """SIGTERM to torchrun, which hands it on to every process, as a scheduler that takes the machine back."""
    return _ask(job, chance, pace, signal.SIGTERM)


def ask_one_rank(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """SIGUSR1 to a rank, as a scheduler warns; torchrun then starts all ranks again, and they end at once."""
    return _ask(job, chance, pace, signal.SIGUSR1, chance.randrange(RANKS))


def _ask(
    job: Job, chance: random.Random, pace: Pace, number: signal.Signals, rank: int | None = None
) -> Kill:
    job.await_step(some_step(job, chance, pace))
    time.sleep(chance.uniform(0, pace.step_s))
    os.kill(job.torchrun.pid if rank is None else job.rank(rank), number)
    status = job.wait()
    last = (job.run / "checkpoints" / "last").read_text().strip()
    stopped, reason = job.step(), ended(job.run)
    # The promise is more than for a kill: what is done is saved.
    asked = reason == (PREEMPTED, stopped) and status != 0
    over = reason == ("finished", stopped) and stopped == pace.steps  # it came too late to stop anything
    saved = last == f"step-{stopped:08d}" and (asked or over)
    what = f"{number.name}, status {status}, {reason}, stopped after step {stopped} with {last}"
    return Kill(what, asked, problem="" if saved else "it was not saved where it was stopped")


def stop_a_worker(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A data worker stops for ever: the run says which one, and ends; torchrun starts it again."""
    job.await_step(some_step(job, chance, pace))
    ranks = job.ranks()
    rank = chance.randrange(len(ranks))
    pid = workers(ranks[rank])[0]
    os.kill(pid, signal.SIGSTOP)
    named = f"(process {pid}) has been"
    try:
        for _ in job.ticks(0.05):
            if not set(ranks) & set(job.ranks()):
                break
        over = job.step() >= pace.steps
    except Ended:
        over = True
    said = job.output.read_text()
    if over and named not in said:  # all that it had to do was done
        return Kill(f"data process of rank {rank}, which nobody needed any more", False, starts=0)
    good = named in said and "the process is stopped (SIGSTOP)" in said
    what = f"data process of rank {rank} stopped after step {job.step()}"
    return Kill(what, True, problem="" if good else f"nobody has said that process {pid} was stopped")


def lose_a_file(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """All is killed, and a file is missing from every checkpoint: a start says so, and does nothing."""
    kill_all(job, chance, pace)
    name = f"rank-{chance.randrange(RANKS):05d}.safetensors"
    files = [path / name for path in (job.run / "checkpoints").glob("step-????????")]
    for path in files:
        path.rename(path.with_suffix(".lost"))
    log = (job.run / "log.jsonl").read_bytes()
    status, said = attempt(job)
    for path in files:
        path.with_suffix(".lost").rename(path)
    kept = (job.run / "log.jsonl").read_bytes() == log
    good = not files or (status != 0 and kept and f"{name} is missing" in said)
    what = f"{name} of {len(files)} checkpoints, status {status}"
    starts = 1 if files else 2  # the attempt itself goes on from what was not yet published
    return Kill(
        what,
        bool(files),
        starts=starts,
        problem="" if good else f"it began anew, or did not say why not: {said}",
    )


def start_twice(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """A second run in the same folder, which is refused; the first one, stopped meanwhile, goes on."""
    job.await_step(some_step(job, chance, pace))
    ranks = job.ranks()
    for pid in ranks:  # it would be done before the other has started
        os.kill(pid, signal.SIGSTOP)
    try:
        status, said = attempt(job)
        still = job.ranks() == ranks and len(ranks) == RANKS
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    good = not still or (status != 0 and "is in use by another run" in said)
    problem = "" if good else f"the second run was not refused: {said}"
    return Kill(f"a second run, status {status}", still, starts=0, problem=problem)


def fill_the_disk(job: Job, chance: random.Random, pace: Pace) -> Kill:
    """All is killed; the run goes on to its end without a checkpoint that could be written."""
    kill_all(job, chance, pace)
    before = last_named(job.run)
    limit = pace.file_bytes // 2
    status, said = attempt(job, "--checkpoint.on_error=continue", file_bytes=limit)
    reason = ended(job.run)
    named = said.count("COULD NOT BE WRITTEN")
    last = last_named(job.run)  # a save that was whole when all was killed is published first
    kept = last == before or f"{last} was complete when the last run ended" in said
    good = status != 0 and reason == (UNSAVED, pace.steps) and named > 0 and kept
    what = f"full to the end, status {status}, {reason}, {named} times said"
    return Kill(what, good, starts=2, problem="" if good else f"a success, or without a word: {said}")


def attempt(job: Job, *options: str, file_bytes: int | None = None) -> tuple[int, str]:
    """Give the command once more, without restarts; its status, and what it said."""
    command = ["--max-restarts=0" if part.startswith("--max-restarts") else part for part in job.command]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    done = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        env={**os.environ, **job.mark},
        timeout=job.limit_s,
        preexec_fn=None if file_bytes is None else limit,
    )
    return done.returncode, done.stderr + done.stdout


def ended(run: Path) -> tuple[str, int]:
    """Why a run ended, and after which step, as its folder says."""
    found = json.loads((run / "ended.json").read_text())
    return found["reason"], found["step"]


def last_named(run: Path) -> str:
    last = run / "checkpoints" / "last"
    return last.read_text().strip() if last.exists() else ""
