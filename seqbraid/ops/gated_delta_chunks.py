"""The maths of the gated delta rule inside a chunk and along a chain of chunks, forward and backward.

Inside a chunk entered with the state S, with G the running sum of g and D_ij = exp(G_i − G_j) for i ≥ j:

    N = diag(β) (K Kᵀ ∘ D), strictly lower     [U0 | W] = (I + N)⁻¹ [β V | β exp(G) K]      U = U0 − W S
    A = Q Kᵀ ∘ D      O = exp(G) Q S + A U     S' = exp(G_C) S + (exp(G_C − G) K)ᵀ U

Only S → S' is sequential; the rest is batched over the chunks of a tile. Backward computes a tile again and
follows it back, with R = β (V − exp(G) K S) = (I + N) U:

    dU = Aᵀ dO + exp(G_C − G) K dS'            dS = exp(G_C) dS' + (exp(G) Q)ᵀ dO − Wᵀ dU
    dR = (I + N)⁻ᵀ dU                          dA = dO Uᵀ      dN = −dR Uᵀ      dV = β dR

Shapes: T rows, N segments, H heads (key heads of q and k, value heads of v, g and β), K key dim, V value dim,
B chunks of a tile, C tokens of a chunk, R value heads per key head. Tensors without a suffix are chunked:
[B, H, R, C, ...] with H key heads, and R = 1 for q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular, vecdot

from .chunk_plan import TILE_STEPS, ChunkPlan, Tile

# Elements of the largest tensor of a tile: what stays near the caches of a CPU, what fills a GPU.
TILE_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


@dataclass(frozen=True)
class Chunking:
    """How the rows of some segments become chunks, and how chunks and states go in and out of their order."""

    plan: ChunkPlan
    chunk_size: int
    group: int
    """Value heads per key head."""
    qk_l2norm: bool
    dtype: torch.dtype

    @staticmethod
    def of(
        segments: tuple[tuple[int, int], ...],
        k_THK: Tensor,
        v_THV: Tensor,
        state_columns: int,
        qk_l2norm: bool,
        chunk_size: int,
    ) -> Chunking:
        """The chunks of these (start, stop) rows, with tiles sized for states of so many columns."""
        num_heads, key_dim = v_THV.shape[1], k_THK.shape[2]
        largest = num_heads * max(chunk_size, key_dim) * max(chunk_size, key_dim, state_columns)
        elements = TILE_ELEMENTS.get(v_THV.device.type, TILE_ELEMENTS["cuda"])
        tile_chunks = max(TILE_STEPS, elements // max(largest, 1))
        return Chunking(
            plan=ChunkPlan.of(segments, chunk_size, tile_chunks, v_THV.device),
            chunk_size=chunk_size,
            group=num_heads // k_THK.shape[1],
            qk_l2norm=qk_l2norm,
            dtype=torch.float64 if v_THV.dtype == torch.float64 else torch.float32,
        )

    def load(self, x: Tensor, tile: Tile, group: int) -> Tensor:
        """Rows of [T, H·R, ...] as new chunks [B, H, R, C, ...]; the zeros that fill them change no state."""
        rows, num_chunks = x.index_select(0, tile.rows), tile.steps[-1].stop
        if tile.places is not None:
            filled = rows.new_zeros(num_chunks * self.chunk_size, *rows.shape[1:])
            rows = filled.index_copy_(0, tile.places, rows)
        chunks = rows.view(num_chunks, self.chunk_size, x.shape[1] // group, group, *x.shape[2:])
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


class Chunks(NamedTuple):
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
    def load(chunking: Chunking, tile: Tile, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunks:
        """The chunks of [T, ...] inputs."""
        k, k_factor = chunking.load_normed(k, tile)
        v, g, beta = (chunking.load(x, tile, chunking.group) for x in (v, g, beta[..., None]))
        # Summed in float64: a strong decay must not cost the digits of weak ones after it. The difference is
        # masked before exp, which would overflow above the diagonal.
        G, dtype, size = g.double().cumsum(-1), chunking.dtype, chunking.chunk_size
        above = torch.ones(size, size, dtype=torch.bool, device=k.device).triu_(1)
        decay = (G[..., :, None] - G[..., None, :]).to(dtype).masked_fill_(above, float("-inf")).exp_()
        read = G.to(dtype).exp_()[..., None]
        kk = ((k @ k.mT) * decay).tril_(-1)
        n = kk * beta
        rhs = torch.cat([v * beta, k * (beta * read)], dim=-1)
        solved = solve_triangular(n, rhs, upper=False, unitriangular=True)
        u0, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        return Chunks(
            k, k_factor, v, beta, decay, read, decay[..., -1, :, None], read[..., -1:, :], kk, n, u0, w
        )


def _batch(x: Tensor) -> Tensor:
    """A view with one batch dim, as the in-place batched products need it."""
    return x.view(-1, *x.shape[-2:])


def chain(c: Chunks, state: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Take `state` of the tile's segments through its steps, in place; the S and the U of every chunk."""
    entering = state.new_empty(c.k.shape[0], *state.shape[1:])
    u, k_write = c.u0.new_empty(c.u0.shape), c.k * c.write
    for step in tile.steps:
        s, u_step = _batch(state[: step.stop - step.start]), _batch(u[step])
        _batch(entering[step]).copy_(s)
        torch.baddbmm(_batch(c.u0[step]), _batch(c.w[step]), s, alpha=-1, out=u_step)
        s.mul_(_batch(c.total[step])).baddbmm_(_batch(k_write[step]).mT, u_step)
    return entering, u


def chain_backward(
    c: Chunks, q: Tensor, a: Tensor, do: Tensor, dstate: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Take `dstate` back through the tile's steps, in place; the dU and the dS' of every chunk."""
    du, ds_read = a.mT @ do, (q * c.read).mT @ do
    leaving, k_write = torch.empty_like(ds_read), c.k * c.write
    for step in reversed(tile.steps):
        ds, du_step = _batch(dstate[: step.stop - step.start]), _batch(du[step])
        _batch(leaving[step]).copy_(ds)
        du_step.baddbmm_(_batch(k_write[step]), ds)
        ds.mul_(_batch(c.total[step])).add_(_batch(ds_read[step]))
        ds.baddbmm_(_batch(c.w[step]).mT, du_step, alpha=-1)
    return du, leaving


def tile_backward(
    c: Chunks, q: Tensor, q_factor: Tensor | None, do: Tensor, state: Tensor, dstate: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tile's q, k, v, g and β from those of its outputs; `dstate` is taken back in place."""
    entering, u = chain(c, state, tile)
    a = (q @ c.k.mT) * c.decay
    du, leaving = chain_backward(c, q, a, do, dstate, tile)
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
    earlier = torch.ones_like(c.decay[0, 0, 0]).triu_(1)
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


def _l2norm_backward(normed: Tensor, factor: Tensor | None, grad: Tensor) -> Tensor:
    if factor is None:
        return grad
    return grad.addcmul(normed, vecdot(normed, grad)[..., None], value=-1).mul_(factor)
