"""The best evaluation of a run so far, and how long ago it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .step_config import BestMetric

HIGHER_IS_BETTER = ("eval_accuracy",)


class Best:
    """What the checkpoint `best` is of, and whether a run stops because nothing gets better."""

    def __init__(self, metric: BestMetric = "eval_loss", patience: int | None = None) -> None:
        """
        Args:
            metric: what evaluations are compared by.
            patience: evaluations in a row without a new best that end the run; None: it goes on.
        """
        self.metric, self.patience = metric, patience
        self.now: dict[str, Any] = {}
        """The step and its value; empty before the first."""
        self.before: dict[str, Any] = {}
        self.waited = 0
        """Evaluations since."""

    def add(self, step: int, found: Mapping[str, float]) -> bool:
        """Take an evaluation in; whether it is the best so far."""
        value, best = found[self.metric], self.now.get(self.metric)
        sign = -1 if self.metric in HIGHER_IS_BETTER else 1
        better = sign * value < float("inf") and (best is None or sign * value < sign * best)
        if better:
            self.before, self.now = self.now, {"step": step, self.metric: value}
        self.waited = 0 if better else self.waited + 1
        return better

    def lost(self, step: int) -> None:
        """The checkpoint of a step could not be written: nobody can have it."""
        if self.now.get("step") == step:
            self.now = self.before

    @property
    def stops(self) -> bool:
        """Whether the run ends, since it has waited long enough."""
        return self.patience is not None and self.waited >= self.patience

    def sentence(self) -> str:
        """Why the run stops."""
        best = f"{self.now[self.metric]:.4f} of step {self.now['step']}" if self.now else "none"
        return (
            f"stopped early: {self.waited} evaluations without a better {self.metric} than {best} "
            f"(train.patience={self.patience})"
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.now, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a run had when it was saved; by another metric it begins anew."""
        if not state["best"] or self.metric in state["best"]:
            self.now, self.waited = state["best"], state.get("waited", 0)
