"""Which GPU a rank uses, agreed on before any other communication: none is shared, or none is used."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store


class Claim(NamedTuple):
    """What a rank sees, and what it takes of it."""

    host: str
    gpu: str
    """Its GPU's unique name; empty where it sees none."""
    num_seen: int


def own_gpu() -> int | None:
    """The index of this process's GPU among those that it sees; None where it sees none."""
    if not torch.cuda.is_available():
        return None
    # Some launchers show each rank one GPU of its own: to every rank, that is number 0.
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def own_claim() -> Claim:
    """What this process would take."""
    gpu = own_gpu()
    name = "" if gpu is None else str(torch.cuda.get_device_properties(gpu).uuid)
    return Claim(socket.gethostname(), name, 0 if gpu is None else torch.cuda.device_count())


def share_out(store: Store, rank: int, world_size: int, limit: timedelta) -> tuple[int | None, str]:
    """This rank's GPU, and why the ranks cannot have one each; the same reason on every rank, or none."""
    names = [f"gpu/{other}" for other in range(world_size)]
    store.set(names[rank], json.dumps(own_claim()))
    store.wait(names, limit)
    claims = [Claim(*json.loads(store.get(name))) for name in names]
    store.set(f"known/{rank}", "")
    if rank == 0:  # which may hold the store: others must have read before it refuses and is gone
        store.wait([f"known/{other}" for other in range(world_size)], limit)
    return own_gpu(), problem(claims)


def problem(claims: Sequence[Claim]) -> str:
    """Why these ranks cannot have a GPU each; empty where they can, and where nobody sees any."""
    blind = [rank for rank, claim in enumerate(claims) if not claim.gpu]
    if len(blind) == len(claims):
        return ""
    if blind:
        seeing = next(rank for rank, claim in enumerate(claims) if claim.gpu)
        return f"rank {blind[0]} on {claims[blind[0]].host} sees no GPU, but rank {seeing} does"
    ranks_of: dict[str, list[int]] = {}
    for rank, claim in enumerate(claims):
        ranks_of.setdefault(claim.gpu, []).append(rank)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), [])
    if not shared:
        return ""
    host, num_seen = claims[shared[0]].host, claims[shared[0]].num_seen
    num_ranks = sum(claim.host == host for claim in claims)
    hint = "; is LOCAL_RANK set?" if num_seen >= num_ranks else ""
    gpus = "1 GPU" if num_seen == 1 else f"{num_seen} GPUs"
    return f"{host} has {gpus} for {num_ranks} ranks: ranks {shared[0]} and {shared[1]} would share one{hint}"
