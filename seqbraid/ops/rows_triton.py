# mypy: ignore-errors
"""`plain_rows.py` as Triton kernels: a program has whole rows, so each is read once and written once.

Letters: N rows, each a head of a token (H heads a token; 1 where a row is a token), D its width, R the
columns that are turned; P programs. Everything in between is float32. A row's inverse norm is computed again
in the backward, where the row is at hand. The weight's gradient is summed by programs that take every P-th
tile of rows, and then over the P of them: in the same order each time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plain_rows import Norm, Rotation

TILE = 2048
"""Numbers that a program has at a time where rows are shorter."""


@triton.jit
def _rows_of(x, index, H: tl.constexpr, stride_token, stride_head):
    """Where rows start."""
    return x + (index // H) * stride_token + (index % H) * stride_head


@triton.jit
def _partner(column, R: tl.constexpr):
    """The column that each is turned with, and whether it is in the first half."""
    first = column < R // 2
    return tl.where(first, column + R // 2, tl.where(column < R, column - R // 2, column)), first


@triton.jit
def _angles(cos, sin, token, column, rows, R: tl.constexpr):
    """Of these rows and columns; those that are not turned stay as they are."""
    turned = rows & (column < R)[None, :]
    at = token[:, None] * R + column[None, :]
    return (
        tl.load(cos + at, mask=turned, other=1.0).to(tl.float32),
        tl.load(sin + at, mask=turned, other=0.0).to(tl.float32),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rows_forward_kernel(
    x, weight, gate, cos, sin, y, num_rows, stride_token, stride_head,
    gate_stride_token, gate_stride_head, eps,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, CENTRE: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    rows = (index < num_rows)[:, None]
    inside = rows & (column < D)[None, :]
    start = _rows_of(x, index, H, stride_token, stride_head)[:, None]
    n = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = 1.0 / tl.sqrt_rn(tl.sum(n * n, axis=1) / D + eps)
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + CENTRE
        n = n * inverse[:, None] * w[None, :]
    if R > 0:
        other, first = _partner(column, R)
        m = tl.load(start + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            v = tl.load(weight + other, mask=column < D, other=0.0).to(tl.float32) + CENTRE
            m = m * inverse[:, None] * v[None, :]
        c, s = _angles(cos, sin, index // H, column, rows, R)
        n = n * c + tl.where(first[None, :], -m, m) * s
    if GATE:
        asked = _rows_of(gate, index, H, gate_stride_token, gate_stride_head)[:, None]
        z = tl.load(asked + column[None, :], mask=inside, other=0.0).to(tl.float32)
        n = n * z * tl.sigmoid(z)
    tl.store(y + index[:, None] * D + column[None, :], n, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _rows_backward_kernel(
    dy, x, weight, gate, cos, sin, dx, dgate, dweight, num_rows, num_tiles, stride_token, stride_head,
    dy_stride_token, dy_stride_head, gate_stride_token, gate_stride_head, eps,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, CENTRE: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for tile in range(num_tiles):
        block = (tl.program_id(0) + tile * tl.num_programs(0)).to(tl.int64)
        index = block * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = (index < num_rows)[:, None]
        inside = rows & (column < D)[None, :]
        here = index[:, None] * D + column[None, :]
        given = _rows_of(dy, index, H, dy_stride_token, dy_stride_head)[:, None]
        dn = tl.load(given + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if R > 0:
            # y = n·cos ∓ partner·sin: the partner's sine has the other sign here.
            other, first = _partner(column, R)
            dm = tl.load(given + other[None, :], mask=inside, other=0.0).to(tl.float32)
            c, _ = _angles(cos, sin, index // H, column, rows, R)
            turned = rows & (column < R)[None, :]
            s = tl.load(sin + (index // H)[:, None] * R + other[None, :], mask=turned, other=0.0).to(
                tl.float32
            )
            dn = dn * c + tl.where(first[None, :], dm, -dm) * s
        if NORM:
            start = _rows_of(x, index, H, stride_token, stride_head)[:, None]
            n = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
            inverse = (1.0 / tl.sqrt_rn(tl.sum(n * n, axis=1) / D + eps))[:, None]
            n = n * inverse
            w = (tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + CENTRE)[None, :]
            if GATE:
                asked = _rows_of(gate, index, H, gate_stride_token, gate_stride_head)[:, None]
                z = tl.load(asked + column[None, :], mask=inside, other=0.0).to(tl.float32)
                p = tl.sigmoid(z)
                tl.store(dgate + here, dn * n * w * (p + z * p * (1.0 - p)), mask=inside)
                dn = dn * z * p
            total += dn * n
            dn = dn * w
            dn = inverse * (dn - n * (tl.sum(dn * n, axis=1) / D)[:, None])
        tl.store(dx + here, dn, mask=inside)
    if NORM:
        sums = dweight + tl.program_id(0) * D + column
        tl.store(sums, tl.sum(total, axis=0), mask=column < D)


def forward(x_THD: Tensor, norm: Norm | None, turn: Rotation | None, gate_THD: Tensor | None) -> Tensor:
    """As `plain_rows`; the numbers of a row lie side by side, and the others have no gaps."""
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    sizes = _sizes(x_THD, norm, turn, gate_THD)
    rows = x_THD.shape[0] * x_THD.shape[1]
    gate = x_THD if gate_THD is None else gate_THD
    if rows:
        with torch.cuda.device(x_THD.device):
            _rows_forward_kernel[(triton.cdiv(rows, sizes["BLOCK_N"]),)](
                x_THD, norm.weight_D if norm else x_THD, gate, *(turn or (x_THD, x_THD)), y_THD, rows,
                *x_THD.stride()[:2], *gate.stride()[:2], norm.eps if norm else 0.0, **sizes,
            )  # fmt: skip
    return y_THD


def backward(
    dy_THD: Tensor, x_THD: Tensor | None, norm: Norm | None, turn: Rotation | None, gate_THD: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the rows, of the norm's weight in float32, and of the gate; a norm needs the rows."""
    x = dy_THD if x_THD is None else x_THD
    gate = x if gate_THD is None else gate_THD
    dx_THD = torch.empty(dy_THD.shape, dtype=dy_THD.dtype, device=dy_THD.device)
    dgate_THD = None if gate_THD is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    sizes = _sizes(dy_THD, norm, turn, gate_THD)
    rows = dy_THD.shape[0] * dy_THD.shape[1]
    programs = tiles = triton.cdiv(rows, sizes["BLOCK_N"])
    if norm:
        programs = min(tiles, _programs(dy_THD.device, sizes["BLOCK_D"]))
    sums_PD = torch.empty(programs if norm else 0, sizes["D"], dtype=torch.float32, device=dy_THD.device)
    if rows:
        with torch.cuda.device(dy_THD.device):
            _rows_backward_kernel[(programs,)](
                dy_THD, x, norm.weight_D if norm else x, gate, *(turn or (x, x)), dx_THD,
                dx_THD if dgate_THD is None else dgate_THD, sums_PD, rows,
                triton.cdiv(tiles, programs), *x.stride()[:2], *dy_THD.stride()[:2], *gate.stride()[:2],
                norm.eps if norm else 0.0, **sizes,
            )  # fmt: skip
    return dx_THD, sums_PD.sum(0) if norm else None, dgate_THD


def _sizes(
    x_THD: Tensor, norm: Norm | None, turn: Rotation | None, gate_THD: Tensor | None
) -> dict[str, Any]:
    turned = 0 if turn is None else turn.cos_TR.shape[1]
    return sizes_of(*x_THD.shape[1:], turned, norm and norm.centre, gate_THD is not None)


def sizes_of(heads: int, width: int, turned: int, centre: float | None, gated: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    block = triton.next_power_of_2(width)
    return {
        "H": heads, "D": width, "R": turned, "CENTRE": centre or 0.0, "NORM": centre is not None,
        "GATE": gated, "BLOCK_N": max(1, TILE // block), "BLOCK_D": block,
        "num_warps": 4 if block <= TILE else min(16, block // 512),
    }  # fmt: skip


@cache
def _programs(device: torch.device, block: int) -> int:
    """How many sums over rows are made side by side: enough to fill a GPU, few enough to be added up."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    )
    return processors * (16 if block <= 1024 else 4)
