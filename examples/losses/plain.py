"""The same losses in plain code: stock models in one process, full logits, one sample after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import distillation, dpo, policy

Sample = dict[str, Any]


def at_labels(model: Any, sample: Sample, temperature: float = 1.0) -> Tensor:
    """`[L, V]`: log-probabilities of all tokens where a label is asked for; never for the first token."""
    logits = model(input_ids=sample["input_ids"][None], use_cache=False).logits[0, :-1]
    return (logits / temperature).log_softmax(-1)[sample["labels"][1:] != -100]


def of_labels(model: Any, sample: Sample, temperature: float = 1.0) -> Tensor:
    """`[L]`: the labels' own log-probabilities."""
    labels = sample["labels"][1:]
    every = at_labels(model, sample, temperature)
    return every.gather(1, labels[labels != -100][:, None])[:, 0]


def field(sample: Sample, name: str) -> Tensor:
    """`[L]`: what a sample says of its labels."""
    values: Tensor = sample["fields"][name][1:]
    return values[sample["labels"][1:] != -100]


def weighted_sft(model: Any, samples: Sequence[Sample], _: Any) -> Tensor:
    """−Σ weight · logprob / Σ weight."""
    total = sum((field(s, "weights") * of_labels(model, s)).sum() for s in samples)
    return -total / sum(field(s, "weights").sum() for s in samples)  # type: ignore[return-value]


def dpo_pairs(model: Any, samples: Sequence[Sample], reference: Any) -> Tensor:
    """Over neighbours."""
    with torch.no_grad():
        before = [of_labels(reference, s).sum() for s in samples]
    gains = torch.stack([of_labels(model, s).sum() - b for s, b in zip(samples, before, strict=True)])
    return -F.logsigmoid(dpo.BETA * (gains[0::2] - gains[1::2])).mean()


def ppo(model: Any, samples: Sequence[Sample], _: Any) -> Tensor:
    """Mean per token."""
    found = []
    for s in samples:
        every, logprobs = at_labels(model, s, policy.TEMPERATURE), of_labels(model, s, policy.TEMPERATURE)
        ratio = (logprobs - field(s, "old_logprobs")).exp()
        entropy = -(every.exp() * every).sum(-1)
        found.append(policy.clipped(ratio, field(s, "advantages")) + policy.ENTROPY * entropy)
    return -torch.cat(found).mean()


def grpo(model: Any, samples: Sequence[Sample], _: Any) -> Tensor:
    """Mean per token of a sample, then over samples."""
    found = []
    for s in samples:
        logprobs = of_labels(model, s, policy.TEMPERATURE)
        ratio = (logprobs - field(s, "old_logprobs")).exp()
        away = field(s, "reference") - logprobs
        gain = policy.clipped(ratio, torch.tensor(s["fields"]["advantage"]))
        found.append((gain - policy.KL * (away.exp() - away - 1)).mean())
    return -torch.stack(found).mean()


def reinforce(model: Any, samples: Sequence[Sample], _: Any) -> Tensor:
    """Mean over samples."""
    gains = [s["fields"]["advantage"] * of_labels(model, s, policy.TEMPERATURE).sum() for s in samples]
    return -torch.stack(gains).mean()


def gspo(model: Any, samples: Sequence[Sample], _: Any) -> Tensor:
    """Mean over samples."""
    found = []
    for s in samples:
        moved = of_labels(model, s, policy.TEMPERATURE) - field(s, "old_logprobs")
        found.append(policy.clipped(moved.mean().exp(), torch.tensor(s["fields"]["advantage"])))
    return -torch.stack(found).mean()


def distil(model: Any, samples: Sequence[Sample], teacher: Any) -> Tensor:
    """Mean per token."""
    found, t = [], distillation.TEMPERATURE
    for s in samples:
        with torch.no_grad():
            wanted = at_labels(teacher, s, t)
        divergence = F.kl_div(at_labels(model, s, t), wanted, log_target=True, reduction="none")
        found.append(t**2 * divergence.sum(-1))
    return torch.cat(found).mean()
