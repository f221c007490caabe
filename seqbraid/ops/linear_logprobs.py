"""Log-probability of each token's target, and the entropy of what could have stood there.

Letters as in `head_rows`. With z = logits / temperature: logprob = z[target] − lse(z), and the entropy is
lse(z) − Σ softmax(z) · z.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..layout.labels import IGNORE
from .cross_entropy import VocabularyShard, fused_kernels
from .head_rows import head_rows
from .kernels import DEFAULT, Kernels
from .linear_cross_entropy import default_chunk


def linear_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    kernels: Kernels = DEFAULT,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, ...]:
    """`[T]` log-probabilities of the targets, 0 where there is none (−100), and with `entropy` the entropies
    as well.

    With a `shard`, see `linear_cross_entropy`.
    """
    rows_L = (targets_T != IGNORE).nonzero()[:, 0]
    if chunk_tokens is None:
        size_V = len(weight_VD) if shard is None else shard.widest
        chunk_tokens = default_chunk(size_V, weight_VD.shape[1])
        if entropy:  # of which logits and probabilities are there at once
            chunk_tokens = max(1, chunk_tokens // 2)
    rows = _LogprobRows(targets_T[rows_L], temperature, entropy, kernels, shard)
    return head_rows(hidden_TD, weight_VD, bias_V, rows_L, rows, chunk_tokens)


class _LogprobRows:
    """See `HeadRows`."""

    def __init__(
        self,
        targets_L: Tensor,
        temperature: float,
        entropy: bool,
        kernels: Kernels,
        shard: VocabularyShard | None,
    ) -> None:
        self.targets_L, self.temperature, self.entropy = targets_L, temperature, entropy
        self.kernels, self.shard = kernels, shard
        self.num_values = 1 + entropy
        self.lse: dict[int, Tensor] = {}
        self.entropies: dict[int, Tensor] = {}
        """By where a part begins."""

    def forward(self, logits_CV: Tensor, part: slice) -> tuple[Tensor, ...]:
        targets_C = self.targets_L[part]
        fused = self._fused(logits_CV)
        if fused is not None:
            return (-fused.cross_entropy_rows(logits_CV, targets_C, False)[0],)
        z_CV = self._scaled(logits_CV)
        top_C = z_CV.amax(1)
        if self.shard is not None:
            top_C = self.shard.maximum(top_C)
        z_CV -= top_C[:, None]
        columns_C1, is_here_C = self._columns(targets_C, z_CV)
        sums = [z_CV.gather(1, columns_C1)[:, 0].masked_fill_(~is_here_C, 0)]
        if self.entropy:
            weights_CV = z_CV.exp()
            sums += [weights_CV.sum(1), torch.einsum("cv,cv->c", weights_CV, z_CV)]
            del weights_CV
        else:
            sums += [z_CV.exp_().sum(1)]
        if self.shard is not None:
            sums = list(self.shard.total(torch.stack(sums)).unbind())
        log_total_C = sums[1].log()
        self.lse[part.start] = top_C + log_total_C
        logprobs_C = sums[0] - log_total_C
        if not self.entropy:
            return (logprobs_C,)
        self.entropies[part.start] = log_total_C - sums[2] / sums[1]
        return logprobs_C, self.entropies[part.start]

    def backward(self, logits_CV: Tensor, part: slice, *gradients_C: Tensor | None) -> Tensor:
        targets_C, dtype = self.targets_L[part], logits_CV.dtype
        dlogprobs_C = gradients_C[0]
        fused = self._fused(logits_CV)
        if fused is not None:
            assert dlogprobs_C is not None  # it is all that there is
            dlogits_CV: Tensor = fused.cross_entropy_rows(logits_CV, targets_C, True)[2]
            return dlogits_CV.mul_(-dlogprobs_C[:, None].to(dtype))
        p_CV = self._scaled(logits_CV).sub_(self.lse[part.start][:, None])
        dlogprobs_C = p_CV.new_zeros(len(p_CV)) if dlogprobs_C is None else dlogprobs_C / self.temperature
        if self.entropy and gradients_C[1] is not None:
            dentropy_C1 = (gradients_C[1] / self.temperature)[:, None]
            factors_CV = (p_CV + self.entropies[part.start][:, None]).mul_(dentropy_C1)
            p_CV.exp_().mul_(factors_CV.add_(dlogprobs_C[:, None]).neg_())
        else:
            p_CV.exp_().mul_(-dlogprobs_C[:, None])
        columns_C1, is_here_C = self._columns(targets_C, p_CV)
        p_CV.scatter_add_(1, columns_C1, (dlogprobs_C * is_here_C)[:, None])
        return p_CV.to(dtype)

    def _fused(self, logits_CV: Tensor) -> ModuleType | None:
        """A kernel that reads rows once; it knows neither entropy nor temperature."""
        plain = not self.entropy and self.temperature == 1.0
        return fused_kernels(logits_CV, self.kernels, self.shard is None) if plain else None

    def _scaled(self, logits_CV: Tensor) -> Tensor:
        z_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return z_CV if self.temperature == 1.0 else z_CV.div_(self.temperature)

    def _columns(self, targets_C: Tensor, z_CV: Tensor) -> tuple[Tensor, Tensor]:
        """Where a target's logit is, and whether it is on this rank."""
        columns_C = targets_C if self.shard is None else targets_C - self.shard.start
        is_here_C = (columns_C >= 0) & (columns_C < z_CV.shape[1])
        return columns_C.clamp(0, z_CV.shape[1] - 1)[:, None], is_here_C
