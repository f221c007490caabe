"""`seqbraid train`: a configuration, and then the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..mesh import launched
from ..printable import printable
from .checkpoint.checkpoints import CheckpointError
from .config import parse_config
from .dry_run import dry_run
from .ending import FAILED, PREEMPTED, Ending, preempted_here
from .nonfinite import NonFiniteError
from .progress import clocked_lines
from .setup import make_mesh
from .trainer import Trainer
from .watchdog import watched

STAYS = (
    "seqbraid train: {out} was stopped by a signal and restarted by torchrun: it stays stopped (status "
    f"{PREEMPTED}). Run the command again to resume"
)


def _more(out: str, ending: Ending, first: int) -> str:
    """What to do with a run that is finished."""
    if ending.reason != "finished":
        return ""
    known = f"\nfor stock transformers: seqbraid export {out} --out DIR"
    if ending.step == first:
        return f". It was already finished: nothing was trained; raise train.steps to continue{known}"
    return known


def train(arguments: Sequence[str]) -> int:
    """Train as the configuration says; under torchrun on all of its processes."""
    config, only_plan = parse_config(arguments)
    if only_plan:
        dry_run(config)
        return 0
    rank, world_size = launched()
    try:
        with watched(config, clocked_lines() if rank == 0 else None) as watchdog:
            watchdog.where.starts(f"waiting for the other ranks, {world_size} in all")
            mesh = make_mesh(config)
            watchdog.join(mesh)
            if preempted_here(Path(config.out), mesh):
                if mesh.rank == 0:
                    print(printable(STAYS.format(out=config.out)), file=sys.stderr)
                return PREEMPTED
            trainer = Trainer(config, mesh, watchdog.where)
            first = trainer.step
            ending = trainer.run()
        if rank == 0:
            said = f"seqbraid train: {ending.sentence()}{_more(config.out, ending, first)}"
            print(printable(said), file=sys.stderr)
        return ending.status
    except (CheckpointError, NonFiniteError) as error:  # said by every rank, in words that need no traceback
        print(printable(f"seqbraid train: {error}"), file=sys.stderr)
        return FAILED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
