"""`seqbraid train`: a configuration, and then the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist

from .checkpoint.checkpoints import CheckpointError
from .config import parse_config
from .dry_run import dry_run
from .nonfinite import NonFiniteError
from .setup import make_mesh
from .trainer import Trainer


def train(arguments: Sequence[str]) -> int:
    """Train as the configuration says; under torchrun on all of its processes."""
    config, only_plan = parse_config(arguments)
    if only_plan:
        dry_run(config)
        return 0
    mesh = make_mesh(config)
    try:
        Trainer(config, mesh).run()
    except (CheckpointError, NonFiniteError) as error:  # said by every rank, in words that need no traceback
        print(f"seqbraid train: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
