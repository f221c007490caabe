"""Multi-token prediction in a step: from the decoder's hidden states to those of each depth, and how often a
depth foresees what the decoder will say.

It takes hidden states and embeddings of this rank's tokens, so it asks for neither the table of embeddings
nor media: what runs the last layers of a model can run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group
from ..layout.labels import IGNORE
from ..sequence_parallel.context import StepContext
from ..sequence_parallel.plans import RowPlans
from ..sequence_parallel.shift import shifted_rows
from .batch import PackedBatch
from .experts import BraidedExperts, count_of_all
from .parts import ModelParts
from .running import running
from .step_loss import StepLoss


class MtpOutput(NamedTuple):
    """What the depths give for this rank's tokens between mixers and MLPs."""

    hidden_KTD: tuple[Tensor, ...]
    """What the head turns into logits."""
    router_logits_RE: Tensor | None
    """Of all depths, of the slots that a token is predicted from; None where they were not asked for."""
    expert_counts: Tensor | None
    """Where this rank's tokens went (`experts.count_of_all`), a row for each layer."""


def run_mtp(
    parts: ModelParts,
    hidden_TD: Tensor,
    embeds_TD: Tensor,
    batch: PackedBatch,
    context: StepContext,
    experts: Sequence[BraidedExperts] = (),
    with_router: bool = False,
) -> MtpOutput:
    """All depths on this rank's tokens.

    Args:
        parts: of the model.
        hidden_TD: what the decoder gives for them, after its final norm.
        embeds_TD: what it was given: embeddings with the features of media in their places.
        batch: the step's.
        context: the one that the decoder ran in.
        experts: those of the whole model.
        with_router: whether the routers' logits are wanted.
    """
    mtp = parts.mtp
    assert mtp is not None, "the model has multi-token prediction"
    positions_4T = batch.positions
    rotary = parts.decoder.rotary_emb
    # Some releases want all three rows of a module for grids, of text alone too.
    positions = positions_4T[1:, None] if hasattr(rotary, "mrope_section") else positions_4T[:1]
    routers = [layer.router if with_router else None for layer in mtp.layers]
    with running(context):
        angles = rotary(hidden_TD[None], positions)
        found, contexts = mtp.module(hidden_TD, embeds_TD, angles, routers, context)
    missing = {layer.index for layer in mtp.layers[: len(contexts)]} - context.mixed_layers
    if missing:
        raise ValueError(
            f"layers {sorted(missing)} of multi-token prediction did not run through transformers' attention "
            "interface, so packed samples may have leaked into each other there"
        )
    logits = torch.cat(found.router_logits) if found.router_logits else None
    hidden_KTD = tuple(x.squeeze(0) for x in found.hidden_K1TD)
    return MtpOutput(hidden_KTD, logits, _counts(experts, contexts, len(mtp.layers), hidden_TD.device))


def _counts(
    experts: Sequence[BraidedExperts], contexts: Sequence[StepContext], layers: int, device: torch.device
) -> Tensor | None:
    """Of layers that serve several depths, the sum."""
    counts = [count_of_all(experts, context, device) for context in contexts]
    rows = [
        torch.stack([x for x in counts[layer::layers] if x is not None]).sum(0)
        for layer in range(min(layers, len(contexts)))
        if counts[layer] is not None
    ]
    return torch.cat(rows) if rows else None


def sums_of_depths(sums: StepLoss, batch: PackedBatch, row: Group, tp: Group) -> Tensor:
    """`[4·K]`: of each depth loss, labels, correct and accepted tokens. `row` has the ranks that share the
    row's tokens, `tp` those among them that have the same ones in the loss.
    """
    assert sums.mtp_K3 is not None and batch.mtp_targets is not None
    kept_K = sums.mtp_K3.new_full((batch.mtp_depth,), torch.nan)
    if sums.best is not None:
        kept_K = tp.all_reduce(accepted(*sums.best, batch.mtp_targets, batch.plans, row).double())
    return torch.cat([sums.mtp_K3, kept_K[:, None]], dim=1).flatten()


@torch.no_grad()
def accepted(
    best_T: Tensor, best_KT: Sequence[Tensor], targets_KT: Tensor, plans: RowPlans, group: Group
) -> Tensor:
    """`[K]`: how often a depth's best token is what the decoder itself finds best once it is there, of this
    rank's share of tokens. An engine that drafts with this depth would keep such a token.

    Args:
        best_T: the decoder's, of all tokens of the tp ranks.
        best_KT: of each depth.
        targets_KT: of each depth; only where there is one is it counted.
        plans: of the row.
        group: the ranks that share the row's tokens.
    """
    share = plans.share
    ahead_KT = shifted_rows(best_T[share], plans.shift(len(best_KT), best_T.device), group, "mtp predictions")
    pairs = zip(ahead_KT, best_KT, targets_KT, strict=True)
    return torch.stack(
        [
            ((ahead_T == own_T[share]) & (targets_T[share] != IGNORE)).sum()
            for ahead_T, own_T, targets_T in pairs
        ]
    )
