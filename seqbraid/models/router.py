"""The load-balancing loss of mixture-of-experts routers, from sums that can be reduced over ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(router_logits: tuple[Tensor, ...], real_T: Tensor, top_k: int) -> Tensor:
    """What the stock model computes on the same tokens: experts × Σ (share of picks · mean probability).

    `router_logits` has one `[T, E]` tensor per layer; tokens where `real_T` is False (padding) do not count.
    """
    num_experts = router_logits[0].shape[-1]
    picks_E = router_logits[0].new_zeros(num_experts, dtype=torch.float32)
    probability_E = torch.zeros_like(picks_E)
    for logits_TE in router_logits:
        probabilities_TE = logits_TE[real_T].softmax(-1)
        chosen = probabilities_TE.topk(top_k, dim=-1).indices.flatten()
        picks_E = picks_E + torch.bincount(chosen, minlength=num_experts)
        probability_E = probability_E + probabilities_TE.float().sum(0)
    rows = real_T.sum() * len(router_logits)
    return num_experts * (picks_E / rows * (probability_E / rows)).sum()
