"""Rendezvous after a restart, in spite of what killed ranks left in the store.

Torchrun keeps one store for all of its restarts (torch 2.13, and others before:
pytorch/pytorch#135712). Ranks that are started again may read the addresses of their predecessors
there, and then cannot connect, or wait for killed ranks. `TORCHELASTIC_RESTART_COUNT` does not tell the
attempts apart: on several nodes it differs.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .gpus import share_out

PAUSE_S = 0.02
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, or another launcher, tells each rank."""
MOST = 8
"""Ranks that are named."""
LIMIT = timedelta(minutes=30)
"""How long to wait for the others, as torch does."""


def join_job(
    on_cpu: bool = False, limit: timedelta = LIMIT, tell: Callable[[str], None] | None = None
) -> str:
    """Start the process group of this job, unless there is one.

    Where the ranks cannot have a GPU each, every rank refuses; with `on_cpu` they talk, and compute, on the
    CPU whatever there is, and the reason is given back. `limit` is for the meeting of the ranks. The first
    one can `tell` which others it waits for.
    """
    if dist.is_initialized():
        return ""
    _check_environment()
    store, rank, world_size = next(rendezvous("env://"))
    if dist.is_torchelastic_launched():
        store = PrefixStore(meet(store, rank, world_size, limit, tell), store)
    gpu, reason = share_out(store, rank, world_size, limit)
    if reason and not on_cpu:
        raise ValueError(
            f"{reason}; each rank needs a GPU of its own: start as many ranks as there are GPUs (torchrun "
            "--nproc-per-node), or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
        )
    if gpu is not None and not on_cpu:
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return reason


def join_on_cpu(command: str) -> None:
    """As `join_job`, on the CPU, where the stock model that ours is compared with runs too; the first rank
    says so where there are GPUs.
    """
    reason = join_job(on_cpu=True)
    if not reason and torch.cuda.is_available():
        reason = "the stock model that it is compared with runs there too"
    if reason and dist.get_rank() == 0:
        print(f"seqbraid {command} runs on the CPU: {reason}", flush=True)


def job_store() -> Store | None:
    """The store that the ranks of this job have met in; None for one process."""
    return distributed_c10d._get_default_store() if dist.is_initialized() else None


def set_timeouts(groups: Iterable[dist.ProcessGroup], limit: timedelta) -> None:
    """How long collectives of these groups wait before they fail."""
    for group in groups:
        distributed_c10d._set_pg_timeout(limit, group)


def _check_environment() -> None:
    """Refuse half of what a launcher sets, which torch answers with the name of a variable or a long wait."""
    missing = [name for name in LAUNCHER if name not in os.environ]
    if missing:
        there = ", ".join(f"{name}={os.environ[name]}" for name in LAUNCHER if name in os.environ)
        raise ValueError(
            f"the environment has {there or 'none of the variables of a launcher'}, but not "
            f"{', '.join(missing)}, and a distributed job needs all of them; start with torchrun, which "
            "sets them, or unset them for one process"
        )


def meet(
    store: Store,
    rank: int,
    world_size: int,
    limit: timedelta = LIMIT,
    tell: Callable[[str], None] | None = None,
) -> str:
    """A name that the ranks that live now, and no others, have in common.

    Each rank but the first writes a name of its own; the first answers it with its own, and goes on answering
    until every rank has repeated that. What the dead have written is answered as well, but nobody repeats it.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"rank/{rank}", own)
        store.wait([f"answer/{own}"], limit)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"{name}/{rank}", "here")
        return name
    missing = list(range(1, world_size))
    end = time.monotonic() + limit.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"rank/{other}"]):
                store.set(f"answer/{store.get(f'rank/{other}').decode()}", own)
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
        if missing and tell is not None:
            tell(named(missing))
        if missing and time.monotonic() > end:
            raise TimeoutError(f"{named(missing)} did not join within {limit}")
        time.sleep(PAUSE_S if missing else 0)
    return own


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, of many the first.

    >>> named([3]), named(range(1, 12))
    ('rank 3', 'ranks 1, 2, 3, 4, 5, 6, 7, 8, … (11 ranks)')
    """
    shown = ", ".join(map(str, ranks[:MOST])) + (f", … ({len(ranks)} ranks)" if len(ranks) > MOST else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
