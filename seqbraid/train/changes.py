"""What of its configuration a resumed run has otherwise than before: what that does, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from ..data.records.contents import describe_changes
from .config import as_dict, keys
from .mtp_config import MtpConfig
from .step_config import ADAMW
from .weights import split_revision

SILENT = ("model", "out", "resume", "checkpoint.", "log.", "timeouts.", "train.profile")
SILENT += ("data.train", "data.workers", "data.prefetch_steps", "data.cache")
"""What changes no step of a run; what is in the data is compared by the loader."""

NO_GRADIENT = ("mesh.", "memory.", "gated_delta", "kernels.", "data.policy")
SCHEDULE = ("train.lr", "train.schedule", "train.warmup", "train.final_lr")
LENGTH = ("train.steps", "train.epochs")


LONGEST = 120
"""Characters of a value that are shown; a chat template has more."""

UNCHANGED = ("model", "precision", "lora", "freeze", "mtp", "train.optimizer")
"""What a resumed run must have as it was; the loader looks after the data, all else may change."""


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse a configuration under which the run of a checkpoint cannot go on."""
    model = now["model"]
    if split_revision(before["model"])[1] is None:  # of a version that wrote no revision down
        model = split_revision(model)[0]
    for name in UNCHANGED:
        was, has = _value(before, name), model if name == "model" else _value(now, name)
        if was != has:
            raise ValueError(
                f"{checkpoint} was trained with {name}={was!r}, not {has!r}; use the old value, or give "
                "another out"
            )


def _value(config: Mapping[str, Any], name: str) -> Any:
    """Of a configuration; earlier versions had AdamW alone, and no multi-token prediction."""
    if name == "train.optimizer":
        return config["train"].get("optimizer", ADAMW)
    return config.get(name, as_dict(MtpConfig())) if name == "mtp" else config[name]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """A line for each setting that is another than in the run so far, which has done `step` steps.

    >>> changes({"train": {"lr": 0.1}}, {"train": {"lr": 0.2}}, 5)
    ['train.lr is 0.2, was 0.1: the learning rate from step 6 on is what it would be if the whole run had \
this setting']
    """
    found = []
    for name in keys():
        if name.startswith(SILENT):
            continue
        try:
            was, has = (
                reduce(lambda values, part: values[part], name.split("."), of) for of in (before, now)
            )
        except KeyError:  # of another version
            continue
        if was != has:
            found.append(f"{name} is {_shown(has)}, was {_shown(was)}: {_effect(name, step + 1)}")
    return found


def others(state: Mapping[str, Any], versions: Mapping[str, str], eval_files: Mapping[str, str]) -> list[str]:
    """A line for what a run has otherwise than its checkpoint says, besides its settings.

    >>> others({"versions": {"torch": "2.10"}}, {"torch": "2.11"}, {})
    ['torch is 2.11, was 2.10: what is computed may differ by more than rounding']
    """
    was = state.get("versions", {})
    found = [
        f"{name} is {has}, was {was[name]}: what is computed may differ by more than rounding"
        for name, has in versions.items()
        if was.get(name, has) != has
    ]
    if what := describe_changes(state.get("eval_files", {}), eval_files):
        found.append(
            f"data.eval: {what}: evaluations before and after are of different data, and `best` compares them"
        )
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _effect(name: str, first: int) -> str:
    if name.startswith(NO_GRADIENT):
        return "the gradients stay the same up to rounding, but no longer bit for bit"
    if name in SCHEDULE:
        return f"the learning rate from step {first} on is what it would be if the whole run had this setting"
    if name in LENGTH:
        return f"the learning rate schedule is stretched, so the learning rate may jump at step {first}"
    if name.startswith("data."):
        return f"for the samples that are read from step {first} on"
    if name.startswith("train."):
        return f"from step {first} on; the optimizer state is kept"
    return f"from step {first} on"
