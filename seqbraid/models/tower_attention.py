"""Attention of media towers: the frames of all pictures, or the windows of all clips, in one call a layer.

Stock towers that are not given FlashAttention cut their rows where they are told to, call attention for each
part, and wait for the GPU in every layer to hear where that is. Here the same forward runs with another
meaning of the names by which it asks for attention (and for its rotation), as in `fused.py`: it is told
that there is FlashAttention, which takes the boundaries as they are, and gets ours. A tower is read from the
GPU once per call. Modules for which a trial on small numbers finds anything else stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.group import Group
from ..ops.attention_kernels import uses_varlen
from ..ops.blocks import BlockPlan
from ..ops.boundaries import as_boundaries
from ..ops.kernels import DEFAULT, Kernels
from ..ops.plain_rows import Rotation, plain_rows
from ..ops.rows import ROTARY, fused_rows
from ..sequence_parallel.ring import ring_attention
from ..sequence_parallel.ring_plan import RingPlan
from . import fused, recognise

ASKS = ("ALL_ATTENTION_FUNCTIONS", "is_flash_attention_requested")
"""Names of transformers by which an attention module that knows boundaries asks for its kernel."""

LONGEST = "get_max_seqlen"
"""What newer releases ask for the longest part, and wait for."""

TURNS = "apply_rotary_pos_emb_vision"


@dataclass
class TowerKernels:
    """The kernels that towers run on: those of the model, from its first step on."""

    kernels: Kernels = DEFAULT

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        """In the place of transformers' registry."""
        return partial(_attend, self)


def pack_towers(towers: Iterable[nn.Module], found_by: TowerKernels) -> list[nn.Module]:
    """Replace the forward of the attention modules that we recognise, and give those; `unbind` undoes it."""
    bound = []
    for module in (module for tower in towers for module in tower.modules()):
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        if not all(name in forward.__code__.co_names for name in ASKS):
            continue
        names = {ASKS[0]: found_by, ASKS[1]: lambda *_, **__: True, LONGEST: lambda *_, **__: None}
        turn = forward.__globals__.get(TURNS)
        if callable(turn) and _turns_halves(turn):
            names[TURNS] = partial(_rotate, turn, found_by)
        ours = recognise.with_names(module, names)
        if _is_the_same(module, ours):
            vars(module)["forward"] = ours
            bound.append(module)
    return bound


def _attend(
    found_by: TowerKernels,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Inside each part, all rows see all: `[1, H, T, D]` in, `[1, T, H, D]` out."""
    if dropout or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} of a tower uses attention dropout {dropout} or a mask of its own; only "
            "attention_dropout=0 is supported"
        )
    plan = _plan(cu_seq_lens_q, query.shape[2])
    if not _has_kernel(query, value):  # plain maths would hold the scores of all parts at once
        cut = [[x[:, :, b.q_start : b.q_stop] for x in (query, key, value)] for b in plan.local.blocks]
        outs = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in cut]
        return torch.cat(outs, dim=2).transpose(1, 2), None
    q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return ring_attention(q_THD, k_THD, v_THD, plan, Group(), scaling, kernels=found_by.kernels)[None], None


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    return not query.is_cuda or uses_varlen(query, value)


_PLANS = WeakIdKeyDictionary()
"""By the boundaries' tensor, which all layers of a tower's call are given; with the version that was read,
and for how many rows."""


def _plan(cu_seqlens: Tensor, num_rows: int) -> RingPlan:
    # Whoever calls a tower himself may write the next boundaries into the same tensor, and those of inference
    # mode do not tell.
    read = None if cu_seqlens.is_inference() else (cu_seqlens._version, num_rows)
    known = _PLANS.get(cu_seqlens)
    if known is not None and known[0] == read:
        found: RingPlan = known[1]
        return found
    bounds = as_boundaries(cu_seqlens.tolist(), num_rows)
    if (bounds[0], bounds[-1]) != (0, num_rows):
        raise ValueError(
            f"cu_seqlens {list(bounds)} of a tower leaves some of its {num_rows} rows out; pass "
            f"boundaries from 0 to {num_rows}"
        )
    plan = RingPlan(BlockPlan.whole([part for part in pairwise(bounds) if part[0] < part[1]]))
    if read is not None:
        _PLANS[cu_seqlens] = (read, plan)
    return plan


def _rotate(
    stock: Callable[..., Any], found_by: TowerKernels, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> Any:
    """In the place of a family's own function, `[T, H, D]`."""
    angles = cos.shape == sin.shape == (q.shape[0], q.shape[-1]) and not cos.requires_grad
    fits = angles and q.ndim == k.ndim == 3 and q.dtype == k.dtype and q.shape[-1] % 2 == 0
    if not fits or not fused.takes_triton(ROTARY, q, found_by.kernels):
        return stock(q, k, cos, sin)
    return tuple(fused_rows(x, None, Rotation(cos, sin)) for x in (q, k))


@cache
def _turns_halves(function: Callable[..., Any]) -> bool:
    """Whether a family's rotation turns half of a head against the other half."""
    random = torch.Generator().manual_seed(0)
    q, k = (recognise.random_numbers(random, 3, 2, 16) for _ in range(2))
    cos, sin = recognise.random_numbers(random, 2, 3, 16)
    wanted = torch.stack([plain_rows(x, None, Rotation(cos, sin)) for x in (q, k)])
    return recognise.agrees(lambda: torch.stack(function(q, k, cos, sin)), wanted)


def _is_the_same(module: Any, ours: Any) -> bool:
    """Whether a copy of the module with random weights gives the same in our way and in its own."""
    copy, random = recognise.shell(module), torch.Generator().manual_seed(0)
    try:
        sizes = {name: (part.in_features, part.out_features) for name, part in module.named_children()}
        copy._modules = {name: recognise.small_linear(*size, random) for name, size in sizes.items()}
        copy.config, copy.training = recognise.EagerConfig(module.config), False
        given: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 3, 4, 9], device="cpu", dtype=torch.int32)}
        if TURNS in type(module).forward.__code__.co_names:
            angles = recognise.random_numbers(random, 2, 9, module.head_dim)
            given["position_embeddings"] = tuple(angles)
        hidden = recognise.random_numbers(random, 9, next(iter(sizes.values()))[0])
        with torch.no_grad():
            wanted = type(module).forward(copy, hidden, **given)
    except Exception:  # another kind of attention than those that we know to make small
        return False
    return recognise.agrees(lambda: ours.__func__(copy, hidden, **given), wanted)
