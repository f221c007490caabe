"""A loss of tokens and samples, written twice: over the stock model's logits, and over a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout.labels import IGNORE, targets_of
from ..models.local_tokens import LocalTokens, TokenLoss

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Objective:
    """What a step is to minimise beside cross entropy, and how plain code says it of one sample."""

    of_logits: Callable[[Tensor, dict[str, Any]], Tensor]
    """The sum over a sample, of its logits `[T, V]`."""
    of_tokens: TokenLoss


def with_fields(samples: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Samples with random advantages for their labels and a reward."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            **sample,
            "fields": {
                "advantages": torch.randn(len(sample["input_ids"]), generator=generator),
                "reward": float(torch.randn((), generator=generator)),
            },
        }
        for sample in samples
    ]


def _of_logits(logits_TV: Tensor, sample: dict[str, Any]) -> Tensor:
    labels = torch.as_tensor(sample.get("labels", sample["input_ids"]))
    targets, fields = targets_of(labels), sample["fields"]
    every = (logits_TV / TEMPERATURE).log_softmax(-1)[targets != IGNORE]
    logprobs = every.gather(1, targets[targets != IGNORE][:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    # Of the labels themselves, as a user writes them: entry t of a field is that of label t.
    advantages = fields["advantages"][1:][labels[1:] != IGNORE].to(logprobs)
    if not len(logprobs):
        return logprobs.sum()
    sequence = fields["reward"] * logprobs.mean().square()
    return (advantages * logprobs + 0.1 * fields["reward"] * entropy).sum() + sequence


def _of_tokens(tokens: LocalTokens) -> Tensor:
    logprobs, entropy = tokens.logprobs_and_entropy(TEMPERATURE)
    advantages = tokens.fields["advantages"] * tokens.labelled
    # In float64, where the case is decided in it.
    by_token = advantages * logprobs + 0.1 * tokens.fields["reward"].to(entropy) * entropy
    count = tokens.sample_sums(tokens.labelled.to(logprobs)).clamp(min=1)
    means = tokens.sample_sums(logprobs) / count
    return by_token.sum() + (tokens.scalars["reward"] * means.square()).sum()


POLICY = Objective(_of_logits, _of_tokens)
"""Log-probabilities with an advantage each, entropies, and a term of each sample: what losses are made of."""
