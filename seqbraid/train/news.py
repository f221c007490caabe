"""What a run says while it goes on: lines on the console, with events and metrics in its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from ..comm.consensus import raised_by_all
from .checkpoint.checkpoints import Failed, Published
from .log import Sinks
from .summary import lost_reasoning


class News:
    """All ranks call it alike; the first one writes, and what fails there is raised on all of them."""

    def __init__(self, sinks: Sinks, group: dist.ProcessGroup | None) -> None:
        self.sinks = sinks
        self.group = group

    def start(self, step: int, found: Iterable[tuple[str, str]]) -> None:
        """What was found before the first step: the kind of each event, and what it says."""
        with raised_by_all(self.group):
            for kind, what in found:
                self.sinks.event(kind, step=step, what=what)
                self.sinks.say(what)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step."""
        with raised_by_all(self.group):
            self.sinks.log(step, metrics)

    def reasoning_left_out(self, turns: int) -> None:
        """The chat template leaves out the reasoning of turns that have labels."""
        self._tell("reasoning left out", lost_reasoning(turns), turns=turns)

    def stopped_early(self, step: int, reason: str) -> None:
        """No evaluation was better for as long as the run was to wait."""
        self._tell("stopped early", reason, step=step, reason=reason)

    def skipped(self, step: int, reason: str) -> None:
        """A step has changed no weight."""
        self._tell("skipped", f"step {step} is skipped: {reason}", step=step, reason=reason)

    def checkpoints(self, events: Iterable[Published | Failed], published: str | None) -> None:
        """Checkpoints that were written, or could not be; `published` names the last one before them."""
        with raised_by_all(self.group):
            for event in events:
                if isinstance(event, Published):
                    published = event.path.name
                    self.sinks.event("checkpoint", step=event.step, seconds=event.seconds)
                    continue
                self.sinks.event("checkpoint failed", step=event.step, reason=event.reason)
                kept = f"the last one is {published}" if published else "there is none"
                self.sinks.say(
                    f"the checkpoint of step {event.step} COULD NOT BE WRITTEN ({event.reason}); {kept}. The "
                    "run continues, since checkpoint.on_error=continue"
                )

    def _tell(self, kind: str, text: str, **fields: Any) -> None:
        with raised_by_all(self.group):
            self.sinks.event(kind, **fields)
            self.sinks.say(text)
