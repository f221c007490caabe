"""The learning rate as a function of how far the run has come."""

from __future__ import annotations

import math

from .step_config import StepConfig


def learning_rate(config: StepConfig, before: float, after: float) -> float:
    """The rate of the step that takes the run's progress (0 to 1) from `before` to `after`.

    Nothing is remembered between steps, so a resumed run, on whatever mesh, has the same rates.

    >>> config = StepConfig(steps=4, lr=1.0, warmup=2, schedule="linear")
    >>> [learning_rate(config, step / 4, (step + 1) / 4) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    warmup = config.warmup
    if warmup >= 1:
        assert config.steps is not None, "the config refuses a warm-up in steps for a run in epochs"
        warmup = min(warmup / config.steps, 1.0)
    if after < warmup:
        return config.lr * after / warmup
    if config.schedule == "constant" or warmup == 1:
        return config.lr
    done = min(max((before - warmup) / (1 - warmup), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)
