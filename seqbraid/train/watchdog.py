"""The watchdog of a rank: names the rank that holds the run up, and ends a run without progress.

It is a thread of its own, so that it can report while the training thread is stuck in a forward, in a
collective or in the loader. Where it cannot run either, since something holds Python's global lock, the other
ranks get no heartbeat of this one, and a timer of `faulthandler`, which needs no lock, ends the process a
little later.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..comm.flight_recorder import record_flights, write_flights
from ..comm.heartbeat import Heartbeats
from ..comm.rendezvous import job_store
from ..comm.whereabouts import Place, Whereabouts
from ..mesh import Mesh, launched
from ..printable import printable
from .config import TimeoutConfig, TrainConfig
from .ending import FAILED, write_failure
from .signals import POLITE
from .stuck import Rank, describe_ranks

INTERRUPTED = 128 + signal.SIGINT
OBSERVERS = 4
"""Ranks that look at all others as soon as something takes long; the others look when their time is up."""
LISTEN_AFTER, WARN_AFTER = 0.1, 0.2
"""Shares of a limit after which the other ranks are listened to, and a line says what takes so long."""
WRITE_S = 5.0
"""How long stacks may take to be written; the file system may be what hangs."""


class Watchdog:
    """Watches one rank; `join` once the ranks have met, `close` at the end."""

    def __init__(self, where: Whereabouts, limits: TimeoutConfig, folder: Path, signals: int) -> None:
        """
        Args:
            folder: where stacks and collectives are written when the run is ended.
            signals: a file descriptor from which the numbers of signals that came can be read.
        """
        self.where, self.limits, self.folder, self.signals = where, limits, folder, signals
        self.rank, self.world_size = 0, 1
        self.beats: Heartbeats | None = None
        known = [s for s in (limits.start, limits.step, limits.loader, limits.stop) if s is not None]
        self.every_s = min(5.0, max(0.1, min(known, default=100.0) / 20))
        self.asked: float | None = None
        """When this rank was asked to stop, or was told of it."""
        self._warned: Place | None = None
        self._interrupts = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def join(self, mesh: Mesh) -> None:
        """Tell the other ranks where this one is, from now on."""
        self.rank, self.world_size = mesh.rank, mesh.world_size
        store = job_store()
        if store is not None:
            self.beats = Heartbeats(store, self.rank, self.world_size, self.where, self.every_s)

    def close(self) -> None:
        """Watch no longer."""
        self._closed = True
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self.beats is not None:
            self.beats.close()

    def _run(self) -> None:
        while not self._closed:
            if select.select([self.signals], [], [], min(1.0, self.every_s))[0]:
                came = os.read(self.signals, 64)
                self._interrupts += came.count(signal.SIGINT)
                if self._interrupts > 1:  # also where the training thread is stuck
                    os._exit(INTERRUPTED)
                self.where.stop = self.where.stop or any(number in POLITE for number in came)
            self._look()

    def _look(self) -> None:
        place, now = self.where.place, time.monotonic()
        if self.beats is not None and self.beats.hung:
            self._end("")
        limit: float | None = getattr(self.limits, place.limit)
        if limit is not None:  # set anew at each look
            faulthandler.dump_traceback_later(2 * limit + WRITE_S, exit=True, file=2)
        if self.asked is None and self.where.stop:
            self.asked = now
        stop = self.limits.stop
        if self.asked is not None and stop is not None and now - max(self.asked, place.since) > stop:
            self._end(
                f"asked to stop, but there was no progress for {stop:g} s (timeouts.stop={stop:g}): "
                f"{self._who(now)}. The run ends without another checkpoint"
            )
        if limit is not None:
            self._look_at_limit(place, limit, now)

    def _look_at_limit(self, place: Place, limit: float, now: float) -> None:
        own = now - place.since
        observes = self.rank % max(1, self.world_size // OBSERVERS) == 0
        if self.beats is not None:
            self.beats.listen(own > limit * (LISTEN_AFTER if observes else 1))
            since = self.beats.listening_since
            if (
                since is None or now - since < limit * LISTEN_AFTER
            ):  # as long as it takes to tell who is silent
                return
        stalled = self._stalled(own, now)
        name = f"timeouts.{place.limit}={limit:g}"
        if stalled > limit:
            self._end(
                f"no progress for {stalled:.0f} s ({name}): {self._who(now)}. The run ends here; start it "
                "again to resume from the last checkpoint that all ranks have written, published or not"
            )
        elif stalled > limit * WARN_AFTER and self._warned != place and observes:
            self._warned = place
            if self.beats is None or self.beats.claim(f"warning/{place.step}/{place.doing}"):
                _say(f"no progress for {stalled:.0f} s: {self._who(now)}. The run ends at {name}")

    def _stalled(self, own: float, now: float) -> float:
        """For how long no rank has moved."""
        if self.beats is None:
            return own
        heard = [seen for rank, seen in self.beats.seen.items() if self.beats.silent(rank, now) is None]
        return min([own, *(seen.stalled(now) for seen in heard)])

    def _who(self, now: float) -> str:
        """Who holds the run up, in words."""
        if self.beats is None:
            return _who_joins(self.where)
        away = now - self.beats.answered
        if away > max(2.0, 4 * self.beats.every_s):
            return (
                f"the job's store at {_store()} has not answered rank {self.rank} for {away:.0f} s, so its "
                "host or the network to it is down; "
                f"{describe_ranks({self.rank: Rank(Heartbeats.of(self.where), None)})}"
            )
        seen = {**self.beats.seen, self.rank: Heartbeats.of(self.where)}
        return describe_ranks(
            {r: Rank(seen.get(r), self.beats.silent(r, now)) for r in range(self.world_size)}
        )

    def _end(self, why: str) -> None:
        """Say why, write what can be known of it, and end this process whatever its other threads do."""
        if self._closed:
            return
        if why and (self.beats is None or self.beats.claim("hung")):
            _say(f"{why}. Stacks of the ranks that still run are in {self.folder}")
        writing = threading.Thread(target=self._write, args=(why,), daemon=True)
        writing.start()
        writing.join(WRITE_S)
        if why and self.beats is not None:
            time.sleep(2 * self.every_s)  # the others hear of it, and write theirs
        os._exit(FAILED)

    def _write(self, why: str) -> None:
        if why:
            write_failure(self.folder.parent, self.rank, self.where.place.step - 1, TimeoutError(why))
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"stacks-rank-{self.rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            if self.world_size > 1:
                write_flights(self.folder, self.rank)


def _who_joins(where: Whereabouts) -> str:
    """As long as the ranks have not met, each knows of itself, and the first one of whom it waits for."""
    rank, world_size = launched()
    seen = Heartbeats.of(where)
    if world_size == 1 or not seen.waits:
        return describe_ranks({rank: Rank(seen, None)})
    return (
        f"rank {rank} of {world_size} (host {seen.host}) waits for {where.waits_for} to join: not started, "
        f"dead, or without a way to the job's store at {_store()}; it waits in {seen.line}"
    )


def _store() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _say(text: str) -> None:
    """One line, past whatever the training thread has locked."""
    os.write(2, printable(f"seqbraid train: {text}\n").encode())


@contextmanager
def watched(config: TrainConfig, say: Callable[[str], None] | None = None) -> Iterator[Watchdog]:
    """A watchdog over what this thread, the main one, does within."""
    folder = Path(config.out) / "hang"
    record_flights(folder)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watchdog = Watchdog(Whereabouts(say), config.timeouts, folder, reading)
    try:
        yield watchdog
    finally:
        watchdog.close()
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
