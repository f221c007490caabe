"""What a gated-delta layer brings beside its tokens, whatever its family calls it.

Letters: T tokens, C channels of q, k and v side by side, W width of the convolution, G key heads, H value
heads (a multiple of G), K key head size, V value head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class GatedDeltaLayer(NamedTuple):
    """The parameters between a layer's input projections and its gated norm."""

    conv_weight_CW: Tensor
    conv_bias_C: Tensor | None
    activation: str | None
    A_log_H: Tensor
    dt_bias_H: Tensor
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Size of one key head."""
    value_dim: int
    """Size of one value head."""

    @property
    def widths(self) -> list[int]:
        """Channels of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return [keys, keys, self.num_value_heads * self.value_dim]

    def split(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k `[T, G, K]` and v `[T, H, V]` of the convolved channels."""
        q, k, v = mixed_TC.split(self.widths, dim=-1)
        return (
            q.unflatten(-1, (self.num_key_heads, -1)),
            k.unflatten(-1, (self.num_key_heads, -1)),
            v.unflatten(-1, (self.num_value_heads, -1)),
        )

    def log_decay(self, a_TH: Tensor) -> Tensor:
        """g, in float32 at least: in 16 bits exp(A_log) may overflow."""
        wide = torch.promote_types(a_TH.dtype, torch.float32)
        return -self.A_log_H.to(wide).exp() * F.softplus(a_TH.to(wide) + self.dt_bias_H)
