"""What a step gives: the sums of its micro-batches on each rank, added over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.group import Group
from .output import ExpertLoad, MtpReport, StepOutput
from .step_loss import MTP_SUMS


@dataclass(frozen=True)
class StepSums:
    """Of one rank."""

    sums_NX: Tensor
    """`LocalLoss.sums` of each micro-batch."""
    expert_counts: Tensor | None
    metrics: Mapping[str, Tensor]

    def output(
        self,
        groups: Mapping[str, Group],
        loss: Tensor,
        label_tokens: int,
        divisor: float,
        has_aux: bool,
        is_cut: bool,
    ) -> StepOutput:
        """Of the whole step, the same on every rank; `loss` is this rank's. `is_cut`: into stages."""
        sums_NX, expert_counts, metrics = self.sums_NX, self.expert_counts, self.metrics
        if expert_counts is not None and "tp" in groups:  # whose ranks route tokens of their own
            expert_counts = groups["tp"].all_reduce(expert_counts)
        counted = [] if expert_counts is None else [expert_counts.flatten()]
        own = torch.cat([sums_NX.flatten(), *(x[None].to(sums_NX) for x in metrics.values()), *counted])
        sums = groups["loss"].all_reduce(own)
        sums = groups["pp"].all_reduce(sums)  # of stages that are not the last: zeros
        of_batches_NX = sums[: sums_NX.numel()].view_as(sums_NX)
        losses_N, correct_N, aux_N = of_batches_NX[:, :3].unbind(1)
        load, size = None, sums_NX.numel() + len(metrics)
        if expert_counts is not None:
            counts = sums[size:].view_as(expert_counts)
            if is_cut:  # those of layers that do not count their tokens are zeros
                counts = counts[counts.any(1)]
            load = ExpertLoad(counts[:, :-1], counts[:, -1]) if len(counts) else None
        loss_sum, mtp, mtp_loss = losses_N.sum(), None, None
        if sums_NX.shape[1] > 3:
            mtp = MtpReport(*of_batches_NX[:, 3:].sum(0).view(-1, MTP_SUMS).unbind(1))
            mtp_loss = (mtp.loss_sums_K.mean() / (divisor or 1)).to(loss.dtype)
        return StepOutput(
            loss=loss,
            mean_loss=(loss_sum / (divisor or 1)).to(loss.dtype),
            loss_sum=loss_sum.to(loss.dtype),
            label_tokens=label_tokens,
            correct_tokens=correct_N.sum().long(),
            aux_loss=aux_N.sum().to(loss.dtype) if has_aux else None,
            mtp_loss=mtp_loss,
            mtp=mtp,
            expert_load=load,
            batch_losses=losses_N / (divisor or 1),
            divisor=divisor,
            metrics=dict(zip(metrics, sums[sums_NX.numel() : size], strict=True)),
        )
