"""The part of a run's configuration that says what a step is: batch size, learning rate, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .optimizers.groups import parse_groups
from .profile_steps import parse_steps

ADAMW = "torch.optim.AdamW"

BestMetric = Literal["eval_loss", "eval_accuracy"]


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
    optimizer: str = ADAMW
    """Class path of the optimizer: torch's own, such as torch.optim.SGD or torch.optim.Muon, or another."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor, such as {momentum: 0.9}."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Learning rates and weight decays of their own for parameters by name: {match: REGEX, lr: 1e-4,
    weight_decay: 0}. The first that matches counts."""
    beta1: float = 0.9
    """Decay of the first moment, of AdamW and other optimizers with betas."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the second moment; above 0."""
    clip_norm: float | None = 1.0
    """Gradient clipping: maximum norm of the whole gradient; null for no clipping."""
    skip_spikes: float | None = None
    """Skip the update of a step whose gradient norm is more than this many times the median of the last 64;
    null skips none. Skipped steps are counted and logged."""
    eval_every: int | None = None
    """Steps between evaluations; by default only at the end."""
    best_metric: BestMetric = "eval_loss"
    """What the best checkpoint is the best by: the lowest eval_loss, or the highest eval_accuracy."""
    patience: int | None = None
    """Early stopping: end the run after this many evaluations in a row without a new best."""
    profile: int | str | None = None
    """Steps to write a torch.profiler trace of, one (`12`) or several (`12-14`), into `profile/`."""

    def check(self) -> None:
        """Refuse invalid settings."""
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"train.steps={self.steps} and train.epochs={self.epochs}: give exactly one of them"
            )
        for name in ("steps", "epochs", "batch_tokens", "eval_every", "patience"):
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
        if self.skip_spikes is not None and not 1 < self.skip_spikes < float("inf"):
            raise ValueError(
                f"train.skip_spikes={self.skip_spikes} must be above 1: it is how many times the usual "
                "gradient norm a spike is; 10 is usual, null skips none"
            )
        parse_groups(self.groups)
        if self.profile is not None:
            parse_steps(self.profile)
