"""Meeting again after a restart, past what the dead have left.

Torchrun keeps one store for all of its restarts (torch 2.13, and others before: pytorch/pytorch#135712).
Ranks that are started again may read the addresses of their predecessors there, and then cannot connect, or
wait for the dead. `TORCHELASTIC_RESTART_COUNT` does not tell the attempts apart: on several nodes it differs.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

PAUSE_S = 0.02
LIMIT = timedelta(minutes=30)
"""How long to wait for the others, as torch does."""


def join_job() -> None:
    """Start the process group of this job, unless there is one."""
    if dist.is_initialized():
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if on_gpu else "gloo"
    if not dist.is_torchelastic_launched():
        dist.init_process_group(backend)
        return
    store, rank, world_size = next(rendezvous("env://"))
    fresh = PrefixStore(meet(store, rank, world_size), store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size)


def meet(store: Store, rank: int, world_size: int, limit: timedelta = LIMIT) -> str:
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
        if missing and time.monotonic() > end:
            raise TimeoutError(f"ranks {missing} have not come in {limit}")
        time.sleep(PAUSE_S if missing else 0)
    return own
