# mypy: ignore-errors
"""What becomes of a state over a segment, without the outputs: the two reductions that state passing needs.

Both take segments apart into *pieces* that run side by side, one program per piece, value head and block of
state columns. Letters: T rows, P pieces, G key heads, H value heads, K key dim, V value dim, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SUMMARY, ENTERING = (128, 4, 2), (64, 4, 3)
"""Columns of the state per program, warps and pipeline stages of each kernel, as measured on an H200."""

CHUNK = 64
"""Tokens of a chunk, as the kernels that make w and u have it."""


@triton.jit
def _summary_kernel(
    k_ptr, w_ptr, u_ptr, g_ptr, start_ptr, stop_ptr, out_ptr,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns of [S0 | M]: zeros run with the values written, or the identity run with none."""
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(start_ptr + piece), tl.load(stop_ptr + piece)
    key = tl.arange(0, KEYS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    # S0's blocks come first; V is a multiple of COLUMNS.
    state = tl.where((key[:, None] == column[None, :] - V) & (column[None, :] >= V), 1.0, 0.0)
    writes = block * COLUMNS < V
    for first in range(start, stop, CHUNK):
        row = first + tl.arange(0, CHUNK)
        real = row < stop
        mask = real[:, None] & (key[None, :] < K)
        w = tl.load(w_ptr + (row[:, None] * H + head) * K + key[None, :], mask=mask, other=0.0)
        k = tl.load(k_ptr + (row[:, None] * G + head // (H // G)) * K + key[None, :], mask=mask, other=0.0)
        g = tl.load(g_ptr + row * H + head, mask=real, other=0.0)
        g_last = tl.load(g_ptr + (tl.minimum(first + CHUNK, stop) - 1) * H + head)
        u = -tl.dot(w, state.to(w.dtype))
        if writes:
            place = u_ptr + (row[:, None] * H + head) * V + column[None, :]
            u += tl.load(place, mask=real[:, None], other=0.0).to(tl.float32)
        u *= tl.where(real, tl.exp2(g_last - g), 0.0)[:, None]
        state = state * tl.exp2(g_last) + tl.dot(tl.trans(k), u.to(k.dtype))
    place = out_ptr + ((piece * H + head) * K + key[:, None]) * (V + K) + column[None, :]
    tl.store(place, state, mask=(key[:, None] < K) & (column[None, :] < V + K))


@triton.jit
def _entering_gradient_kernel(
    q_ptr, k_ptr, w_ptr, g_ptr, do_ptr, du_ptr, start_ptr, stop_ptr, out_ptr, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns of dS_in where dS_out = 0, chunk after chunk from the last to the first."""
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(start_ptr + piece), tl.load(stop_ptr + piece)
    key = tl.arange(0, KEYS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    ds = tl.zeros([KEYS, COLUMNS], dtype=tl.float32)
    for i in range(tl.cdiv(stop - start, CHUNK)):
        first = start + (tl.cdiv(stop - start, CHUNK) - 1 - i) * CHUNK
        row = first + tl.arange(0, CHUNK)
        real = row < stop
        mask = real[:, None] & (key[None, :] < K)
        key_place = (row[:, None] * G + head // (H // G)) * K + key[None, :]
        q = tl.load(q_ptr + key_place, mask=mask, other=0.0)
        k = tl.load(k_ptr + key_place, mask=mask, other=0.0)
        w = tl.load(w_ptr + (row[:, None] * H + head) * K + key[None, :], mask=mask, other=0.0)
        g = tl.load(g_ptr + row * H + head, mask=real, other=0.0)
        g_last = tl.load(g_ptr + (tl.minimum(first + CHUNK, stop) - 1) * H + head)
        value_place = (row[:, None] * H + head) * V + column[None, :]
        do = tl.load(do_ptr + value_place, mask=real[:, None], other=0.0)
        du = tl.load(du_ptr + value_place, mask=real[:, None], other=0.0).to(tl.float32)
        du += tl.dot(k, ds.to(k.dtype)) * tl.where(real, tl.exp2(g_last - g), 0.0)[:, None]
        q = (q * (tl.exp2(g) * scale)[:, None]).to(q.dtype)
        ds = ds * tl.exp2(g_last) + tl.dot(tl.trans(q), do.to(q.dtype)) - tl.dot(tl.trans(w), du.to(w.dtype))
    place = out_ptr + ((piece * H + head) * K + key[:, None]) * V + column[None, :]
    tl.store(place, ds, mask=key[:, None] < K)


def piece_summaries(
    k_TGK: Tensor, w_THK: Tensor, u_THV: Tensor, g_TH: Tensor, start_P: Tensor, stop_P: Tensor
) -> tuple[Tensor, Tensor]:
    """M [P, H, K, K] and S0 [P, H, K, V] in float32, from what the rule's own kernels made of the inputs.

    `g` is summed inside each chunk, to base 2.
    """
    (_, G, K), (_, H, V) = k_TGK.shape, u_THV.shape
    columns, warps, stages = _config(SUMMARY, K, V)
    out = k_TGK.new_empty(len(start_P), H, K, V + K, dtype=torch.float32)
    _summary_kernel[((V + K) // columns, H, len(start_P))](
        k_TGK, w_THK, u_THV, g_TH, start_P, stop_P, out,
        G, H, K, V, CHUNK, triton.next_power_of_2(K), columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    S0, M = out.split([V, K], dim=-1)
    return M, S0


def piece_entering_gradients(
    q_TGK: Tensor,
    k_TGK: Tensor,
    w_THK: Tensor,
    g_TH: Tensor,
    do_THV: Tensor,
    du_THV: Tensor,
    start_P: Tensor,
    stop_P: Tensor,
    scale: float,
) -> Tensor:
    """dS_in [P, H, K, V] in float32 where nothing enters from behind; `du` is what the outputs gave u."""
    (_, G, K), (_, H, V) = k_TGK.shape, do_THV.shape
    columns, warps, stages = _config(ENTERING, V, V)
    out = k_TGK.new_empty(len(start_P), H, K, V, dtype=torch.float32)
    _entering_gradient_kernel[(V // columns, H, len(start_P))](
        q_TGK, k_TGK, w_THK, g_TH, do_THV, du_THV, start_P, stop_P, out, scale,
        G, H, K, V, CHUNK, triton.next_power_of_2(K), columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _config(config: tuple[int, int, int], K: int, V: int) -> tuple[int, int, int]:
    """Columns of a program, which divide V and V + K, and how it is compiled."""
    columns = next(n for n in (128, 64, 32, 16) if n <= config[0] and V % n == 0 and K % n == 0)
    return columns, *config[1:]
