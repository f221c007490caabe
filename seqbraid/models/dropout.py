"""Dropout that every mesh draws alike: what a token loses follows from the step's seed, the layer and the
token, not from a generator's state.

Letters: T slots of this rank, D channels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from .running import running_step


def is_active(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether a module would drop something now."""
    return isinstance(module, nn.Dropout) and module.training and module.p > 0


def braid_dropout(module: nn.Dropout, name: str) -> None:
    """Let calls within a braided step draw by token; others go to the stock forward."""
    vars(module)["forward"] = partial(_forward, module, module.forward, name)


def _forward(
    module: nn.Dropout,
    stock: Callable[[Tensor], Tensor],
    name: str,
    x: Tensor,
    keys_T: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Tensor parallel ranks may have some channels, those from `first` on, of other tokens than their own:
    those of the keys that are given.
    """
    step = running_step()
    if step is None or not is_active(module):
        return stock(x)
    keys_T = step.token_keys if keys_T is None else keys_T
    if step.seed is None or keys_T is None or x.ndim < 2 or x.shape[-2] != len(keys_T):
        raise ValueError(
            f"the dropout at {name!r} got a tensor of shape {tuple(x.shape)}, not one row per token "
            f"({(0 if keys_T is None else len(keys_T))}), so it cannot be drawn per token; set it to 0"
        )
    keep_TD = drawn(keys_T.to(x.device), x.shape[-1], step.seed, zlib.crc32(name.encode()), module.p, first)
    return torch.where(keep_TD, x / (1 - module.p), 0)


def drawn(keys_T: Tensor, channels: int, seed: int, layer: int, p: float, first: int = 0) -> Tensor:
    """`[T, D]`: whether each channel, from the `first` on, of each token is kept, which happens with
    probability 1 − p.
    """
    start = _mixed64(torch.tensor([seed, layer], device=keys_T.device)).unbind()
    rows_T = _mixed64(_mixed64(keys_T ^ start[0]) ^ start[1]).to(torch.int32)
    columns_D = _mixed64(torch.arange(first, first + channels, device=keys_T.device)).to(torch.int32)
    bits_TD = _mixed32(rows_T[:, None] + columns_D)
    # Bits are spread evenly over the numbers of 32 bits, of which a share p is below this one.
    return bits_TD >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def _mixed64(x: Tensor) -> Tensor:
    """Numbers of 64 bits, each bit of which depends on every bit of those given (products wrap around)."""
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * -0x2917014799A6026D
    x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * -0x61C8864680B583EB
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _mixed32(x: Tensor) -> Tensor:
    """The same for 32 bits."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
