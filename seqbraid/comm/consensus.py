"""Errors that one rank sees are raised by all, before anyone waits for a rank that is gone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

FEWEST = 16
"""Numbers that `agree` sends at least, beside its own."""


def gather_ints(handle: dist.ProcessGroup | None, values: Sequence[int]) -> list[list[int]]:
    """What every rank of a (CPU) process group brings, in rank order."""
    return _gather(handle, torch.tensor(list(values), dtype=torch.int64, device="cpu"))


def gather_floats(handle: dist.ProcessGroup | None, values: Sequence[float]) -> list[list[float]]:
    """What every rank of a (CPU) process group brings, to the last bit, in rank order."""
    return _gather(handle, torch.tensor(list(values), dtype=torch.float64, device="cpu"))


def gather_objects(handle: dist.ProcessGroup | None, value: T) -> list[T]:
    """What every rank of a (CPU) process group brings, in rank order."""
    if handle is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(handle)
    dist.all_gather_object(found, value, group=handle)
    return found


def _gather(handle: dist.ProcessGroup | None, own: torch.Tensor) -> list[Any]:
    if handle is None:
        return [own.tolist()]
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(handle))]
    dist.all_gather(found, own, group=handle)
    return [row.tolist() for row in found]


def agree(
    handle: dist.ProcessGroup | None,
    error: Exception | None,
    values: Sequence[int] = (),
    alike: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Raise on every rank of a (CPU) process group if any of them brings an error; else
    give everyone's values.

    The rank that saw the error raises that very one, the others a `ValueError` that names the rank and quotes
    it. What is in `alike` (plain values, or dicts of them, by the name that the user knows) must be the same
    on every rank: a `ValueError` on every rank says what differs.
    """
    digest = 0 if error is not None or alike is None else _digest(alike)
    # As many numbers whatever is agreed on: ranks in different calls are to hear of it, but gloo ends
    # a process that gets more bytes than it waits for.
    padding = [0] * (FEWEST - len(values))
    found = gather_ints(handle, [error is not None, digest, *values, *padding])
    if any(row[0] for row in found):
        _raise(handle, error, len(found))
    if len({row[1] for row in found}) > 1:  # other settings, or another call altogether
        of_ranks: list[Any] = [None] * len(found)
        dist.all_gather_object(of_ranks, alike, group=handle)
        raise ValueError(difference({rank: of_rank or {} for rank, of_rank in enumerate(of_ranks)}))
    return [row[2 : 2 + len(values)] for row in found]


@contextmanager
def raised_by_all(handle: dist.ProcessGroup | None) -> Iterator[None]:
    """What goes wrong within on one rank is raised by every one; nothing within may wait for another rank."""
    error = None
    try:
        yield
    except Exception as problem:
        error = problem
    agree(handle, error)


def check_alike(handle: dist.ProcessGroup | None, values: Mapping[str, Any]) -> None:
    """Raise on every rank unless all have the same values: else they would wait for each other for ever."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
    if len({row[0] for row in gather_ints(handle, [int.from_bytes(digest[:7], "little")])}) == 1:
        return
    of_ranks = gather_objects(handle, values)
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


def _raise(handle: dist.ProcessGroup | None, error: Exception | None, size: int) -> NoReturn:
    if error is not None and handle is None:
        raise error
    messages: list[str | None] = [None] * size
    dist.all_gather_object(messages, None if error is None else _words(error), group=handle)
    if error is not None:
        raise error
    rank, message = next((r, m) for r, m in enumerate(messages) if m is not None)
    raise ValueError(f"rank {rank} stopped: {message}")


def _words(error: Exception) -> str:
    """A `ValueError` speaks to the user; of any other error the kind is worth knowing too."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _digest(alike: Mapping[str, Any]) -> int:
    digest = hashlib.blake2b(repr(sorted(alike.items())).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def difference(of_ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """The first thing in which ranks differ from the first of them, in words."""
    lowest = min(of_ranks)
    for rank, of_rank in of_ranks.items():
        for name in {**of_ranks[lowest], **of_rank}:
            value, first = of_rank.get(name), of_ranks[lowest].get(name)
            if repr(value) == repr(first):
                continue
            if isinstance(value, Mapping) and isinstance(first, Mapping):
                keys = [key for key in {**first, **value} if repr(value.get(key)) != repr(first.get(key))]
                if keys:
                    name, value, first = f"{name} {keys[0]}", value.get(keys[0]), first.get(keys[0])
            return (
                f"rank {rank} has {name} = {value!r} but rank {lowest} has {first!r}; ranks with different "
                "settings would deadlock or sum different things: give every rank the same value"
            )
    return "ranks have different settings; give every rank the same"
