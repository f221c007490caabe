"""Depthwise causal convolution over packed segments.

Shapes: T rows, C channels, W kernel width, N segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .boundaries import Boundaries, as_boundaries
from .fla_status import fla_missing, fla_wrong
from .kernels import DEFAULT, Candidate, Kernels, Op, needs_16_bits_on_a_gpu

TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}
"""Numbers that are widened at a time: what stays near the caches of a CPU, what fills a GPU."""


@dataclass(frozen=True)
class ConvPlan:
    """Where tokens and halos stand in the row that is convolved: W-1 halo rows before every segment."""

    start: int
    """First row of the input that belongs to a segment."""
    stop: int
    """One past the last row of the input that belongs to a segment."""
    num_rows: int
    """Rows of the convolved row."""
    token_rows_T: Tensor
    """Row of each token, in the order of the input."""
    halo_rows_N: Tensor
    """Rows of the halos, segment by segment."""

    @staticmethod
    @lru_cache(maxsize=16)
    def of(cu: tuple[int, ...], width: int, device: torch.device) -> ConvPlan:
        """The plan for these boundaries, shared by every layer that convolves them."""
        num_segments, halo = len(cu) - 1, width - 1
        lengths_N = torch.tensor(cu, dtype=torch.long).diff()
        segment_T = torch.repeat_interleave(torch.arange(num_segments), lengths_N)
        token_rows_T = torch.arange(cu[-1] - cu[0]) + (segment_T + 1) * halo
        first_N = torch.tensor(cu[:-1], dtype=torch.long) - cu[0] + torch.arange(num_segments) * halo
        halo_rows_N = (first_N[:, None] + torch.arange(halo)).flatten()
        # At least one window, so that a row without tokens still takes part in the graph.
        num_rows = max(cu[-1] - cu[0] + num_segments * halo, width)
        return ConvPlan(cu[0], cu[-1], num_rows, token_rows_T.to(device), halo_rows_N.to(device))


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    cu_seqlens: Boundaries,
    *,
    halo_NWC: Tensor | None = None,
    activation: str | None = "silu",
    kernels: Kernels = DEFAULT,
) -> Tensor:
    """Each channel of each segment convolved with its own causal kernel; nothing crosses a boundary.

    `halo_NWC` [N, W-1, C] holds the inputs that precede each segment, zeros when absent. Rows outside
    [cu[0], cu[-1]) are padding: 0 comes out, and no gradient goes back.
    """
    if x_TC.dim() != 2 or weight_CW.dim() != 2 or weight_CW.shape[0] != x_TC.shape[1]:
        raise ValueError(
            f"x {tuple(x_TC.shape)} and weight {tuple(weight_CW.shape)} do not fit; pass x [T, C] and "
            "weight [C, W]"
        )
    (num_tokens, channels), width = x_TC.shape, weight_CW.shape[1]
    cu = as_boundaries(cu_seqlens, num_tokens)
    if width < 1:
        raise ValueError(f"weight {tuple(weight_CW.shape)} has width 0; it must be at least 1")
    if bias_C is not None and bias_C.shape != (channels,):
        raise ValueError(f"bias {tuple(bias_C.shape)} must be [C] = [{channels}]")
    if halo_NWC is not None and halo_NWC.shape != (len(cu) - 1, width - 1, channels):
        raise ValueError(
            f"halo {tuple(halo_NWC.shape)} must be [N, W-1, C] = {[len(cu) - 1, width - 1, channels]}"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"activation {activation!r} is not known; use None or 'silu'")

    if _takes_fla(x_TC, weight_CW, kernels):
        return _by_fla(x_TC, weight_CW, bias_C, cu, halo_NWC, activation)
    plan = ConvPlan.of(cu, width, x_TC.device)
    row_TC = weight_CW.new_zeros(plan.num_rows, channels)
    row_TC = row_TC.index_copy(0, plan.token_rows_T, x_TC[plan.start : plan.stop].to(weight_CW.dtype))
    if halo_NWC is not None:
        row_TC = row_TC.index_copy(0, plan.halo_rows_N, halo_NWC.flatten(0, 1).to(weight_CW.dtype))
    windows_TC: Tensor = _Windows.apply(row_TC, weight_CW, bias_C)  # type: ignore[no-untyped-call]
    # The window that ends at a row is number row-(W-1).
    y_TC = windows_TC.index_select(0, plan.token_rows_T - (width - 1))
    if activation == "silu":
        y_TC = F.silu(y_TC)
    return F.pad(y_TC.to(x_TC.dtype), (0, 0, plan.start, num_tokens - plan.stop))


class ConvNeed(NamedTuple):
    """What a convolution is needed for."""

    device: torch.device
    dtype: torch.dtype
    width: int

    def __str__(self) -> str:
        return f"{self.dtype} of width {self.width} on {self.device}"


def _unfit(need: ConvNeed) -> str | None:
    if need.width < 2:
        return "its kernels need a width of at least 2"
    return needs_16_bits_on_a_gpu(need)


CONVOLUTION = Op(
    "convolution",
    (Candidate("fla", _unfit, fla_missing, lambda need: fla_wrong(need.device)), Candidate("torch")),
)


def _takes_fla(x_TC: Tensor, weight_CW: Tensor, kernels: Kernels) -> bool:
    """Whether flash-linear-attention's kernel takes these tensors."""
    if not len(x_TC) or x_TC.dtype != weight_CW.dtype:
        return False
    need = ConvNeed(x_TC.device, x_TC.dtype, weight_CW.shape[1])
    return kernels.choose(CONVOLUTION, need) == "fla"


@lru_cache(maxsize=16)
def _on_device(cu: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Boundaries from 0 on the device and on the host."""
    host = torch.tensor(cu) - cu[0]
    return host.to(device), host


def _by_fla(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    cu: tuple[int, ...],
    halo_NWC: Tensor | None,
    activation: str | None,
) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d  # late: it takes a while, and needs a GPU

    # Its state is the last W inputs, of which the first is not read any more.
    state_NCW = None if halo_NWC is None else F.pad(halo_NWC.to(x_TC.dtype).transpose(1, 2), (1, 0))
    on_device, on_host = _on_device(cu, x_TC.device)
    y_TC, _ = causal_conv1d(
        x_TC[None, cu[0] : cu[-1]],
        weight_CW,
        bias_C,
        initial_state=None if state_NCW is None else state_NCW.contiguous(),
        activation=activation,
        cu_seqlens=on_device,
        cu_seqlens_cpu=on_host,
    )
    y_TC, before, after = y_TC.squeeze(0), cu[0], len(x_TC) - cu[-1]
    return F.pad(y_TC, (0, 0, before, after)) if before + after else y_TC


class _Windows(torch.autograd.Function):
    """`y[t] = Σ_w weight[:, w] · row[t + w] + bias`, one multiply-add per tap: channels do not mix, so a
    library's convolution has nothing to gain. Summed in float32 at least, some rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, row_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_TC, weight_CW)
        ctx.has_bias = bias_C is not None
        wide, width = _wide(row_TC), weight_CW.shape[1]
        taps = weight_CW.to(wide).unbind(1)
        out = row_TC.new_empty(len(row_TC) - width + 1, row_TC.shape[1])
        for start, stop in _tiles(out):
            total = row_TC[start:stop] * taps[0]
            for w in range(1, width):
                total.addcmul_(row_TC[start + w : stop + w].to(wide), taps[w])
            out[start:stop] = total if bias_C is None else total.add_(bias_C)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TC: Tensor) -> tuple[Tensor | None, ...]:
        row_TC, weight_CW = ctx.saved_tensors
        wide, width = _wide(row_TC), weight_CW.shape[1]
        taps = weight_CW.to(wide).unbind(1)
        drow_TC, dweight_CW = torch.empty_like(row_TC), weight_CW.new_zeros(weight_CW.shape, dtype=wide)
        dbias_C = dout_TC.new_zeros(dout_TC.shape[1], dtype=wide)
        for start, stop in _tiles(row_TC):
            drow = row_TC.new_zeros(stop - start, row_TC.shape[1], dtype=wide)
            for w in range(width):
                # Window t reads row t + w.
                first, last = max(start - w, 0), min(stop - w, len(dout_TC))
                if first < last:
                    part = slice(first + w - start, last + w - start)
                    dout = dout_TC[first:last].to(wide)
                    drow[part].addcmul_(dout, taps[w])
                    dweight_CW[:, w] += (dout * row_TC[first + w : last + w]).sum(0)
                    if w == 0:
                        dbias_C += dout.sum(0)
            drow_TC[start:stop] = drow
        dbias = dbias_C.to(weight_CW.dtype) if ctx.has_bias else None
        return drow_TC, dweight_CW.to(weight_CW.dtype), dbias


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _tiles(x_TC: Tensor) -> list[tuple[int, int]]:
    """Runs of rows whose temporaries are small beside the whole."""
    elements = TILE_ELEMENTS.get(x_TC.device.type, TILE_ELEMENTS["cuda"])
    size = max(1, elements // max(x_TC.shape[1], 1))
    return [(start, min(start + size, len(x_TC))) for start in range(0, len(x_TC), size)]
