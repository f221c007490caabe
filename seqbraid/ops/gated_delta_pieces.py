"""The gated delta rule by kernels that go through a segment chunk by chunk, in parts for state passing.

An open segment, whose M and S0 are wanted anyway, is cut into pieces at multiples of the chunk: its pieces
are reduced to (M, S0) side by side, a scan over them gives the segment's, and later the states that enter
them, and the kernels run all pieces at once. The same for a segment so long that the GPU would wait for it.

Letters: T rows, N segments, P pieces of them all, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .boundaries import Boundaries, as_boundaries
from .gated_delta_call import DEFAULTS, Gradients, RuleOptions

CHUNK = 64

SMALLEST_PIECE = 1024
"""Tokens of a piece: shorter ones are not worth their states."""

HEADS_AT_ONCE = 256
"""Pieces × value heads that fill a GPU."""

LONG = 2
"""Pieces' worth of tokens that a segment may have and stay whole."""


@dataclass(frozen=True)
class Pieces:
    """Segments cut into pieces; segments that are not open are one piece."""

    bounds: Tensor
    """Boundaries of all pieces, on the host."""
    cu: Tensor
    """The same on the device, as are the indices that follow."""
    firsts: Tensor
    """The first piece of each segment."""
    lasts: Tensor
    of_segment: tuple[range, ...]
    """The pieces of each segment."""
    cut: tuple[int, ...]
    """The pieces of segments that have several."""
    made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What a kind of call has made of them, for the next call."""

    @staticmethod
    @lru_cache(maxsize=32)
    def of(
        cu: tuple[int, ...],
        opened: tuple[int, ...],
        num_heads: int,
        device: torch.device,
        cut_long: bool = False,
    ) -> Pieces:
        """Near-equal pieces of the open segments; with `cut_long`, of all that would hold the others up."""
        wanted = cu[-1] - cu[0] if cut_long else sum(cu[i + 1] - cu[i] for i in opened)
        length = max(SMALLEST_PIECE, wanted * num_heads / HEADS_AT_ONCE)
        bounds, of_segment = [cu[0]], []
        for segment, (start, stop) in enumerate(pairwise(cu)):
            is_cut = segment in opened or (cut_long and stop - start > LONG * length)
            count = max(1, round((stop - start) / length)) if is_cut else 1
            num_chunks = -(-(stop - start) // CHUNK)
            cuts = [start + num_chunks * i // count * CHUNK for i in range(1, count)]
            of_segment.append(range(len(bounds) - 1, len(bounds) + len(cuts)))
            bounds += [*cuts, stop]
        firsts, lasts = ([pieces[i] for pieces in of_segment] for i in (0, -1))
        cut = tuple(i for pieces in of_segment if len(pieces) > 1 for i in pieces)
        return Pieces(
            bounds=torch.tensor(bounds),
            cu=torch.tensor(bounds, device=device),
            firsts=torch.tensor(firsts, device=device),
            lasts=torch.tensor(lasts, device=device),
            of_segment=tuple(of_segment),
            cut=cut,
        )


def carried(M_HKK: Tensor, state_HKV: Tensor, added_HKV: Tensor | None = None) -> Tensor:
    """M S, and what is added to it; autocast does not lower the precision."""
    with torch.autocast(state_HKV.device.type, enabled=False):
        return M_HKK @ state_HKV if added_HKV is None else torch.baddbmm(added_HKV, M_HKK, state_HKV)


class PiecewiseCall:
    """What such calls share: how segments are cut, and how their pieces are joined."""

    cut_long = False
    """Whether segments that are not open are cut too, where they are long."""

    def __init__(
        self,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        cu_seqlens: Boundaries,
        options: RuleOptions = DEFAULTS,
        kept: Sequence[Tensor] = (),
        opened: Sequence[int] = (),
    ) -> None:
        self.cu = as_boundaries(cu_seqlens, len(v_THV))
        self.num_rows = len(v_THV)
        self.inputs = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
        self.scale = k_TGK.shape[2] ** -0.5 if options.scale is None else options.scale
        self.qk_l2norm = options.qk_l2norm
        cu = tuple(n - self.cu[0] for n in self.cu)
        self.pieces = Pieces.of(cu, tuple(opened), v_THV.shape[1], v_THV.device, self.cut_long)
        self.kept = tuple(kept)
        self.key_dim, self.value_dim = k_TGK.shape[2], v_THV.shape[2]
        self._summaries: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, Tensor] = {}

    def summaries(self, segments: Sequence[int], with_transition: bool) -> tuple[Tensor | None, Tensor]:
        """M [n, H, K, K] (None unless it is wanted) and S0 [n, H, K, V] of some segments."""
        self._reduce(segments)
        Ms, S0s = [], []
        for segment in segments:
            first, *others = self.pieces.of_segment[segment]
            M, S0 = self._summaries[first]
            for piece in others:
                M_piece, S0_piece = self._summaries[piece]
                M, S0 = carried(M_piece, M) if with_transition else M, carried(M_piece, S0, S0_piece)
            Ms.append(M)
            S0s.append(S0)
        return self._stacked(Ms, self.key_dim) if with_transition else None, self._stacked(
            S0s, self.value_dim
        )

    def entering_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> Tensor:
        """dS_in [n, H, K, V] of some segments where their final states have no gradient."""
        self._reduce_gradients(dout_THV, segments)
        found = []
        for segment in segments:
            *earlier, last = self.pieces.of_segment[segment]
            dS = self._gradients[last]
            for piece in reversed(earlier):
                dS = carried(self._transition(piece).mT, dS, self._gradients[piece])
            found.append(dS)
        return self._stacked(found, self.value_dim)

    def _reduce(self, segments: Sequence[int]) -> None:
        """Fill in `_summaries` of what is needed for these segments."""
        raise NotImplementedError

    def _reduce_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> None:
        """Fill in `_gradients`: what the outputs of a piece give the state that enters it."""
        raise NotImplementedError

    def _keep(self, A: Tensor, entering_PHKV: Tensor | None) -> None:
        """What the backward is handed."""
        transitions = [self._summaries[piece][0] for piece in self.pieces.cut]
        self.kept = (A, *([] if entering_PHKV is None else [entering_PHKV]), *transitions)

    def _kept_entering(self, initial_NHKV: Tensor | None) -> Tensor | None:
        """The states that entered the pieces in the forward."""
        return None if initial_NHKV is None and not self.pieces.cut else self.kept[1]

    def _results(self, gradients: Sequence[Tensor], dentering_PHKV: Tensor | None) -> Gradients:
        """What a backward gives, of rows in a batch of one and of the states that entered the pieces."""
        dq, dk, dv, dg, dbeta = (
            self._padded(grad[0]).to(like.dtype) for grad, like in zip(gradients, self.inputs, strict=True)
        )
        if dentering_PHKV is None:
            num_segments = len(self.pieces.of_segment)
            dinitial = self._zero_state.expand(num_segments, *self._zero_state.shape)
        else:
            dinitial = dentering_PHKV.index_select(0, self.pieces.firsts)
        return dq, dk, dv, dg, dbeta, dinitial

    def _rows(self, x: Tensor) -> Tensor:
        """The rows of all segments, as a batch of one."""
        return x[self.cu[0] : self.cu[-1]].contiguous()[None]

    def _padded(self, x: Tensor) -> Tensor:
        """Undo `_rows`; 0 outside all segments."""
        before, after = self.cu[0], self.num_rows - self.cu[-1]
        return x if not before + after else F.pad(x, (0, 0) * (x.dim() - 1) + (before, after))

    def _needed(self, segments: Sequence[int], there: dict[int, Any]) -> list[int]:
        """The pieces of some segments, and of all segments in several pieces, that are not there yet."""
        wanted = {piece for segment in segments for piece in self.pieces.of_segment[segment]}
        return sorted(wanted.union(self.pieces.cut).difference(there))

    def _entering(self, initial_NHKV: Tensor | None) -> Tensor | None:
        """The states that enter all pieces; None where none does."""
        if initial_NHKV is None and not self.pieces.cut:
            return None
        self._reduce(())
        states = []
        for segment, pieces in enumerate(self.pieces.of_segment):
            state = self._zero_state if initial_NHKV is None else initial_NHKV[segment]
            for piece in pieces:
                states.append(state)
                if piece != pieces[-1]:
                    M, S0 = self._summaries[piece]
                    state = carried(M, state, S0)
        return torch.stack(states)

    def _leaving_gradients(self, dout_THV: Tensor, dfinal_NHKV: Tensor | None) -> Tensor | None:
        """The gradients that enter all pieces from behind; None where none does."""
        if dfinal_NHKV is None and not self.pieces.cut:
            return None
        self._reduce_gradients(dout_THV, ())
        states = []
        for segment, pieces in reversed(list(enumerate(self.pieces.of_segment))):
            state = self._zero_state if dfinal_NHKV is None else dfinal_NHKV[segment]
            for piece in reversed(pieces):
                states.append(state)
                if piece != pieces[0]:
                    state = carried(self._transition(piece).mT, state, self._gradients[piece])
        return torch.stack(states[::-1])

    def _transition(self, piece: int) -> Tensor:
        """M of a piece of a segment in several, as the forward found it."""
        return self.kept[2 + self.pieces.cut.index(piece)]

    @cached_property
    def _zero_state(self) -> Tensor:
        v = self.inputs[2]
        dtype = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(v.shape[1], self.key_dim, self.value_dim, dtype=dtype)

    def _stacked(self, states: list[Tensor], columns: int) -> Tensor:
        return (
            torch.stack(states)
            if states
            else self._zero_state.new_empty(0, *self._zero_state.shape[:2], columns)
        )
