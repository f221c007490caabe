"""Signals that ask a run to stop: the step is finished and saved first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

POLITE = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)


class Stoppable(Protocol):
    """What is asked to stop."""

    stop: bool
    asked_by: str | None


@contextmanager
def stop_on_signals(run: Stoppable, says: bool) -> Iterator[None]:
    """Within, a signal asks for a stop; after Ctrl-C a second one ends the process at once.

    Args:
        run: told which signal it was.
        says: whether this rank tells the console.
    """

    def ask(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        run.stop, run.asked_by = True, run.asked_by or name
        again = ""
        if number == signal.SIGINT:
            # The kernel's own way, since Python's handlers wait for whatever the main thread is stuck in.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            again = "; send it again to end at once without saving"
        if says:  # not print: the signal may have come in the middle of one
            os.write(2, f"\n{name}: the run stops after this step is finished and saved{again}\n".encode())

    before = {number: signal.signal(number, ask) for number in POLITE}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
