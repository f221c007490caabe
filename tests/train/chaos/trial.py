"""Runs that are disturbed, and the undisturbed ones that they are compared with."""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from seqbraid.train.checkpoint.files import step_of
from seqbraid.train.log import read_log

from .checks import differences, export_differences
from .data import make_data, make_model
from .job import RANKS, Ended, Job
from .kills import EVAL_EVERY, EVERY, Kill, Pace
from .kinds import BY_HAND, GOES_ON, KINDS

STEPS = 12
VARIANTS = {
    "ring": ["--mesh.ring=2"],
    "dp_shard": ["--mesh.dp_shard=2"],
    "pp": ["--mesh.pp=2"],
    "eval": ["--mesh.ring=2", "--data.eval=DATA/eval.jsonl", f"--train.eval_every={EVAL_EVERY}"],
}
LOADER_LIMIT_S = 20
"""How long a worker may be at one sample, which takes it some milliseconds."""
GRACE_S = 30.0
"""How long processes may take to see that their parent is gone."""


@dataclass
class Outcome:
    """What came of a trial."""

    name: str
    variant: str
    kills: list[Kill] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    """The steps that it went on from; 0 where there was no checkpoint yet."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The first part of its name."""
        return self.name.rsplit("-", 1)[0]

    @property
    def hit(self) -> bool:
        """Whether anything was killed at its moment; only then does the trial count as one."""
        return any(kill.hit for kill in self.kills)


class Chaos:
    """Model, data and undisturbed runs in a folder, and trials beside them."""

    def __init__(self, folder: Path, limit_s: float = 900.0) -> None:
        self.folder, self.limit_s = folder, limit_s
        self.paces: dict[str, Pace] = {}
        self.exported = False
        make_data(folder / "data")
        make_model(folder / "model")

    def reference(self, variant: str) -> Path:
        """The undisturbed run; it saves at every step, so that whatever a trial saves can be compared."""
        run = self.folder / f"reference-{variant}"
        if variant not in self.paces:
            job = Job(self.command(run, variant, every=1), run, self.limit_s)
            seen: dict[Path, tuple[float, float]] = {}
            try:
                for _ in job.ticks(0.001):
                    for path in (run / "checkpoints").glob("step-*.tmp"):
                        now = time.monotonic()
                        seen[path] = (seen.get(path, (now, now))[0], now)
            except Ended:
                if job.wait() != 0:
                    raise RuntimeError(f"the undisturbed run failed; see {job.output}") from None
            finally:
                job.clear()
            self.paces[variant] = measured(run, job.since, [last - first for first, last in seen.values()])
        return run

    def trial(self, name: str, kinds: Sequence[str], chance: random.Random, variant: str = "ring") -> Outcome:
        """One run with kills of these kinds; its folder is deleted if all is well."""
        reference, start = self.reference(variant), time.monotonic()
        run = self.folder / name
        outcome = Outcome(name, variant)
        job = Job(self.command(run, variant, EVERY), run, self.limit_s)
        try:
            disturb(job, kinds, chance, self.paces[variant], outcome)
            status = job.wait()
            outcome.problems += [f"torchrun ended with status {status}"] if status else []
            outcome.problems += orphans(job)
            outcome.problems += differences(run, reference)
            if not self.exported:  # once: equal checkpoints give equal exports
                self.exported = True
                outcome.problems += export_differences(run, reference)
            resumed = [r["step"] for r in read_log(run / "log.jsonl") if r.get("event") == "resumed"]
            if len(resumed) > len(outcome.resumed):
                outcome.problems.append(f"resumed from {resumed}: something else has failed as well")
        except (OSError, subprocess.TimeoutExpired) as error:  # TimeoutError is an OSError
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            job.clear()
        outcome.seconds = time.monotonic() - start
        if not outcome.problems:
            shutil.rmtree(run)
            job.output.unlink()
        return outcome

    def command(self, run: Path, variant: str, every: int) -> list[str]:
        """What a user would type."""
        data = self.folder / "data"
        python, torchrun = [sys.executable, "-m"], ["torch.distributed.run", "--standalone"]
        options = [
            f"--model={self.folder / 'model'}", f"--out={run}", "--precision=float32",
            f"--data.train={data / 'train.jsonl'}", f"--data.media_root={data}", "--data.row_tokens=256",
            "--data.buffer_size=16", "--data.workers=1", "--data.on_bad_sample=skip",
            f"--timeouts.loader={LOADER_LIMIT_S}",
            f"--train.steps={STEPS}", "--train.batch_tokens=512", "--train.lr=1e-3",
            f"--checkpoint.every={every}", "--checkpoint.keep=99",
        ]  # fmt: skip
        options += [option.replace("DATA", str(data)) for option in VARIANTS[variant]]
        ranks = [f"--nproc-per-node={RANKS}", "--max-restarts=3"]
        return [*python, *torchrun, *ranks, "-m", "seqbraid", "train", *options]


def disturb(job: Job, kinds: Sequence[str], chance: random.Random, pace: Pace, outcome: Outcome) -> None:
    """Kill, and see that it is started again, until all is done or the run is over."""
    try:
        for number, kind in enumerate(kinds, start=1):
            job.latest = (STEPS - 1) * number // len(kinds)
            ranks = job.await_ranks([])
            kill = KINDS[kind](job, chance, pace)
            job.since, moment = time.time(), time.monotonic()
            outcome.kills.append(kill)
            outcome.problems += [kill.problem] if kill.problem else []
            if kind in GOES_ON:
                continue
            if kind in BY_HAND:
                outcome.problems += orphans(job)
                job.start()
            else:
                job.await_ranks(ranks)
                kill.seconds = time.monotonic() - moment
                if "worker" in kill.what and "ended by SIGKILL" not in job.output.read_text():
                    outcome.problems.append("no rank has said that its worker was killed")
            outcome.resumed += [saved(job.run)] * kill.starts
    except Ended:
        pass


def measured(run: Path, since: float, saves: Sequence[float]) -> Pace:
    """How long things took in a run."""
    times = [record["time"] for record in read_log(run / "log.jsonl") if "loss" in record]
    assert len(times) == STEPS and len(saves) >= STEPS / 2
    sizes = [path.stat().st_size for path in run.rglob("checkpoints/*/rank-*.safetensors")]
    steps = [after - before for before, after in pairwise(times)]
    median = statistics.median
    return Pace(STEPS, times[0] - since, median(steps), max(steps), median(saves), min(sizes))


def saved(run: Path) -> int:
    """The step that a run would go on from; 0 where it would begin."""
    last = run / "checkpoints" / "last"
    return step_of(Path(last.read_text().strip())) if last.exists() else 0


def orphans(job: Job) -> list[str]:
    """Processes that are still there some time after torchrun has ended."""
    end = time.monotonic() + GRACE_S
    while (found := job.survivors()) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"processes {found} outlived torchrun"] if found else []
