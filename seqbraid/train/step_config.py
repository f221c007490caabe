"""The part of a run's configuration that says what a step is: batch size, learning rate, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StepConfig:
    """The optimizer, its learning rate and the global batch size."""

    steps: int | None = None
    """Optimizer steps; give this or `epochs`."""
    epochs: int | None = None
    """Passes over the training data; give this or `steps`."""
    batch_tokens: int = 0
    """Global batch size: tokens of an optimizer step over the whole job, on any mesh; a multiple of
    `data.row_tokens`. Gradient accumulation follows from it."""
    lr: float = 1e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate decays after the warm-up."""
    warmup: float = 0.03
    """Warm-up from 0: a fraction of the run if below 1, else a number of steps."""
    final_lr: float = 0.0
    """Final learning rate, as a fraction of `lr`."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.999
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the second moment; above 0."""
    clip_norm: float | None = 1.0
    """Gradient clipping: maximum norm of the whole gradient; null for no clipping."""
    eval_every: int | None = None
    """Steps between evaluations; by default only at the end."""

    def check(self) -> None:
        """Refuse invalid settings."""
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"train.steps={self.steps} and train.epochs={self.epochs}: give exactly one of them"
            )
        for name in ("steps", "epochs", "batch_tokens", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name}={value} must be at least 1")
        for name, share in (("final_lr", self.final_lr), ("weight_decay", self.weight_decay)):
            if not 0 <= share <= 1:
                raise ValueError(f"train.{name}={share} must be between 0 and 1")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"train.beta1={self.beta1}, beta2={self.beta2} must be at least 0 and below 1")
        for name, number in (("lr", self.lr), ("warmup", self.warmup)):
            if not 0 <= number < float("inf"):
                raise ValueError(f"train.{name}={number} must be a finite number of at least 0")
        if not 1.2e-38 <= self.eps < float("inf"):  # 0 over 0 where a gradient is 0; float32 ends there
            raise ValueError(
                f"train.eps={self.eps} must be a finite number of at least 1.2e-38; 1e-8 is usual"
            )
        if self.warmup >= 1 and self.epochs is not None:
            raise ValueError(
                f"train.warmup={self.warmup} is a number of steps, but with train.epochs={self.epochs} "
                "the number of steps is unknown; give a fraction below 1"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"train.clip_norm={self.clip_norm} must be above 0, or null for no clipping")
