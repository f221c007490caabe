"""The load-balancing loss of mixture-of-experts routers: per row, from sums over the ranks that share it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..comm.group import Group

STOCK = "load_balancing_loss_func"
"""What modeling files call the function that adds it up in the stock model."""


def load_balancing_loss(
    router_logits: tuple[Tensor, ...],
    real_T: Tensor,
    top_k: int,
    group: Group,
    before_2E: Tensor | None = None,
) -> Tensor:
    """This rank's share of what the stock model computes on the tokens of a whole row: experts × Σ (share of
    picks · mean probability).

    `router_logits` has one `[T, E]` tensor per layer; tokens where `real_T` is False (padding) do not count.
    `group` has the ranks that share the row. Picks have no gradient, so the loss is linear in the
    probabilities: the shares add up to the whole, and so do their gradients. Layers of earlier pipeline
    stages come as their sums, `before_2E`.
    """
    picks_E, probability_E = router_sums(router_logits, real_T, top_k, before_2E)
    picks_E = group.all_reduce(picks_E.detach())
    rows = picks_E.sum() / top_k  # of all layers and ranks
    # No row at all is no loss: samples may be too short for a depth of multi-token prediction.
    return (len(picks_E) * picks_E / rows.clamp(min=1) ** 2 * probability_E).sum()


def router_sums(
    router_logits: tuple[Tensor, ...], real_T: Tensor, top_k: int, before_2E: Tensor | None = None
) -> Tensor:
    """`[2, E]`: how often this rank's tokens picked each expert, and the sum of its probabilities, over these
    layers and those `before`.
    """
    if before_2E is None:
        wide = torch.promote_types(router_logits[0].dtype, torch.float32)
        before_2E = router_logits[0].new_zeros(2, router_logits[0].shape[-1], dtype=wide)
    picks_E, probability_E = before_2E
    for logits_TE in router_logits:
        probabilities_TE = logits_TE[real_T].softmax(-1)
        chosen = probabilities_TE.topk(top_k, dim=-1).indices.flatten()
        picks_E = picks_E + torch.bincount(chosen, minlength=len(picks_E))
        probability_E = probability_E + probabilities_TE.to(probability_E.dtype).sum(0)
    return torch.stack([picks_E, probability_E])


def check_router_loss(model: PreTrainedModel, config: Any) -> None:
    """Refuse a model whose own load-balancing loss is not the one that we compute."""
    name = type(model).__name__
    advice = "set config.output_router_logits=False to train without a router loss"
    for key in ("router_aux_loss_coef", "num_experts_per_tok"):
        if getattr(config, key, None) is None:
            raise ValueError(
                f"{name} has output_router_logits=True, but its config has no {key}, so its router loss "
                f"is not a supported one; {advice}"
            )
    stock = getattr(sys.modules[type(model).__module__], STOCK, None)
    experts = stock_num_experts(config)
    if stock is None or experts is None:
        raise ValueError(
            f"{name} has output_router_logits=True, but its routers have no supported load-balancing "
            f"loss; {advice}"
        )
    top_k = config.num_experts_per_tok
    logits = tuple(torch.randn(7, experts, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    expected = stock(logits, experts, top_k)
    found = load_balancing_loss(logits, torch.ones(7, dtype=torch.bool), top_k, Group())
    if not torch.allclose(torch.as_tensor(expected).float(), found, rtol=1e-4):
        raise ValueError(
            f"{name} has output_router_logits=True, but its router loss is not the supported "
            f"load-balancing loss; {advice}"
        )


def stock_num_experts(config: Any) -> int | None:
    """How many experts a router chooses from, whatever the family calls them."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((n for key in keys if (n := getattr(config, key, None))), None)
