"""Which rank holds a run up, from what the ranks report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..comm.heartbeat import RankStatus
from ..comm.rendezvous import named


@dataclass(frozen=True)
class Rank:
    """A rank of a run without progress."""

    seen: RankStatus | None
    """None where it has never sent a heartbeat."""
    silent_s: float | None
    """For how long it has sent no heartbeat; None where it has sent one recently."""


def laggards(ranks: Mapping[int, Rank]) -> list[int]:
    """The ranks that the others wait for; none where all wait for each other.

    A rank without a heartbeat is stopped, dead or cut off. Otherwise it is one that computes while others
    wait in a collective, or one that is in an earlier step.
    """
    silent = [rank for rank, found in ranks.items() if found.seen is None or found.silent_s is not None]
    if silent:
        return silent
    seen = {rank: found.seen for rank, found in ranks.items() if found.seen is not None}
    busy = [rank for rank, found in seen.items() if not found.waits]
    if busy and (len(busy) < len(seen) or len(seen) == 1):
        return busy
    first = min(found.step for found in seen.values())
    behind = [rank for rank, found in seen.items() if found.step == first]
    return behind if len(behind) < len(seen) else []


def describe_ranks(ranks: Mapping[int, Rank]) -> str:
    """A sentence for each rank that lags, and one for those that wait for it."""
    late = laggards(ranks)
    lines = [_one(rank, ranks[rank]) for rank in late]
    rest: dict[str, list[int]] = {}
    for rank, found in ranks.items():
        if rank not in late and found.seen is not None:
            where = f"step {found.seen.step}, {found.seen.doing}: {found.seen.line}"
            rest.setdefault(where, []).append(rank)
    for where, group in rest.items():
        lines.append(f"{named(group)} {'wait' if len(group) > 1 else 'waits'} in {where}")
    if not late and not any(found.seen is not None and found.seen.waits for found in ranks.values()):
        lines.append("none of them waits for another: each is at something of its own, such as its data")
    elif not late:
        lines.append(
            "no rank is behind: their collectives do not match, or data sent by one does not reach "
            "another (check the network between the hosts)"
        )
    return "; ".join(lines)


def _one(rank: int, found: Rank) -> str:
    seen = found.seen
    if seen is None:
        return f"rank {rank} has never sent a heartbeat"
    who = f"rank {rank} (host {seen.host}, process {seen.pid})"
    was = f"step {seen.step}, {seen.doing}"
    if found.silent_s is not None:
        return (
            f"{who} has sent no heartbeat for {found.silent_s:.0f} s, so it is stopped, dead or cut off; "
            f"it was in {was}"
        )
    return f"{who} is holding up the run: {was}, at {seen.line}"
