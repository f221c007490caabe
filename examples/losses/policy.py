"""PPO's and GRPO's clipped objectives on given rollouts, and rewards of whole sequences.

A rollout is a sample whose labels are the tokens that the policy drew, with fields: `old_logprobs [T]` as the
engine that drew them says, and advantages, `[T]` or one number for the sample. Entry t belongs to label t.
"""

from __future__ import annotations

import torch
from torch import Tensor

import seqbraid as sb

CLIP, KL, ENTROPY, TEMPERATURE = 0.2, 0.04, 0.01, 0.8

Found = tuple[Tensor, dict[str, Tensor]]


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The gain of a ratio of probabilities, no more than at the edge of the trust region."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def ppo(tokens: sb.LocalTokens) -> Found:
    """Clipped objective with a bonus for entropy; mean per token with `divisor="tokens"`."""
    logprobs, entropy = tokens.logprobs_and_entropy(TEMPERATURE)
    ratio = (logprobs - tokens.fields["old_logprobs"]).exp()
    gain = clipped(ratio, tokens.fields["advantages"]) + ENTROPY * entropy
    outside = ((ratio - 1).abs() > CLIP) & tokens.labelled
    return -(gain * tokens.labelled).sum(), {"clipped": outside.sum(), "entropy": entropy.sum()}


def grpo(tokens: sb.LocalTokens) -> Found:
    """Mean over the tokens of each sample, and with `divisor="samples"` over samples; with a penalty for the
    distance from a reference. Without the lengths and with `divisor="tokens"` it is DAPO's.
    """
    logprobs, fields = tokens.logprobs(TEMPERATURE), tokens.fields
    ratio = (logprobs - fields["old_logprobs"]).exp()
    away = fields["reference"] - logprobs
    gain = clipped(ratio, fields["advantage"]) - KL * (away.exp() - away - 1)
    lengths = tokens.sums_at_tokens(tokens.labelled.to(gain)).clamp(min=1)
    return -(gain * tokens.labelled / lengths).sum(), {"gain": (gain * tokens.labelled).sum()}


def reinforce(tokens: sb.LocalTokens) -> Tensor:
    """The reward of a sequence times its log-probability."""
    return -(tokens.scalars["advantage"] * tokens.sample_sums(tokens.logprobs(TEMPERATURE))).sum()


def gspo(tokens: sb.LocalTokens) -> Tensor:
    """The clipped objective of whole sequences: the ratio is the geometric mean over a sample's tokens."""
    moved = (tokens.logprobs(TEMPERATURE) - tokens.fields["old_logprobs"]) * tokens.labelled
    lengths = tokens.sample_sums(tokens.labelled.to(moved)).clamp(min=1)
    ratio = (tokens.sample_sums(moved) / lengths).exp()
    return -clipped(ratio, tokens.scalars["advantage"]).sum()
