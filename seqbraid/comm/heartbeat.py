"""Ranks tell each other where they are, through the job's store: also while their training threads wait."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from .whereabouts import Whereabouts, line_of

STORE_LIMIT = timedelta(seconds=30)
SILENT_BEATS = 4
SILENT_S = 2.0


@dataclass
class RankStatus:
    """A rank as it was heard of last."""

    host: str
    pid: int
    step: int
    doing: str
    stalled_s: float
    """How long it had been at that when it was heard of."""
    line: str
    """The line of code that its training thread was at."""
    waits: bool
    """Whether it waited there for other ranks."""
    beat: int
    heard: float
    """When a beat of it came that had not come before, by the monotonic clock of this process."""

    def stalled(self, now: float) -> float:
        """For how long it has not moved."""
        return self.stalled_s + max(0.0, now - self.heard)


class Heartbeats:
    """A thread that publishes where this rank is, hears of stops, and listens to the other ranks if asked to.

    Nothing but this thread waits for the store: where that is out of reach, `answered` grows old.
    """

    def __init__(self, store: Store, rank: int, world_size: int, where: Whereabouts, every_s: float) -> None:
        """
        Args:
            store: of the job; a connection of its own is made.
            every_s: seconds between beats.
        """
        self.rank, self.world_size, self.where, self.every_s = rank, world_size, where, every_s
        self.answered = time.monotonic()
        """When the store answered last."""
        self.listening_since: float | None = None
        self.hung = False
        """Whether a rank has said that the run is stuck and ends."""
        self.seen: dict[int, RankStatus] = {}
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(STORE_LIMIT)
        self._beat = 0
        self._told_stop = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def listen(self, on: bool) -> None:
        """Listen to the other ranks, or no longer; every beat then reads a value of each rank."""
        if not on:
            self.listening_since = None
        elif self.listening_since is None:
            self.seen = {}
            self.listening_since = time.monotonic()

    def silent(self, rank: int, now: float) -> float | None:
        """For how long a rank has sent no heartbeat; None where it has, or where that is unknown."""
        if rank == self.rank or self.listening_since is None:
            return None
        seen = self.seen.get(rank)
        heard = self.listening_since if seen is None else seen.heard
        # What was not heard because the store is away says nothing about a rank.
        quiet = min(now, self.answered) - heard
        return now - heard if quiet > max(SILENT_S, SILENT_BEATS * self.every_s) else None

    def claim(self, what: str) -> bool:
        """Whether this rank is the first of all to claim this; also if nobody can be asked."""
        answer: list[int] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answer.append(self._store.add(f"claimed/{what}", 1))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(max(SILENT_S, self.every_s))
        return answer in ([], [1])

    def close(self) -> None:
        """No more beats."""
        self._closed.set()
        self._thread.join(SILENT_S)

    def _run(self) -> None:
        while True:
            with suppress(RuntimeError):  # DistError, of a store that is out of reach
                self._exchange()
                self.answered = time.monotonic()
            if self._closed.wait(self.every_s):
                return

    def _exchange(self) -> None:
        self._beat += 1
        own = {**vars(self.of(self.where)), "beat": self._beat}
        self._store.set(f"place/{self.rank}", json.dumps(own))
        if self.where.stop and not self._told_stop:
            self._store.set("stop", "asked")
            self._told_stop = True
        elif not self.where.stop and self._store.check(["stop"]):
            self.where.stop = True
        self.hung = self.hung or self._store.check(["claimed/hung"])
        if self.listening_since is None:
            return
        keys = {rank: f"place/{rank}" for rank in range(self.world_size)}
        if not self._store.check(list(keys.values())):  # some have not begun yet
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        for rank, found in zip(keys, self._store.multi_get(list(keys.values())), strict=True):
            self._hear(rank, json.loads(found))

    @staticmethod
    def of(where: Whereabouts) -> RankStatus:
        """This rank as others would see it now."""
        place, now = where.place, time.monotonic()
        line, waits = line_of(where.thread)
        host, stalled = socket.gethostname(), now - place.since
        return RankStatus(host, os.getpid(), place.step, place.doing, stalled, line, waits, 0, now)

    def _hear(self, rank: int, found: dict[str, Any]) -> None:
        now, before = time.monotonic(), self.seen.get(rank)
        new = before is None or before.beat != found["beat"]
        self.seen[rank] = RankStatus(**{**found, "heard": now if new or before is None else before.heard})
