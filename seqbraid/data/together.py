"""What the ranks of a job tell each other about their data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ..comm.consensus import agree, gather_ints

T = TypeVar("T")


def gather_objects(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """What every rank of a (CPU) process group brings, in rank order."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


@contextmanager
def raised_by_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What goes wrong within on one rank is raised by every one; nothing within may wait for another rank."""
    error = None
    try:
        yield
    except Exception as problem:
        error = problem
    agree(group, error)


def check_alike(group: dist.ProcessGroup | None, values: Mapping[str, Any]) -> None:
    """Raise on every rank unless all have the same values: else they would wait for each other for ever."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
    if len({row[0] for row in gather_ints(group, [int.from_bytes(digest[:7], "little")])}) == 1:
        return
    of_ranks = gather_objects(group, values)
    rank, name = next(
        (rank, name)
        for rank, of_rank in enumerate(of_ranks)
        for name in values
        if of_rank[name] != of_ranks[0][name]
    )
    raise ValueError(
        f"rank {rank} has {name}={of_ranks[rank][name]!r} but rank 0 has {of_ranks[0][name]!r}; all ranks "
        "need the same data and settings"
    )
