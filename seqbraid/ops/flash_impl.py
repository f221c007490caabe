"""FlashAttention-3 and -4, as transformers loads them, in place of torch's own kernels.

They take blocks of any lengths as fast as cuDNN takes dense ones, and prepare nothing for a new length. So
where one of the packages is installed, all blocks of 16-bit numbers go there. What they compute is looked at
before it is believed: a ring needs their LSE, and a backward that accepts an LSE which is not the block's
own. That is why their lower functions are called; those with a derivative of their own keep it to themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_kernels import (
    DenseShape,
    VarlenShape,
    math_backward,
    math_forward,
    varlen_backward,
    varlen_forward,
)
from .kernels import Candidate, Kernels, Op, needs_16_bits_on_a_gpu

TOLERANCE = 0.02
"""Relative error that 16-bit numbers explain; a dropped LSE gradient is off by 0.2 and more."""


class FlashImpl(NamedTuple):
    """A varlen kernel: forward and backward are called like torch's in `attention_kernels`.

    They may be given places for what they return, and need not use them.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


TORCH = FlashImpl("torch", varlen_forward, varlen_backward)
"""FlashAttention-2, which torch has inside; cuDNN is faster for long blocks."""


def names_flash_impl(attn_implementation: str | None) -> bool:
    """Whether this is a transformers name of FlashAttention-3 or -4."""
    bare = (attn_implementation or "").rpartition("/")[2].lower().replace("_", "-")
    return any(
        word in bare for word in ("flash-attention-3", "flash-attention-4", "flash-attn3", "flash-attn4")
    )


class AttentionNeed(NamedTuple):
    """What a kernel is made for; each is looked at by itself."""

    device: torch.device
    dtype: torch.dtype
    ratio: int
    """Query heads per key head."""
    size: int
    """Of a head."""
    windowed: bool

    def __str__(self) -> str:
        window = " with a window" if self.windowed else ""
        return f"{self.dtype} heads of {self.size}{window} on {self.device}"


def flash_impl(q_THD: Tensor, k_SGD: Tensor, windowed: bool, kernels: Kernels) -> FlashImpl:
    """What computes blocks of these heads, after a look at its results."""
    kind = AttentionNeed(
        q_THD.device, q_THD.dtype, q_THD.shape[1] // k_SGD.shape[1], q_THD.shape[2], windowed
    )
    name = kernels.choose(ATTENTION, kind)
    return TORCH if name == TORCH.name else _loaded(name)


def _candidate(name: str, is_installed: Callable[[], bool] | None = None) -> Candidate:
    """A package or a kernel of the Hub; where we know how, it is not loaded to see whether it is there."""

    def missing() -> str | None:
        if is_installed is not None and not is_installed():
            return f"{name} is not installed; pip install 'seqbraid[flash]', or flash-attn-3 on Hopper"
        try:
            _loaded(name)
        except ValueError as error:
            return str(error)
        return None

    return Candidate(name, needs_16_bits_on_a_gpu, missing, lambda kind: flaw(name, kind))


def _has_3() -> bool:
    from transformers.utils import is_flash_attn_3_available

    return bool(is_flash_attn_3_available())


def _has_4() -> bool:
    from transformers.utils import is_flash_attn_4_available

    return bool(is_flash_attn_4_available())


def _other(name: str) -> Candidate | None:
    """Kernels that transformers loads under other names, from the Hub."""
    return _candidate(name) if names_flash_impl(name) or "/" in name else None


ATTENTION = Op(
    "attention",
    (
        _candidate("flash_attention_4", _has_4),
        _candidate("flash_attention_3", _has_3),
        Candidate(TORCH.name),
    ),
    _other,
)


@cache
def flaw(name: str, kind: AttentionNeed) -> str | None:
    """What is wrong with the results of an implementation for such blocks; None if nothing is."""
    impl = _loaded(name)
    try:
        worst = _worst([block_error(impl, kind, *block) for block in BLOCKS])
    except Exception as error:
        return f"{name} does not take {kind} ({type(error).__name__}: {error})"
    if not worst <= TOLERANCE:
        return f"{name} is off by {worst:.3f} for {kind} (at most {TOLERANCE} is rounding); update it"
    return None


@cache
def _loaded(name: str) -> FlashImpl:
    """What transformers loads under this name."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    try:
        (_, varlen, *_), *_ = lazy_import_flash_attention(name)
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(
            f"{name!r} cannot be loaded ({type(error).__name__}: {error}); install flash-attn-4 or "
            "flash-attn-3, or use 'torch'"
        ) from error
    # Some kernels of the hub have no varlen function at all.
    module = sys.modules.get(getattr(varlen, "__module__", ""))
    for forward, backward, lower in (
        (_forward_4, _backward_4, ("_flash_attn_fwd", "_flash_attn_bwd")),
        (_forward_3, _backward_3, ("_flash_attn_forward", "_flash_attn_backward")),
    ):
        if all(hasattr(module, function) for function in lower):
            kernels = [getattr(module, function) for function in lower]
            return FlashImpl(name, partial(forward, kernels[0]), partial(backward, kernels[1]))
    raise ValueError(
        f"{name!r} has no forward that returns an LSE and no backward that takes one, as "
        "flash_attention_3 and flash_attention_4 have; use one of these, or 'torch'"
    )


def _bounds(shape: VarlenShape, scale: float) -> dict[str, Any]:
    """What both versions call by the same names."""
    return {
        "cu_seqlens_q": shape.cu_q,
        "cu_seqlens_k": shape.cu_k,
        "max_seqlen_q": shape.max_q,
        "max_seqlen_k": shape.max_k,
        "softmax_scale": scale,
    }


def _forward_4(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: VarlenShape,
    scale: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    found = kernel(
        q, k, v, causal=shape.causal, return_lse=True, out=place, **_bounds(shape, scale), **shape.sides
    )
    return found[0], found[1]


def _backward_4(
    kernel: Callable[..., Any],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    shape: VarlenShape,
    scale: float,
    *places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _written(places, (q, k, v))
    kernel(
        q, k, v, out, dout.contiguous(), lse, dq=dq, dk=dk, dv=dv, causal=shape.causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_bounds(shape, scale), **shape.sides,
    )  # fmt: skip
    return dq, dk, dv


def _forward_3(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: VarlenShape,
    scale: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    # An operator that says it writes to no argument must not be given a place to write to.
    found = kernel(q, k, v, causal=shape.causal, **_bounds(shape, scale), **_sides_3(shape))
    return found[0], found[1]


def _backward_3(
    kernel: Callable[..., Any],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    shape: VarlenShape,
    scale: float,
    *places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _written(places, (q, k, v))
    kernel(
        dout.contiguous(), q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=shape.causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_bounds(shape, scale), **_sides_3(shape),
    )  # fmt: skip
    return dq, dk, dv


def _written(places: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Where gradients of the inputs are written: to the places where such are given."""
    filled = [*places, *([None] * (len(inputs) - len(places)))]
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if place is None else place
        for x, place in zip(inputs, filled, strict=True)
    ]


def _sides_3(shape: VarlenShape) -> dict[str, int]:
    return {name: -1 if side is None else side for name, side in shape.sides.items()}


BLOCKS = ((True, 64, 64), (True, 40, 100), (False, 40, 100))
"""The blocks that are looked at: whether causal, queries, keys."""
WINDOW = 17
"""Of the blocks that are looked at, where there is one."""


def block_error(impl: FlashImpl, kind: AttentionNeed, causal: bool, queries: int, keys: int) -> float:
    """The largest relative error of two blocks' out, LSE and gradients, with an out and LSE of more
    keys than theirs.
    """
    device, dtype, ratio, size, windowed = kind
    generator = torch.Generator(device).manual_seed(0)
    heads = ((2 * ratio, queries), (2, keys), (2, keys), (2 * ratio, queries))
    q, k, v, dout = (
        torch.randn(2 * rows, h, size, device=device, dtype=dtype, generator=generator) for h, rows in heads
    )
    cu_q, cu_k = (torch.arange(3, device=device, dtype=torch.int32) * n for n in (queries, keys))
    shape = VarlenShape(cu_q, cu_k, queries, keys, causal, WINDOW if windowed and causal else None)
    wide_q, wide_k, wide_v, wide_dout = (
        x.unflatten(0, (2, -1)).transpose(1, 2).float() for x in (q, k, v, dout)
    )
    mask, scale = seen(shape), size**-0.5
    out, lse = impl.forward(q, k, v, shape, scale, torch.empty_like(q))
    wanted_out, wanted_lse = math_forward(wide_q, wide_k, wide_v, mask, scale)
    found: list[tuple[Tensor, Tensor]] = [
        (out, _packed(wanted_out)),
        (lse.T, wanted_lse.transpose(1, 2).flatten(0, 1)),
    ]
    # As if other keys had been seen as well.
    global_out, global_lse = 0.7 * wanted_out, wanted_lse + 0.2
    packed_lse = global_lse.transpose(0, 1).flatten(1).contiguous()
    packed_out = _packed(global_out).to(q.dtype)
    gradients = impl.backward(dout, q, k, v, packed_out, packed_lse, shape, scale)
    wanted = math_backward(wide_dout, wide_q, wide_k, wide_v, global_out, global_lse, mask, scale)
    found += [(a, _packed(b)) for a, b in zip(gradients, wanted, strict=True)]
    return _worst([float((a.float() - b).norm() / b.norm()) for a, b in found])


def _worst(errors: list[float]) -> float:
    """The largest; not a number if any is none, where Python's `max` would pass it over."""
    return float(torch.tensor(errors).max())


def seen(shape: VarlenShape) -> DenseShape:
    """Which keys a query of such a block sees, causal blocks being aligned at their ends."""
    queries, keys = (torch.arange(n, device=shape.cu_q.device) for n in (shape.max_q, shape.max_k))
    distance = queries[:, None] + (shape.max_k - shape.max_q) - keys
    mask = distance >= 0 if shape.causal else torch.ones_like(distance, dtype=torch.bool)
    return DenseShape(False, mask if shape.window is None else mask & (distance < shape.window))


def _packed(x_BHSD: Tensor) -> Tensor:
    return x_BHSD.transpose(1, 2).flatten(0, 1)
