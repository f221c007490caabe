"""What every implementation of the gated delta rule offers, and what a call of it fixes.

Shapes: T rows, N segments, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of q, k, v, g, β and the initial states."""


class RuleOptions(NamedTuple):
    """What a call fixes besides its tensors."""

    scale: float | None = None
    """What queries are multiplied by; K^-0.5 when absent."""
    qk_l2norm: bool = True
    chunk_size: int = 64


DEFAULTS = RuleOptions()


class RuleCall(Protocol):
    """The rule on given rows, in the four parts that a caller with an autograd of its own puts together.

    A backward makes its own call of the same inputs, and hands it what the forward's left in `kept`. Segments
    are named by their place in `cu_seqlens`. States are float64 when v is, else float32; an initial or final
    state's gradient that is None is zero.
    """

    kept: tuple[Tensor, ...]

    def summaries(self, segments: Sequence[int], with_transition: bool) -> tuple[Tensor | None, Tensor]:
        """M [n, H, K, K] (None unless it is wanted) and S0 [n, H, K, V] of some segments."""

    def forward(self, initial_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [T, H, V] in v's dtype, 0 outside all segments, and the final states [N, H, K, V]."""

    def entering_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> Tensor:
        """dS_in [n, H, K, V] of some segments where their final states have no gradient."""

    def backward(
        self, dout_THV: Tensor, initial_NHKV: Tensor | None, dfinal_NHKV: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs and of the initial states, from those of the outputs and final states."""
