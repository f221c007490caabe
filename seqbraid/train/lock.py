"""A lock on a run's folder: which process of which machine writes there, and whether it still lives."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from .process import machine, started

LOCK_FILE = "run.lock"
BEAT_S = 10.0
"""How often the holder touches its lock."""
WATCH_S = 30.0
"""How long a lock of another machine is watched, before it is taken for one that a killed run has left."""

_log = logging.getLogger(__name__)


class Lock:
    """Held by one process at a time; taken over from one that is gone."""

    def __init__(self, folder: Path) -> None:
        """Take it; a ValueError names the run that has it."""
        self.path = folder / LOCK_FILE
        self.token = uuid.uuid4().hex
        pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        own = {
            "host": socket.gethostname(), "pid": pid, "since": since, "machine": machine(),
            "started": started(pid), "token": self.token,
        }  # fmt: skip
        while not self._created(own):
            self._set_aside(self._abandoned())
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock of the run", daemon=True).start()

    def release(self) -> None:
        """Let others have it."""
        if not self._released.is_set():
            self._released.set()
            if _read(self.path).get("token") == self.token:
                self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """ValueError if it was taken over, as by a run that found this one stopped."""
        holder = _read(self.path)
        if holder.get("token", self.token) != self.token:
            raise ValueError(
                f"{self.path.parent} was taken over by {_words(holder)}, which considered this run dead; "
                "this one stops, so that the two do not overwrite each other's checkpoints"
            )

    def _created(self, own: dict[str, Any]) -> bool:
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(own, indent=1) + "\n")
        return True

    def _abandoned(self) -> str | None:
        """The token of a lock whose holder is gone; ValueError if it lives, here or on another machine."""
        holder, beats, end = _read(self.path), _beats(self.path), time.monotonic() + WATCH_S
        token: str | None = holder.get("token")
        if holder.get("machine") == machine():
            alive = bool(holder["started"]) and started(holder["pid"]) == holder["started"]
            if alive and holder["pid"] != os.getpid():
                raise self._in_use(holder)
            return token
        if beats is not None:
            _log.warning(
                "%s belongs to %s: waiting up to %g s to see whether that run is alive",
                self.path,
                _words(holder),
                WATCH_S,
            )
        while beats is not None and time.monotonic() < end:
            time.sleep(WATCH_S / 30)
            now = _beats(self.path)
            if now is not None and now != beats:
                raise self._in_use(_read(self.path))
            beats = now
        return token

    def _in_use(self, holder: dict[str, Any]) -> ValueError:
        return ValueError(
            f"{self.path.parent} is in use by another run: {_words(holder)}. Stop it, or give another "
            f"out; if that run is gone for certain, delete {self.path}"
        )

    def _set_aside(self, token: str | None) -> None:
        """Remove the lock that was found abandoned, and no other."""
        aside = self.path.with_name(f".{LOCK_FILE}.{self.token}")
        try:
            os.rename(self.path, aside)
            if _read(aside).get("token") != token:  # somebody else was quicker, and has it now
                os.link(aside, self.path)
            elif token is not None:
                _log.warning("%s was left by a run that is gone, and is taken over", self.path)
        except (FileNotFoundError, FileExistsError):
            pass
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                if _read(self.path).get("token") == self.token:
                    os.utime(self.path)
            except OSError as error:
                _log.warning("the lock %s cannot be refreshed: %s", self.path, error)


def _read(path: Path) -> dict[str, Any]:
    """What a lock says; empty where it is not there, or not written yet."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _beats(path: Path) -> tuple[int, int] | None:
    """Changes with every beat; None where there is no lock. Opened, since NFS may keep times for a minute."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _words(holder: dict[str, Any]) -> str:
    known = [holder.get(name, "?") for name in ("pid", "host", "since")]
    return "process {} on {}, since {}".format(*known)
