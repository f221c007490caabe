"""The gated delta rule by flash-linear-attention's kernels.

Letters: see `gated_delta_pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gated_delta_call import Gradients
from .gated_delta_pieces import CHUNK, PiecewiseCall


class FlaGatedDeltaCall(PiecewiseCall):
    """The same four parts as `GatedDeltaCall`, on a GPU, in 16 bits with states in float32."""

    _du_of_outputs: Tensor | None = None

    def forward(self, initial_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [T, H, V], 0 outside all segments, and the final states [N, H, K, V]."""
        fla, p = fla_functions(), self._parts
        entering = self._entering(initial_NHKV)
        h, v_new, final_PHKV = fla.fwd_h(
            k=p.k, w=p.w, u=p.u, g=p.g, initial_state=entering, output_final_state=True, **self._sized
        )
        out = fla.fwd_o(q=p.q, k=p.k, v=v_new, h=h, g=p.g, scale=self.scale, **self._sized)
        self._keep(p.A, entering)
        return self._padded(out[0]), final_PHKV.index_select(0, self.pieces.lasts)

    def backward(
        self, dout_THV: Tensor, initial_NHKV: Tensor | None, dfinal_NHKV: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs and of the initial states."""
        fla, p = fla_functions(), self._parts
        do = self._rows(dout_THV)
        entering = self._kept_entering(initial_NHKV)
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
        return self._results((dq, dk, dv, dg, dbeta), dentering)

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

    def _reduce(self, segments: Sequence[int]) -> None:
        pieces = self._needed(segments, self._summaries)
        if pieces:
            from .gated_delta_triton import piece_summaries

            p = self._parts
            M, S0 = piece_summaries(p.k[0], p.w[0], p.u[0], p.g[0], *self._places(pieces))
            self._summaries |= dict(zip(pieces, zip(M, S0, strict=True), strict=True))

    def _reduce_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> None:
        pieces = self._needed(segments, self._gradients)
        if pieces:
            from .gated_delta_triton import piece_entering_gradients

            p = self._parts
            dS = piece_entering_gradients(
                p.q[0], p.k[0], p.w[0], p.g[0], self._rows(dout_THV)[0], self._du(dout_THV)[0],
                *self._places(pieces), self.scale,
            )  # fmt: skip
            self._gradients |= dict(zip(pieces, dS, strict=True))

    def _places(self, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First and last rows of some pieces, on the device."""
        key, made, cu = tuple(pieces), self.pieces.made, self.pieces.cu
        if key not in made:
            index = torch.tensor(key, device=cu.device)
            made[key] = (cu[index], cu[index + 1])
        first, last = made[key]
        return first, last

    def _du(self, dout_THV: Tensor) -> Tensor:
        """What the outputs give u inside their chunks; the same for both parts of a backward."""
        if self._du_of_outputs is None:
            p = self._parts
            self._du_of_outputs = fla_functions().bwd_dv_local(
                q=p.q, k=p.k, g=p.g, do=self._rows(dout_THV), scale=self.scale, **self._sized
            )
        return self._du_of_outputs


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
