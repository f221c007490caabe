"""The load-balancing loss of mixture-of-experts routers, from sums that can be reduced over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.group import Group


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], real_T: Tensor, top_k: int, group: Group
) -> tuple[Tensor, Tensor]:
    """What the stock model computes on the tokens of all ranks: experts × Σ (share of picks · mean
    probability).

    `router_logits` has one `[T, E]` tensor per layer; tokens where `real_T` is False (padding) do not count.
    Returns this rank's share, to be differentiated, and the whole, detached. Picks have no gradient, so the
    loss is linear in the probabilities, and the shares' gradients add up to that of the whole.
    """
    num_experts = router_logits[0].shape[-1]
    picks_E = router_logits[0].new_zeros(num_experts, dtype=torch.float32)
    probability_E = torch.zeros_like(picks_E)
    for logits_TE in router_logits:
        probabilities_TE = logits_TE[real_T].softmax(-1)
        chosen = probabilities_TE.topk(top_k, dim=-1).indices.flatten()
        picks_E = picks_E + torch.bincount(chosen, minlength=num_experts)
        probability_E = probability_E + probabilities_TE.float().sum(0)
    own_rows = (real_T.sum() * len(router_logits)).to(picks_E.dtype)
    sums = group.all_reduce(torch.cat([picks_E, probability_E.detach(), own_rows[None]]))
    picks_E, all_probability_E, rows = sums[:num_experts], sums[num_experts:-1], sums[-1]
    weight_E = num_experts * picks_E / rows**2
    return (weight_E * probability_E).sum(), (weight_E * all_probability_E).sum()
