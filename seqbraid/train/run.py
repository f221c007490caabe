"""`seqbraid train`: a configuration, and then the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..mesh import launched
from ..printable import printable
from .checkpoint.checkpoints import CheckpointError
from .config_file import parse_config
from .dry_run import dry_run
from .ending import FAILED, PREEMPTED, Ending, preempted_here
from .log_file import LogError
from .nonfinite import NonFiniteError
from .progress import clocked_lines
from .setup import make_mesh
from .summary import summary
from .trainer import Trainer
from .watchdog import watched

STAYS = (
    "seqbraid train: {out} was stopped by a signal and restarted by torchrun: it stays stopped (status "
    f"{PREEMPTED}). Run the command again to resume"
)


def _sentences(trainer: Trainer, ending: Ending, first: int, seconds: float) -> str:
    """How the run ended, what came of it, and what to do with it."""
    said = ending.sentence()
    if ending.reason == "finished" and ending.step == first:
        said += ". It was already finished: nothing was trained; raise train.steps to continue"
    lines = summary(
        ending, trainer.folder, trainer.latest, trainer.best.now, trainer.without_reasoning, seconds
    )
    return "\n".join([f"seqbraid train: {said}", *lines])


def train(arguments: Sequence[str]) -> int:
    """Train as the configuration says; under torchrun on all of its processes."""
    config, only_plan = parse_config(arguments)
    if only_plan:
        dry_run(config)
        return 0
    began = time.monotonic()
    rank, world_size = launched()
    try:
        with watched(config, clocked_lines() if rank == 0 else None) as watchdog:
            if world_size > 1:
                watchdog.where.starts(f"waiting for the other ranks, {world_size} in all")
            mesh = make_mesh(config, watchdog.where)
            watchdog.join(mesh)
            if preempted_here(Path(config.out), mesh):
                if mesh.rank == 0:
                    print(printable(STAYS.format(out=config.out)), file=sys.stderr)
                return PREEMPTED
            trainer = Trainer(config, mesh, watchdog.where)
            first = trainer.step
            ending = trainer.run()
        if rank == 0:
            said = _sentences(trainer, ending, first, time.monotonic() - began)
            print(printable(said), file=sys.stderr)
        return ending.status
    except (CheckpointError, LogError, NonFiniteError) as error:  # of every rank; it needs no traceback
        print(printable(f"seqbraid train: {error}"), file=sys.stderr)
        return FAILED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
