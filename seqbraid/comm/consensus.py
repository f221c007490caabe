"""Errors that one rank sees are raised by all, before anyone waits for a rank that is gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def gather_ints(handle: dist.ProcessGroup | None, values: Sequence[int]) -> list[list[int]]:
    """What every rank of a (CPU) process group brings, in rank order."""
    own = torch.tensor(list(values), dtype=torch.int64)
    if handle is None:
        return [own.tolist()]
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(handle))]
    dist.all_gather(found, own, group=handle)
    return [row.tolist() for row in found]


def agree(
    handle: dist.ProcessGroup | None, error: Exception | None, values: Sequence[int] = ()
) -> list[list[int]]:
    """Raise on every rank of a (CPU) process group if any of them brings an error; else give everyone's
    values.

    The rank that saw the error raises that very one, the others a `ValueError` that names the rank and quotes
    it.
    """
    found = gather_ints(handle, [error is not None, *values])
    if not any(row[0] for row in found):
        return [row[1:] for row in found]
    if error is not None and handle is None:
        raise error
    messages: list[str | None] = [None] * len(found)
    dist.all_gather_object(messages, None if error is None else str(error), group=handle)
    if error is not None:
        raise error
    rank, message = next((r, m) for r, m in enumerate(messages) if m is not None)
    raise ValueError(f"rank {rank} stopped: {message}")
