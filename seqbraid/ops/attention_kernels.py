"""The attention kernels of torch, each as a forward that gives LSE and a backward that takes the global out
and LSE.

Letters: B equal blocks, H query heads, G key/value heads, S rows of a block, T rows of several
blocks, D head size.

Dense kernels take blocks of one shape as `[B, H, S, D]`: flash on the CPU, cuDNN on CUDA for 16-bit numbers,
plain maths elsewhere. The varlen kernel (FlashAttention-2) takes blocks of any shapes one behind the other as
`[T, H, D]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class DenseShape(NamedTuple):
    """What a dense kernel must know beside its tensors."""

    causal: bool
    mask: Tensor | None
    """`[q, k]`, True where seen, for what `causal` does not say."""


def dense_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> tuple[Tensor, Tensor]:
    """Out `[B, H, S, D]` and LSE `[B, H, S]`."""
    if q.device.type == "cpu" and q.dtype != torch.float16:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *_alike(q, k, v), 0.0, shape.causal, attn_mask=_additive(shape.mask, q), scale=scale
        )
        return out[..., : v.shape[-1]], lse
    if uses_cudnn(q, v) and shape.mask is None:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, shape.causal, False, scale=scale
        )
        return out, lse.squeeze(-1)
    return math_forward(q, k, v, shape, scale)


def dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.device.type == "cpu" and q.dtype != torch.float16:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_alike(dout, q, k, v, out), lse, 0.0, shape.causal,
            attn_mask=_additive(shape.mask, q), scale=scale,
        )  # fmt: skip
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]
    if uses_cudnn(q, v) and shape.mask is None:
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, shape.causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    return math_backward(dout, q, k, v, out, lse, shape, scale)


def uses_cudnn(q: Tensor, v: Tensor) -> bool:
    """Whether cuDNN takes these heads: 16-bit numbers on a GPU, sizes that are multiples of 8."""
    sizes = (q.shape[-1], v.shape[-1])
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and all(d % 8 == 0 and d <= 256 for d in sizes)
    )


class VarlenShape(NamedTuple):
    """Boundaries of blocks that lie one behind the other; causal ones are aligned at their last
    query and key.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: int | None

    @property
    def sides(self) -> dict[str, int | None]:
        """The window as the kernel wants it: how many keys before the diagonal a query sees."""
        if self.window is None:
            return {"window_size_left": None, "window_size_right": None}
        return {"window_size_left": self.window - 1, "window_size_right": 0}


def uses_varlen(q: Tensor, v: Tensor) -> bool:
    """Whether the varlen kernel takes these heads."""
    return uses_cudnn(q, v) and q.shape[-1] == v.shape[-1]


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, shape: VarlenShape, scale: float, place: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Out `[T, H, D]` and LSE `[H, T]`; where to write is not asked for."""
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, shape.cu_q, shape.cu_k, shape.max_q, shape.max_k, 0.0, shape.causal, False,
        scale=scale, **shape.sides,
    )  # fmt: skip
    return out, lse


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: VarlenShape, scale: float,
    *places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; where to write is not asked for."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse, shape.cu_q, shape.cu_k, shape.max_q, shape.max_k, 0.0,
        shape.causal, unused, unused, scale=scale, **shape.sides,
    )  # fmt: skip
    return dq, dk, dv


def math_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> tuple[Tensor, Tensor]:
    """Out and LSE in plain maths, for what no kernel takes."""
    scores = _scores(q, k, shape, scale)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return (p @ _repeated(v, q).to(p.dtype)).to(v.dtype), lse


def math_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in plain maths."""
    p = (_scores(q, k, shape, scale) - lse[..., None]).exp().nan_to_num(0.0)
    wide = p.dtype
    delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (dout.to(wide) @ _repeated(v, q).to(wide).mT - delta) * scale
    groups = (q.shape[0], k.shape[1], -1, *k.shape[2:3])
    dq = ds @ _repeated(k, q).to(wide)
    dk = (ds.mT @ q.to(wide)).view(*groups, k.shape[-1]).sum(2)
    dv = (p.mT @ dout.to(wide)).view(*groups, v.shape[-1]).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, shape: DenseShape, scale: float) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ _repeated(k, q).to(wide).mT * scale
    mask = shape.mask
    if shape.causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Key and value heads of one size, which the CPU kernel wants: the smaller ones get zeros."""
    wide = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in tensors]


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)[None, None]
