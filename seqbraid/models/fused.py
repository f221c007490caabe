"""Norms, rotations and gates of a decoder in one pass each, module by module, where a kernel is taken.

Attention calls its rotation by a name of its family's file. A module whose rotation we know gets the same
forward with another meaning of that name: the stock code runs as it is, and nothing of the process changes.
The norms of queries and keys are put off until the rotation, which does both in one pass.

Calls outside of a braided step, and tensors for which `torch` is chosen, go to the stock modules. Residual
additions stay with the stock layers, whose forward we would have to write anew for them; and the towers of
the media families have LayerNorm and GELU, which torch computes in one pass each (their attention and its
rotation: `tower_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.kernels import Kernels, Op
from ..ops.plain_rows import Norm, Rotation, plain_rows
from ..ops.rows import NORM, ROTARY, fused_rows
from ..ops.swiglu import SWIGLU, fused_swiglu
from ..ops.triton_status import RowsNeed
from . import recognise
from .recognise import NormKind, RotaryKind
from .running import running_step

PUT_OFF = ("q_norm", "k_norm")
"""What the families call the norms of queries and keys, in the order in which these are rotated."""


def takes_triton(op: Op, x: Tensor, kernels: Kernels) -> bool:
    """Whether the table has our kernel for these numbers."""
    return kernels.choose(op, RowsNeed(x.device, x.dtype)) == "triton"


@dataclass
class _Attention:
    """One call of an attention module: the norms that its rotation is to make up for."""

    norms: tuple[nn.Module, ...]
    takes: Callable[[Op, Tensor], bool]
    rows: Callable[..., Tensor] = fused_rows
    put_off: list[tuple[Tensor, Norm]] = field(default_factory=list)


_ATTENTION: ContextVar[_Attention | None] = ContextVar("the attention module that is called", default=None)


def fuse_parts(decoder: nn.Module) -> list[nn.Module]:
    """Replace the forward of the modules that we recognise, and give those; `unbind` undoes it."""
    found: list[nn.Module] = []
    kinds: dict[nn.Module, NormKind] = {}
    rotations: dict[Callable[..., Any], RotaryKind] = {}
    for module in decoder.modules():
        if "forward" in vars(module):
            continue
        kind = recognise.norm_kind(module)
        if kind is not None:
            kinds[module] = kind
            vars(module)["forward"] = partial(_norm, module, module.forward, kind)
        elif recognise.is_gated_mlp(module):
            vars(module)["forward"] = partial(_gated_mlp, module, module.forward)
        else:
            continue
        found.append(module)
    for module in decoder.modules():
        stock = None if "forward" in vars(module) else recognise.rotary_of(module)
        if stock is None:
            continue
        if stock not in rotations:
            rotations[stock] = recognise.rotary_kind(stock)
        if rotations[stock].full:
            forward = recognise.with_names(
                module, {recognise.ROTARY: partial(_rotate, stock, rotations[stock])}
            )
            norms = _norms_to_put_off(module, forward, kinds)
            vars(module)["forward"] = partial(_attention, module.forward, forward, norms)
            found.append(module)
    return found


def _norm(
    module: Any, stock: Callable[..., Tensor], kind: NormKind, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    weight, call = module.weight, _ATTENTION.get()
    given = (*args, *kwargs.values())
    step = running_step()
    takes = call.takes if call is not None else None if step is None else partial(_takes, step.kernels)
    fits = x.dtype == weight.dtype and x.shape[-1:] == weight.shape and len(given) == kind.gated
    if takes is None or not fits or not all(g.shape == x.shape and g.dtype == x.dtype for g in given):
        return stock(x, *args, **kwargs)
    if not takes(NORM, x):
        return stock(x, *args, **kwargs)
    norm = Norm(weight, kind.eps, kind.centre)
    rows = fused_rows
    if call is not None:
        rows = call.rows
        if module in call.norms and x.ndim == 4 and x.shape[0] == 1 and takes(ROTARY, x):
            call.put_off.append((x, norm))
            return x
    tokens = [
        x.squeeze(0) if x.ndim == 4 and x.shape[0] == 1 else x.reshape(-1, 1, x.shape[-1])
        for x in (x, *given)
    ]
    return rows(tokens[0], norm, None, *tokens[1:]).view(x.shape)


def _gated_mlp(module: Any, stock: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    step = running_step()
    if step is None or not _takes(step.kernels, SWIGLU, x):
        return stock(x)
    gate, up = module.gate_proj(x), module.up_proj(x)
    if gate.dtype != up.dtype or gate.dtype != x.dtype:
        return module.down_proj(module.act_fn(gate) * up)
    # What plain linear layers give is nobody else's.
    in_place = _is_plain(module.gate_proj) and _is_plain(module.up_proj)
    return module.down_proj(fused_swiglu(gate, up, in_place))


def _attention(
    stock: Callable[..., Any],
    forward: Callable[..., Any],
    norms: tuple[nn.Module, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    step = running_step()
    if step is None:
        return stock(*args, **kwargs)
    return _called(_Attention(norms, partial(_takes, step.kernels)), forward, *args, **kwargs)


def _called(call: _Attention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = _ATTENTION.set(call)
    try:
        out = forward(*args, **kwargs)
    finally:
        _ATTENTION.reset(before)
    if call.put_off:
        raise RuntimeError("attention did not rotate its queries and keys, whose norm waited for it")
    return out


def _rotate(
    stock: Callable[..., Any],
    kind: RotaryKind,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In the place of a family's own function."""
    call = _ATTENTION.get()
    if call is None:
        return stock(q, k, cos, sin, *args, **kwargs)
    waiting, call.put_off = call.put_off, []
    norms = _their_norms((q, k), waiting) if waiting else (None, None)
    plain = not args and not kwargs and all(x.ndim == 4 and x.shape[0] == 1 for x in (q, k))
    fits = plain and _turns(kind, q, k, cos, sin) and call.takes(ROTARY, q)
    if fits:
        turn = Rotation(cos[0], sin[0])
        pairs = zip((q, k), norms, strict=True)
        out = [call.rows(x.squeeze(0).transpose(0, 1), norm, turn) for x, norm in pairs]
        return tuple(x.transpose(0, 1)[None] for x in out)
    if waiting:
        q, k = (call.rows(x.squeeze(0), norm).transpose(0, 1)[None] for x, norm in waiting)
    return stock(q, k, cos, sin, *args, **kwargs)


def _turns(kind: RotaryKind, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel turns these as the family's function does."""
    width, turned = q.shape[-1], cos.shape[-1]
    known = turned == width or (kind.partial and turned < width)
    alike = {x.dtype for x in (q, k, cos, sin)} == {q.dtype} and not (cos.requires_grad or sin.requires_grad)
    shapes = cos.shape == sin.shape == (1, q.shape[2], turned) and k.shape[2:] == q.shape[2:]
    return known and turned % 2 == 0 and alike and shapes


def _their_norms(heads: tuple[Tensor, Tensor], waiting: list[tuple[Tensor, Norm]]) -> tuple[Norm, ...]:
    """The norms that wait for these queries and keys, to which nothing else may have happened."""
    for x, (given, _) in zip(heads, waiting, strict=True):
        rows = x[0].transpose(0, 1)
        same = rows.data_ptr() == given.data_ptr() and rows.shape == given.shape[1:]
        if not same or rows.stride() != given.stride()[1:]:
            raise RuntimeError("attention changed its queries or keys between their norm and their rotation")
    return tuple(norm for _, norm in waiting)


def _norms_to_put_off(
    module: nn.Module, forward: Any, kinds: dict[nn.Module, NormKind]
) -> tuple[nn.Module, ...]:
    """The norms of queries and keys, if nothing but their rotation comes after them: tried on a copy."""
    norms = tuple(norm for name in PUT_OFF if isinstance(norm := getattr(module, name, None), nn.Module))
    if len(norms) < len(PUT_OFF) or any(norm not in kinds or kinds[norm].gated for norm in norms):
        return ()
    try:
        copy, hidden, angles = _small_attention(module)
    except Exception:  # another kind of attention than those that we know to make small
        return ()
    own = tuple(copy._modules[name] for name in PUT_OFF)
    with torch.no_grad():
        try:
            wanted = type(module).forward(copy, hidden, position_embeddings=angles, attention_mask=None)[0]
        except Exception:  # likewise
            return ()
    for norm, stock in zip(own, norms, strict=True):
        vars(norm)["forward"] = partial(_norm, norm, norm.forward, kinds[stock])
    call = _Attention(own, lambda op, x: True, plain_rows)
    run = partial(forward.__func__, copy, hidden, position_embeddings=angles, attention_mask=None)
    return norms if recognise.agrees(lambda: _called(call, run)[0], wanted) else ()


def _small_attention(module: Any) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """A copy with small projections and one key head, hidden states for it, and cosines and sines."""
    copy, random = recognise.shell(module), torch.Generator().manual_seed(0)
    width, heads = module.head_dim, module.config.num_attention_heads
    query_heads = heads // module.config.num_key_value_heads
    queries = (
        query_heads * module.q_proj.out_features // heads
    )  # more than heads × width where it makes gates too
    sizes = {
        "q_proj": (8, queries),
        "k_proj": (8, width),
        "v_proj": (8, width),
        "o_proj": (query_heads * width, 8),
    }
    copy._modules = dict(module._modules)
    for name, size in sizes.items():
        copy._modules[name] = recognise.small_linear(*size, random)
    for name in PUT_OFF:
        norm = recognise.shell(getattr(module, name))
        own = recognise.random_numbers(random, *norm.weight.shape)
        norm._parameters = {"weight": nn.Parameter(own, requires_grad=False)}
        copy._modules[name] = norm
    copy.config, copy.training = recognise.EagerConfig(module.config), False
    hidden = recognise.random_numbers(random, 1, 3, 8)
    cos, sin = recognise.random_numbers(random, 2, 1, 3, width)
    return copy, hidden, (cos, sin)


def _takes(kernels: Kernels, op: Op, x: Tensor) -> bool:
    return takes_triton(op, x, kernels)


def _is_plain(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and not hooks and "forward" not in vars(layer)
