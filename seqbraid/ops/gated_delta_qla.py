"""The gated delta rule by FlashQLA's kernels, for GPUs of the Hopper generation.

Its own way to cut long sequences (`auto_cp`) drops states that have nearly decayed. So its kernels are
called one by one, and pieces are chained here, exactly.

Letters: see `gated_delta_pieces`; C chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .fla_status import fla_missing
from .gated_delta_call import Gradients
from .gated_delta_pieces import CHUNK, Pieces, PiecewiseCall

HEAD = 128
"""The one size of heads that it takes."""

HOPPER = (9, 0)
"""GPUs for which it has all that is needed here: its kernels for Blackwell round M of a piece to 16 bits."""


@dataclass(frozen=True)
class Run:
    """Some pieces that lie side by side."""

    pieces: range
    start: int
    stop: int
    cu: Tensor
    """Their boundaries, from 0 on."""
    chunks_PH: Tensor
    """How many chunks each has, for every head."""

    def rows(self, *tensors: Tensor) -> list[Tensor]:
        """Their rows of tensors that are a batch of one."""
        return [x[0, self.start : self.stop][None] for x in tensors]


class QlaGatedDeltaCall(PiecewiseCall):
    """The same four parts as `GatedDeltaCall`, on a GPU, in 16 bits with states in float32."""

    cut_long = True

    def forward(self, initial_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [T, H, V], 0 outside all segments, and the final states [N, H, K, V]."""
        p = self._parts
        entering = self._entering(initial_NHKV)
        out, _, final_PHKV = qla_functions().forward(
            q=p.q, k=p.k, v=p.v, a=p.A, g=p.g, b=p.beta, scale=self.scale, initial_state=entering,
            output_final_state=True, output_h=False, cu_seqlens=self._cu,
        )  # fmt: skip
        self._keep(p.A, entering)
        return self._padded(out[0]), final_PHKV.index_select(0, self.pieces.lasts)

    def backward(
        self, dout_THV: Tensor, initial_NHKV: Tensor | None, dfinal_NHKV: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs and of the initial states."""
        qla, p = qla_functions(), self._parts
        entering = self._kept_entering(initial_NHKV)
        leaving = self._leaving_gradients(dout_THV, dfinal_NHKV)
        h_CHKV, _, _ = qla.states(
            k=p.k, v=p.v, a=p.A, g=p.g, b=p.beta, initial_state=entering, output_final_state=False,
            output_h=True, cu_seqlens=self._cu,
        )  # fmt: skip
        dq, dk, dv, dg, dbeta, dentering = qla.backward(
            q=p.q, k=p.k, v=p.v, a=p.A, g=p.g, b=p.beta, do=self._rows(dout_THV), dht=leaving, h=h_CHKV,
            scale=self.scale, cu_seqlens=self._cu,
        )  # fmt: skip
        if (num_key_heads := p.k.shape[2]) < p.v.shape[2]:
            dq, dk = qla.sum_heads(dq, num_key_heads), qla.sum_heads(dk, num_key_heads)
        dg = qla.cumsum(dg, chunk_size=CHUNK, cu_seqlens=self._cu, reverse=True)
        if p.q_factor is not None:
            dq, dk = qla.l2norm_bwd(p.q, p.q_factor, dq), qla.l2norm_bwd(p.k, p.k_factor, dk)
        return self._results((dq, dk, dv, dg, dbeta), None if entering is None else dentering)

    def _reduce(self, segments: Sequence[int]) -> None:
        p = self._parts
        for run in self._runs(self._needed(segments, self._summaries)):
            M, S0 = qla_functions().reduce(run, *run.rows(p.k, p.v, p.A, p.g, p.beta))
            self._summaries |= dict(zip(run.pieces, zip(M, S0, strict=True), strict=True))

    def _reduce_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> None:
        p, needed = self._parts, self._needed(segments, self._gradients)
        for run in self._runs(needed):
            q, k, A, g, beta, do = run.rows(p.q, p.k, p.A, p.g, p.beta, self._rows(dout_THV))
            _, dS = qla_functions().entering(
                q=q, k=k, a=A, g=g, b=beta, do=do, dht=None, output_dh=False, scale=self.scale,
                cu_seqlens=run.cu,
            )  # fmt: skip
            self._gradients |= dict(zip(run.pieces, dS, strict=True))

    def _runs(self, pieces: Sequence[int]) -> list[Run]:
        key, num_heads = ("runs", *pieces), self.inputs[2].shape[1]
        if key not in self.pieces.made:
            self.pieces.made[key] = list(runs_of(self.pieces, pieces, num_heads))
        found: list[Run] = self.pieces.made[key]
        return found

    @property
    def _cu(self) -> Tensor:
        """The boundaries of all pieces, which know their chunks, so that nobody waits for the GPU to tell."""
        if "cu" not in self.pieces.made:
            self.pieces.made["cu"] = with_chunks(self.pieces.cu, self.pieces.bounds)
        found: Tensor = self.pieces.made["cu"]
        return found

    @cached_property
    def _parts(self) -> _Parts:
        """What all kernels start from: normalised q and k, g summed inside chunks, the inverse of a chunk."""
        qla = qla_functions()
        q, k, v, g, beta = (self._rows(x) for x in self.inputs)
        q_factor = k_factor = None
        if self.qk_l2norm:
            (q, q_factor), (k, k_factor) = qla.l2norm_fwd(q), qla.l2norm_fwd(k)
        g = qla.cumsum(g.float(), chunk_size=CHUNK, cu_seqlens=self._cu)
        # The forward has solved for A.
        A = self.kept[0] if self.kept else qla.solve(k=k, b=beta, chunk_size=CHUNK, cu_seqlens=self._cu)
        return _Parts(q, q_factor, k, k_factor, v, g, beta, A)


class _Parts(NamedTuple):
    """What all kernels start from."""

    q: Tensor
    q_factor: Tensor | None
    k: Tensor
    k_factor: Tensor | None
    v: Tensor
    g: Tensor
    beta: Tensor
    A: Tensor


def runs_of(pieces: Pieces, some: Sequence[int], num_heads: int) -> Iterator[Run]:
    """Neighbours together, each run with what the kernels must know of it."""
    bounds, device = pieces.bounds.tolist(), pieces.cu.device
    edges = [0, *(i for i in range(1, len(some)) if some[i] != some[i - 1] + 1), len(some)]
    for begin, end in pairwise(edges if some else [0]):
        first, last = some[begin], some[end - 1] + 1
        own = pieces.bounds[first : last + 1] - bounds[first]
        chunks = (own.diff() + CHUNK - 1) // CHUNK
        cu = with_chunks(own.to(device), own)
        chunks_PH = chunks[:, None].expand(-1, num_heads).contiguous().to(device)
        yield Run(range(first, last), bounds[first], bounds[last], cu, chunks_PH)


def with_chunks(cu: Tensor, on_host: Tensor) -> Tensor:
    """A copy of the boundaries that FlashQLA's functions ask for its chunks."""
    prepared: Tensor = qla_functions().prepare(cu.clone(), on_host)
    return prepared


class QlaFunctions(NamedTuple):
    """The functions of FlashQLA that we put together, and the norm that is not among them."""

    l2norm_fwd: Any
    l2norm_bwd: Any
    cumsum: Any
    solve: Any
    forward: Any
    states: Any
    state_kernel: Any
    entering: Any
    backward: Any
    sum_heads: Any
    prepare: Any

    def reduce(
        self, run: Run, k: Tensor, v: Tensor, A: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """M [P, H, K, K] and S0 [P, H, K, V] of the pieces of a run.

        FlashQLA's function around this kernel keeps them in 16 bits.
        """
        count, num_heads = len(run.pieces), v.shape[2]
        offsets = F.pad(run.chunks_PH[:, 0].cumsum(0), (1, 0))
        M, S0 = torch.empty(2, count, num_heads, HEAD, HEAD, device=k.device).unbind()
        kernel = self.state_kernel(
            num_heads, k.shape[2], HEAD, HEAD, CHUNK, accum_dtype="float32", qkva_dtype=k.dtype,
            g_dtype=g.dtype, b_dtype=beta.dtype, h0_dtype=torch.float32, ht_dtype=torch.float32,
            h_dtype=k.dtype, seqlen_dtype=run.cu.dtype, use_initial_state=False, store_final_state=True,
            store_h=False, is_varlen=True, is_cp=True, state_v_first=False,
        )  # fmt: skip
        no_states = k.new_empty(1, 0, num_heads, HEAD, HEAD)
        kernel(k, v, A, g, beta, S0, run.cu, offsets, run.chunks_PH, no_states, S0, M)
        return M, S0


@cache
def qla_functions() -> QlaFunctions:
    """Imported late: it takes a while, and needs a GPU."""
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
    from flash_qla.ops.gated_delta_rule import chunk
    from flash_qla.ops.gated_delta_rule.chunk.hopper import prepare_h
    from flash_qla.ops.utils import chunk_local_cumsum, group_reduce_vector
    from flash_qla.utils.index import prepare_varlen_metadata

    return QlaFunctions(
        l2norm_fwd=l2norm_fwd,
        l2norm_bwd=l2norm_bwd,
        cumsum=chunk_local_cumsum,
        solve=chunk.kkt_solve,
        forward=chunk.fused_gdr_fwd,
        states=chunk.fused_gdr_h,
        state_kernel=prepare_h.tilelang_prepare_h,
        entering=chunk.fused_gdr_dh,
        backward=chunk.fused_gdr_bwd,
        sum_heads=group_reduce_vector,
        prepare=prepare_varlen_metadata,
    )


@cache
def qla_missing() -> str | None:
    """Why its kernels cannot be called; None if they can."""
    if find_spec("flash_qla") is None:
        return "FlashQLA is not installed; pip install 'seqbraid[cuda,qla]'"
    if find_spec("fla") is None:
        return fla_missing()
    try:
        qla_functions()
    except Exception as error:  # it compiles and looks for tools while it is imported
        return f"FlashQLA cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None
