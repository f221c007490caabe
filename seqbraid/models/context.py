"""The step's context: what a token mixer must know of the batch, passed down as a keyword argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout import SequenceLayout
from ..ops.attention import BlockPlan


@dataclass(frozen=True)
class StepContext:
    """One forward pass: the layout and this rank's place in it. Made for the step, kept by nobody.

    It travels through the stock model's keyword arguments as `braid=`, to every attention and gated-delta
    module, also when a checkpointed layer is computed again in the backward.
    """

    layout: SequenceLayout
    rank: int
    mixed_layers: set[int] = field(default_factory=set, compare=False, repr=False)
    """The layers whose mixer was ours: any other layer would let packed samples see each other."""
    _plans: dict[int | None, BlockPlan] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_local_tokens(self) -> int:
        """Tokens of this rank, its padding included."""
        return self.layout.num_local_tokens

    def attention_plan(self, window: int | None) -> BlockPlan:
        """The blocks of a softmax layer with this sliding window, made once per step."""
        if window not in self._plans:
            segments = [(s.offset, s.num_tokens) for s in self.layout.segments(self.rank)]
            self._plans[window] = BlockPlan.causal(segments, window)
        return self._plans[window]

    @property
    def cu_segments(self) -> tuple[int, ...]:
        """Boundaries of this rank's segments, which lie side by side; padding lies behind the last."""
        segments = self.layout.segments(self.rank)
        ends = [s.offset + s.num_tokens for s in segments]
        assert [s.offset for s in segments] == [0, *ends[:-1]], "segments with gaps between them"
        return (0, *ends)

    def record(self, layer: int) -> None:
        """Note that a layer mixed its tokens by our rules."""
        self.mixed_layers.add(layer)
