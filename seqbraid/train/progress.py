"""What the console shows of a run: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ..printable import printable


def clocked_lines() -> Callable[[str], None]:
    """Prints what a run does until its first step, with the seconds since now."""
    console, began = Console(stderr=True), time.monotonic()

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:6.1f} s  {text}"
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    return say


class StepProgress:
    """Step, loss, rate, speed, and when the run will end by its steps so far.

    Steps count from 1: that of a number is done when as many are.
    """

    def __init__(self, first: int, total: int | None, every: int, console: Console | None = None) -> None:
        """
        Args:
            first: the first step that this process does.
            total: steps of the whole run, where it is known.
            every: steps between lines where there is no terminal.
            console: where to; standard error when left out.
        """
        self.first, self.total, self.every = first, total, every
        self.console = Console(stderr=True) if console is None else console
        self.began = time.monotonic()
        self.bar: Progress | None = None
        if self.console.is_terminal:
            text = TextColumn("{task.description}")
            self.bar = Progress(text, BarColumn(), TaskProgressColumn(), console=self.console, transient=True)
            self.task = self.bar.add_task("starting", total=total, completed=first - 1)
            self.bar.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell of a step that is done."""
        line = self._line(step, metrics)
        if self.bar is not None:
            self.bar.update(self.task, description=line, completed=step)
        elif "loss" not in metrics or step % self.every == 0 or step in (self.first, self.total):
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}" + (f"/{self.total}" if self.total else "")]
        forms = {"loss": ".4f", "mtp_loss": ".4f", "lr": ".2e", "eval_loss": ".4f", "eval_accuracy": ".2%"}
        parts += [f"{name} {metrics[name]:{form}}" for name, form in forms.items() if name in metrics]
        if "tokens_per_s" in metrics:
            parts.append(f"{metrics['tokens_per_s']:,.0f} tok/s")
        if "mfu" in metrics:
            parts.append(f"mfu {metrics['mfu']:.1%}")
        done = step + 1 - self.first
        if self.total and done > 0:
            left = (time.monotonic() - self.began) / done * max(self.total - step, 0)
            parts.append(f"ETA {timedelta(seconds=round(left))}")
        return "  ".join(parts)
