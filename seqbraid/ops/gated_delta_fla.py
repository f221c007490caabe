"""The gated delta rule by flash-linear-attention's kernels, in the parts that state passing needs.

The kernels run along a segment chunk by chunk, one after the other. An open segment, whose M and S0 are
wanted anyway, is cut into pieces at multiples of the chunk: its pieces are reduced to (M, S0) side by
side, a scan over them gives the segment's, and later the states that enter them, and the kernels run all
pieces at once.

Letters: T rows, N segments, P pieces of them all, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

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
    _places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    @lru_cache(maxsize=32)
    def of(cu: tuple[int, ...], opened: tuple[int, ...], num_heads: int, device: torch.device) -> Pieces:
        """Near-equal pieces of the open segments."""
        open_tokens = sum(cu[i + 1] - cu[i] for i in opened)
        length = max(SMALLEST_PIECE, open_tokens * num_heads / HEADS_AT_ONCE)
        bounds, of_segment = [cu[0]], []
        for segment, (start, stop) in enumerate(pairwise(cu)):
            count = max(1, round((stop - start) / length)) if segment in opened else 1
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

    def places(self, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First and last rows of some pieces, on the device."""
        key = tuple(pieces)
        if key not in self._places:
            index = torch.tensor(key, device=self.cu.device)
            self._places[key] = (self.cu[index], self.cu[index + 1])
        return self._places[key]


class FlaGatedDeltaCall:
    """The same four parts as `GatedDeltaCall`, on a GPU, in 16 bits with states in float32."""

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
        self.pieces = Pieces.of(cu, tuple(opened), v_THV.shape[1], v_THV.device)
        self.kept = tuple(kept)
        self.key_dim, self.value_dim = k_TGK.shape[2], v_THV.shape[2]
        self._summaries: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._du_of_outputs: Tensor | None = None

    def summaries(self, segments: Sequence[int], with_transition: bool) -> tuple[Tensor | None, Tensor]:
        """M [n, H, K, K] (None unless it is wanted) and S0 [n, H, K, V] of some segments."""
        self._reduce(segments)
        Ms, S0s = [], []
        for segment in segments:
            first, *others = self.pieces.of_segment[segment]
            M, S0 = self._summaries[first]
            for piece in others:
                M_piece, S0_piece = self._summaries[piece]
                M, S0 = M_piece @ M if with_transition else M, torch.baddbmm(S0_piece, M_piece, S0)
            Ms.append(M)
            S0s.append(S0)
        return self._stacked(Ms, self.key_dim) if with_transition else None, self._stacked(
            S0s, self.value_dim
        )

    def forward(self, initial_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [T, H, V], 0 outside all segments, and the final states [N, H, K, V]."""
        fla, p = fla_functions(), self._parts
        entering = self._entering(initial_NHKV)
        h, v_new, final_PHKV = fla.fwd_h(
            k=p.k, w=p.w, u=p.u, g=p.g, initial_state=entering, output_final_state=True, **self._sized
        )
        out = fla.fwd_o(q=p.q, k=p.k, v=v_new, h=h, g=p.g, scale=self.scale, **self._sized)
        transitions = [self._summaries[piece][0] for piece in self.pieces.cut]
        self.kept = (p.A, *([] if entering is None else [entering]), *transitions)
        return self._padded(out[0]), final_PHKV.index_select(0, self.pieces.lasts)

    def entering_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> Tensor:
        """dS_in [n, H, K, V] of some segments where their final states have no gradient."""
        self._reduce_gradients(dout_THV, segments)
        found = []
        for segment in segments:
            *earlier, last = self.pieces.of_segment[segment]
            dS = self._gradients[last]
            for piece in reversed(earlier):
                dS = torch.baddbmm(self._gradients[piece], self._transition(piece).mT, dS)
            found.append(dS)
        return self._stacked(found, self.value_dim)

    def backward(
        self, dout_THV: Tensor, initial_NHKV: Tensor | None, dfinal_NHKV: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs and of the initial states."""
        fla, p = fla_functions(), self._parts
        do = self._rows(dout_THV)
        entering = None if initial_NHKV is None and not self.pieces.cut else self.kept[1]
        leaving = self._leaving_gradients(dout_THV, dfinal_NHKV)
        h, v_new, _ = fla.fwd_h(
            k=p.k, w=p.w, u=p.u, g=p.g, initial_state=entering, output_final_state=False, **self._sized
        )
        dh, dentering, du = fla.bwd_dhu(
            q=p.q, k=p.k, w=p.w, g=p.g, h0=entering, dht=leaving, do=do, dv=self._du(dout_THV),
            scale=self.scale, **self._sized,
        )  # fmt: skip
        dq, dk, dw, dg = fla.bwd_dqkwg(
            q=p.q, k=p.k, v=v_new, w=p.w, g=p.g, h=h, dv=du, do=do, dh=dh, scale=self.scale, **self._sized
        )
        dk_of_w, dv, dbeta, dg_of_w = fla.wy_bwd(
            k=p.k, v=p.v, beta=p.beta, g=p.g, A=p.A, dw=dw, du=du, **self._where
        )
        dk, dg = dk.add_(dk_of_w), dg.add_(dg_of_w)
        dg = fla.cumsum(dg, reverse=True, **self._sized)
        if p.q_factor is not None:
            dq, dk = fla.l2norm_bwd(p.q, p.q_factor, dq), fla.l2norm_bwd(p.k, p.k_factor, dk)
        dq, dk, dv, dg, dbeta = (
            self._padded(grad[0]).to(like.dtype)
            for grad, like in zip((dq, dk, dv, dg, dbeta), self.inputs, strict=True)
        )
        if dentering is None:
            num_segments = len(self.pieces.of_segment)
            dinitial = self._zero_state.expand(num_segments, *self._zero_state.shape)
        else:
            dinitial = dentering.index_select(0, self.pieces.firsts)
        return dq, dk, dv, dg, dbeta, dinitial

    @cached_property
    def _parts(self) -> _Parts:
        """What all kernels start from: normalised q and k, g summed inside chunks, w and u."""
        fla = fla_functions()
        q, k, v, g, beta = (self._rows(x) for x in self.inputs)
        q_factor = k_factor = None
        if self.qk_l2norm:
            (q, q_factor), (k, k_factor) = fla.l2norm_fwd(q), fla.l2norm_fwd(k)
        g = fla.cumsum(g.float(), scale=fla.log2_e, **self._sized)
        if self.kept:  # the forward has solved for A
            A = self.kept[0]
            w, u = fla.w_u(k=k, v=v, beta=beta, A=A, g=g, **self._where)
        else:
            w, u, A = fla.intra(k=k, v=v, g=g, beta=beta, **self._sized)
        return _Parts(q, q_factor, k, k_factor, v, g, beta, w, u, A)

    @cached_property
    def _where(self) -> dict[str, Any]:
        """What every kernel must know of the pieces."""
        indices = fla_functions().chunk_indices(self.pieces.cu, CHUNK, cu_seqlens_cpu=self.pieces.bounds)
        return {"cu_seqlens": self.pieces.cu, "chunk_indices": indices}

    @property
    def _sized(self) -> dict[str, Any]:
        return {**self._where, "chunk_size": CHUNK}

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

    def _reduce(self, segments: Sequence[int]) -> None:
        pieces = self._needed(segments, self._summaries)
        if pieces:
            from .gated_delta_triton import piece_summaries

            p = self._parts
            M, S0 = piece_summaries(p.k[0], p.w[0], p.u[0], p.g[0], *self.pieces.places(pieces))
            self._summaries |= dict(zip(pieces, zip(M, S0, strict=True), strict=True))

    def _reduce_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> None:
        pieces = self._needed(segments, self._gradients)
        if pieces:
            from .gated_delta_triton import piece_entering_gradients

            p = self._parts
            dS = piece_entering_gradients(
                p.q[0], p.k[0], p.w[0], p.g[0], self._rows(dout_THV)[0], self._du(dout_THV)[0],
                *self.pieces.places(pieces), self.scale,
            )  # fmt: skip
            self._gradients |= dict(zip(pieces, dS, strict=True))

    def _du(self, dout_THV: Tensor) -> Tensor:
        """What the outputs give u inside their chunks; the same for both parts of a backward."""
        if self._du_of_outputs is None:
            p = self._parts
            self._du_of_outputs = fla_functions().bwd_dv_local(
                q=p.q, k=p.k, g=p.g, do=self._rows(dout_THV), scale=self.scale, **self._sized
            )
        return self._du_of_outputs

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
                    state = torch.baddbmm(S0, M, state)
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
                    state = torch.baddbmm(self._gradients[piece], self._transition(piece).mT, state)
        return torch.stack(states[::-1])

    def _transition(self, piece: int) -> Tensor:
        """M of a piece of a segment in several, as the forward found it."""
        return self.kept[2 + self.pieces.cut.index(piece)]

    @cached_property
    def _zero_state(self) -> Tensor:
        v = self.inputs[2]
        return v.new_zeros(v.shape[1], self.key_dim, self.value_dim, dtype=torch.float32)

    def _stacked(self, states: list[Tensor], columns: int) -> Tensor:
        return (
            torch.stack(states)
            if states
            else self._zero_state.new_empty(0, *self._zero_state.shape[:2], columns)
        )


class _Parts(NamedTuple):
    """What all kernels start from; A is the inverse that makes w and u of k and v."""

    q: Tensor
    q_factor: Tensor | None
    k: Tensor
    k_factor: Tensor | None
    v: Tensor
    g: Tensor
    beta: Tensor
    w: Tensor
    u: Tensor
    A: Tensor


class FlaFunctions(NamedTuple):
    """The functions of flash-linear-attention that we put together."""

    l2norm_fwd: Any
    l2norm_bwd: Any
    cumsum: Any
    intra: Any
    w_u: Any
    fwd_h: Any
    fwd_o: Any
    bwd_dv_local: Any
    bwd_dhu: Any
    bwd_dqkwg: Any
    wy_bwd: Any
    chunk_indices: Any
    log2_e: float


@cache
def fla_functions() -> FlaFunctions:
    """Imported late: it takes a while, and needs a GPU."""
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2
    from fla.ops.utils.index import prepare_chunk_indices

    return FlaFunctions(
        l2norm_fwd=l2norm_fwd,
        l2norm_bwd=l2norm_bwd,
        cumsum=chunk_local_cumsum,
        intra=chunk_gated_delta_rule_fwd_intra,
        w_u=recompute_w_u_fwd,
        fwd_h=chunk_gated_delta_rule_fwd_h,
        fwd_o=chunk_fwd_o,
        bwd_dv_local=chunk_bwd_dv_local,
        bwd_dhu=chunk_gated_delta_rule_bwd_dhu,
        bwd_dqkwg=chunk_bwd_dqkwg,
        wy_bwd=prepare_wy_repr_bwd,
        chunk_indices=prepare_chunk_indices,
        log2_e=RCP_LN2,
    )
