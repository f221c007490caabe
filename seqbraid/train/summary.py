"""What the console says of a run as a whole: what it lost on its way, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from .ending import Ending


def lost_reasoning(turns: int) -> str:
    """Said once in a run, with the count so far."""
    return (
        f"the chat template leaves out the reasoning of {turns:,} assistant turns read so far, so the loss "
        "covers these turns without it. Most templates keep it only behind the last question: give a sample "
        "per question, or a template that keeps all of it"
    )


def summary(
    ending: Ending,
    out: Path,
    latest: Mapping[str, float],
    best: Mapping[str, Any],
    turns_without_reasoning: int,
    seconds: float,
) -> list[str]:
    """Lines behind the sentence on how a run ended: its numbers, and where its checkpoint is."""
    parts = [
        f"{name} {latest[name]:{form}}"
        for name, form in (("loss", ".4f"), ("eval_loss", ".4f"), ("eval_accuracy", ".2%"))
        if name in latest
    ]
    if best:
        metric = next(name for name in best if name != "step")
        parts.append(f"best {metric} {best[metric]:.4f} at step {best['step']}")
    parts.append(f"{timedelta(seconds=round(seconds))} in all")
    lines = [", ".join(parts)]
    if turns_without_reasoning:
        lines.append(f"{turns_without_reasoning:,} assistant turns were read without their reasoning")
    if ending.checkpoint:
        lines.append(f"checkpoint: {out / 'checkpoints' / ending.checkpoint}")
    if ending.reason == "finished":
        lines.append(f"for stock transformers: seqbraid export {out} --out DIR")
    return lines
