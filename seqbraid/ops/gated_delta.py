"""The gated delta rule over packed segments, computed chunk by chunk.

    S_t = exp(g_t) S_{t−1} + k_t u_tᵀ      u_t = β_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)      o_t = scale · S_tᵀ q_t

Inside a chunk entered with the state S, with G the running sum of g and D_ij = exp(G_i − G_j) for i ≥ j:

    N = diag(β) (K Kᵀ ∘ D), strictly lower     [U0 | W] = (I + N)⁻¹ [β V | β exp(G) K]      U = U0 − W S
    A = Q Kᵀ ∘ D      O = exp(G) Q S + A U     S' = exp(G_C) S + (exp(G_C − G) K)ᵀ U

Only S → S' is sequential; the rest is batched over the chunks of a tile. Backward keeps the inputs and the
states that enter tiles, computes a tile again and follows it back, with R = β (V − exp(G) K S) = (I + N) U:

    dU = Aᵀ dO + exp(G_C − G) K dS'            dS = exp(G_C) dS' + (exp(G) Q)ᵀ dO − Wᵀ dU
    dR = (I + N)⁻ᵀ dU                          dA = dO Uᵀ      dN = −dR Uᵀ      dV = β dR

Shapes: T rows, N segments, H heads (key heads of q and k, value heads of v, g and β), K key dim, V value dim,
B chunks of a tile, C tokens of a chunk, R value heads per key head. Tensors without a suffix are chunked:
[B, H, R, C, ...] with H key heads, and R = 1 for q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import solve_triangular, vecdot

from .boundaries import Boundaries, as_boundaries
from .chunk_plan import TILE_STEPS, ChunkPlan, Tile

# Elements of the largest tensor of a tile: what stays near the caches of a CPU, what fills a GPU.
_TILE_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


@dataclass(frozen=True)
class _Call:
    """What a call fixes besides its tensors, and how tensors go in and out of the plan's order."""

    plan: ChunkPlan
    chunk_size: int
    group: int
    scale: float
    qk_l2norm: bool
    dtype: torch.dtype

    def load(self, x: Tensor, tile: Tile, group: int) -> Tensor:
        """Rows of [T, H·R, ...] as new chunks [B, H, R, C, ...]; the zeros that fill them change no state."""
        rows = x.index_select(0, tile.rows)
        if tile.places is not None:
            filled = rows.new_zeros(tile.steps[-1].stop * self.chunk_size, *rows.shape[1:])
            rows = filled.index_copy_(0, tile.places, rows)
        chunks = rows.view(-1, self.chunk_size, x.shape[1] // group, group, *x.shape[2:])
        return chunks.movedim(1, 3).to(self.dtype).contiguous()

    def load_normed(self, x: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Queries or keys, and what they were multiplied by to get length 1."""
        chunks = self.load(x, tile, 1)
        if not self.qk_l2norm:
            return chunks, None
        factor = vecdot(chunks, chunks)[..., None].add_(1e-6).rsqrt_()
        return chunks.mul_(factor), factor

    def store(self, x: Tensor, tile: Tile, out: Tensor) -> None:
        """Write chunks [B, H, R, C, ...] to their rows of [T, H·R, ...]."""
        rows = x.movedim(3, 1).flatten(2, 3).flatten(0, 1).to(out.dtype)
        if tile.places is not None:
            rows = rows.index_select(0, tile.places)
        out.index_copy_(0, tile.rows, rows)

    def sort_states(self, states_NHKV: Tensor, segments: slice = slice(None)) -> Tensor:
        """States of the plan's `segments` as a new [N, H, R, K, V]."""
        states = states_NHKV.index_select(0, self.plan.order_N[segments]).to(self.dtype)
        num_segments, heads, key_dim, value_dim = states.shape
        return states.view(num_segments, heads // self.group, self.group, key_dim, value_dim)

    def unsort_states(self, states: Tensor) -> Tensor:
        """States of all segments back in the caller's order, [N, H·R, K, V]."""
        return torch.empty_like(states).index_copy_(0, self.plan.order_N, states).flatten(1, 2)


class _Chunks(NamedTuple):
    """What the chunks of a tile are before their states are known."""

    k: Tensor
    k_factor: Tensor | None
    v: Tensor
    beta: Tensor  # [B, H, R, C, 1]
    decay: Tensor  # D
    read: Tensor  # exp(G) [B, H, R, C, 1]: what is left of the entering state at a token
    write: Tensor  # exp(G_C − G) [B, H, R, C, 1]: what is left of a token at the end
    total: Tensor  # exp(G_C) [B, H, R, 1, 1]
    kk: Tensor  # K Kᵀ ∘ D, strictly lower
    n: Tensor
    u0: Tensor
    w: Tensor

    @staticmethod
    def load(call: _Call, tile: Tile, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Chunks:
        """The chunks of [T, ...] inputs."""
        k, k_factor = call.load_normed(k, tile)
        v, g, beta = (call.load(x, tile, call.group) for x in (v, g, beta[..., None]))
        # Summed in float64: a strong decay must not cost the digits of weak ones after it. The difference is
        # masked before exp, which would overflow above the diagonal.
        G = g.double().cumsum(-1)
        above = torch.ones(call.chunk_size, call.chunk_size, dtype=torch.bool, device=k.device).triu_(1)
        decay = (G[..., :, None] - G[..., None, :]).to(call.dtype).masked_fill_(above, float("-inf")).exp_()
        read = G.to(call.dtype).exp_()[..., None]
        kk = ((k @ k.mT) * decay).tril_(-1)
        n = kk * beta
        rhs = torch.cat([v * beta, k * (beta * read)], dim=-1)
        solved = solve_triangular(n, rhs, upper=False, unitriangular=True)
        u0, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        return _Chunks(
            k, k_factor, v, beta, decay, read, decay[..., -1, :, None], read[..., -1:, :], kk, n, u0, w
        )


def _batch(x: Tensor) -> Tensor:
    """A view with one batch dim, as the in-place batched products need it."""
    return x.view(-1, *x.shape[-2:])


def _chain(c: _Chunks, state: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Take `state` of the tile's segments through its steps, in place; the S and the U of every chunk."""
    entering = state.new_empty(c.k.shape[0], *state.shape[1:])
    u, k_write = torch.empty_like(c.v), c.k * c.write
    for step in tile.steps:
        s, u_step = _batch(state[: step.stop - step.start]), _batch(u[step])
        _batch(entering[step]).copy_(s)
        torch.baddbmm(_batch(c.u0[step]), _batch(c.w[step]), s, alpha=-1, out=u_step)
        s.mul_(_batch(c.total[step])).baddbmm_(_batch(k_write[step]).mT, u_step)
    return entering, u


def _chain_backward(c: _Chunks, du: Tensor, ds_read: Tensor, dstate: Tensor, tile: Tile) -> Tensor:
    """Take `dstate` back through the tile's steps and complete `du`, in place; the dS' of every chunk."""
    leaving, k_write = torch.empty_like(ds_read), c.k * c.write
    for step in reversed(tile.steps):
        ds, du_step = _batch(dstate[: step.stop - step.start]), _batch(du[step])
        _batch(leaving[step]).copy_(ds)
        du_step.baddbmm_(_batch(k_write[step]), ds)
        ds.mul_(_batch(c.total[step])).add_(_batch(ds_read[step]))
        ds.baddbmm_(_batch(c.w[step]).mT, du_step, alpha=-1)
    return leaving


def _l2norm_backward(normed: Tensor, factor: Tensor | None, grad: Tensor) -> Tensor:
    if factor is None:
        return grad
    return grad.addcmul(normed, vecdot(normed, grad)[..., None], value=-1).mul_(factor)


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor]:
        state = call.sort_states(initial)
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        kept = []
        with torch.autocast(v.device.type, enabled=False):
            for tile in call.plan.tiles:
                if not tile.starts_chain:
                    kept.append(state[tile.segments].clone())
                c = _Chunks.load(call, tile, k, v, g, beta)
                q_, _ = call.load_normed(q, tile)
                entering, u = _chain(c, state[tile.segments], tile)
                o = (q_ * c.read) @ entering
                o += ((q_ @ c.k.mT) * c.decay) @ u
                call.store(o.mul_(call.scale), tile, out)
        ctx.save_for_backward(q, k, v, g, beta, initial, *kept)
        ctx.call = call
        return out, call.unsort_states(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        # Asked for once: a checkpointed call computes them again when they are.
        saved = list(ctx.saved_tensors)
        inputs, initial, kept = saved[:5], saved[5], saved[6:]
        call: _Call = ctx.call
        dstate = call.sort_states(dfinal)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
        with torch.autocast(dout.device.type, enabled=False):
            for tile in reversed(call.plan.tiles):
                start = call.sort_states(initial, tile.segments) if tile.starts_chain else kept.pop().clone()
                chunk_grads = _tile_backward(call, tile, inputs, start, dout, dstate[tile.segments])
                for chunks, grad in zip(chunk_grads, grads, strict=True):
                    call.store(chunks, tile, grad)
        return *grads, call.unsort_states(dstate).to(initial.dtype), None


def _tile_backward(
    call: _Call, tile: Tile, inputs: list[Tensor], state: Tensor, dout: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tile's q, k, v, g and β from those of its outputs; `dstate` is taken back in place."""
    c = _Chunks.load(call, tile, *inputs[1:])
    q, q_factor = call.load_normed(inputs[0], tile)
    do = call.load(dout, tile, call.group).mul_(call.scale)
    entering, u = _chain(c, state, tile)
    a = (q @ c.k.mT) * c.decay
    du = a.mT @ do
    leaving = _chain_backward(c, du, (q * c.read).mT @ do, dstate, tile)
    dr = solve_triangular(c.n.mT, du, upper=True, unitriangular=True)

    # Each product of the forward, in the order read by q, read by k, written, inside the chunk.
    dq_read = (do @ entering.mT).mul_(c.read)
    dk_read = (dr @ entering.mT).mul_(c.read)
    dk_write = (u @ leaving.mT).mul_(c.write)
    da, dn = do @ u.mT, (dr @ u.mT).neg_()

    k_read = vecdot(dk_read, c.k)
    n_pair = dn * c.kk
    dbeta = vecdot(dr, c.v) - k_read + n_pair.sum(-1)

    # g_t scales whatever passes from before t to t or later. It is summed as such: a difference of running
    # sums over rows and columns gives it too, but cancels to noise under strong decay.
    earlier = torch.ones(call.chunk_size, call.chunk_size, dtype=call.dtype, device=q.device).triu_(1)
    pair = n_pair.mul_(c.beta).addcmul_(da, a)
    dg = (pair @ earlier).tril_().sum(-2)
    dg += (vecdot(dq_read, q) - k_read * c.beta[..., 0]) @ torch.ones_like(earlier).tril_()
    dg += vecdot(dk_write, c.k) @ earlier
    dg += (entering * leaving).sum((-2, -1))[..., None] * c.total[..., 0]

    # Key heads gather from the value heads that use them.
    dqk = da.mul_(c.decay).sum(2, keepdim=True)
    dkk = dn.mul_(c.decay).mul_(c.beta).sum(2, keepdim=True).tril_(-1)
    dq = dq_read.sum(2, keepdim=True) + dqk @ c.k
    dk = dk_write.sub_(dk_read.mul_(c.beta)).sum(2, keepdim=True) + dqk.mT @ q + (dkk + dkk.mT) @ c.k
    dv = dr * c.beta
    return _l2norm_backward(q, q_factor, dq), _l2norm_backward(c.k, c.k_factor, dk), dv, dg, dbeta


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int) -> None:
    if k.dim() != 3 or v.dim() != 3 or q.shape != k.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit; pass q and k [T, "
            "key heads, K] and v [T, value heads, V]"
        )
    if k.shape[0] != v.shape[0] or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has {k.shape[0]} rows of {k.shape[1]} heads, v {v.shape[0]} rows of {v.shape[1]} heads; "
            "give both as many rows, and v a multiple of k's heads"
        )
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(
            f"g {tuple(g.shape)} and beta {tuple(beta.shape)} must be [T, value heads] = {list(v.shape[:2])}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be 1 or more; 64 suits most shapes")


def _make_call(
    k: Tensor, v: Tensor, cu: tuple[int, ...], scale: float | None, qk_l2norm: bool, chunk_size: int
) -> _Call:
    key_dim, value_dim = k.shape[2], v.shape[2]
    largest = v.shape[1] * max(chunk_size, key_dim) * max(chunk_size, key_dim, value_dim)
    tile_elements = _TILE_ELEMENTS.get(v.device.type, _TILE_ELEMENTS["cuda"])
    tile_chunks = max(TILE_STEPS, tile_elements // max(largest, 1))
    return _Call(
        plan=ChunkPlan.of(cu, chunk_size, tile_chunks, v.device),
        chunk_size=chunk_size,
        group=v.shape[1] // k.shape[1],
        scale=key_dim**-0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
        dtype=torch.float64 if v.dtype == torch.float64 else torch.float32,
    )


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Boundaries,
    *,
    initial_state_NHKV: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The outputs and final states of all segments, each run from its own initial state (zeros when absent).

    Value head h uses key head h // (value heads / key heads); g is the log of the decay, at most 0. Computed
    in float64 when v is, else in float32; the outputs have v's dtype, the states the computation's. Rows
    outside [cu[0], cu[-1]) are padding: 0 comes out, and no gradient goes back.
    """
    _check_shapes(q_THK, k_THK, v_THV, g_TH, beta_TH, chunk_size)
    cu = as_boundaries(cu_seqlens, v_THV.shape[0])
    call = _make_call(k_THK, v_THV, cu, scale, qk_l2norm, chunk_size)
    state_shape = (len(cu) - 1, v_THV.shape[1], k_THK.shape[2], v_THV.shape[2])
    if initial_state_NHKV is None:
        initial_state_NHKV = v_THV.new_zeros(1, *state_shape[1:], dtype=call.dtype).expand(state_shape)
    elif initial_state_NHKV.shape != state_shape:
        raise ValueError(
            f"initial state {tuple(initial_state_NHKV.shape)} must be [N, value heads, K, V] = "
            f"{list(state_shape)}"
        )
    out_THV, final_state_NHKV = _GatedDelta.apply(  # type: ignore[no-untyped-call]
        q_THK, k_THK, v_THV, g_TH, beta_TH, initial_state_NHKV, call
    )
    return out_THV, final_state_NHKV


@torch.no_grad()
def segment_summary(
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Boundaries,
    *,
    qk_l2norm: bool = True,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """M [N, H, K, K] and S0 [N, H, K, V] with `final = M @ initial + S0` for every segment; no gradient.

    The rule treats the columns of the state alike and apart, so M is what becomes of the identity when no
    values are written.
    """
    _check_shapes(k_THK, k_THK, v_THV, g_TH, beta_TH, chunk_size)
    cu = as_boundaries(cu_seqlens, v_THV.shape[0])
    key_dim, value_dim = k_THK.shape[2], v_THV.shape[2]
    v_THV = F.pad(v_THV, (0, key_dim))
    call = _make_call(k_THK, v_THV, cu, None, qk_l2norm, chunk_size)
    start_KV = F.pad(torch.eye(key_dim, dtype=call.dtype, device=v_THV.device), (value_dim, 0))
    state = call.sort_states(start_KV.expand(len(cu) - 1, v_THV.shape[1], -1, -1))
    with torch.autocast(v_THV.device.type, enabled=False):
        for tile in call.plan.tiles:
            _chain(_Chunks.load(call, tile, k_THK, v_THV, g_TH, beta_TH), state[tile.segments], tile)
    final_state = call.unsort_states(state)
    return final_state[..., value_dim:], final_state[..., :value_dim]
