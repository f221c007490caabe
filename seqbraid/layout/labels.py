"""The label mask of a sample: which tokens the loss covers, and what predicts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""The label of a token that the loss does not cover, as transformers and torch have it."""


def targets_of(labels_T: Tensor) -> Tensor:
    """What each token is to predict: the label of the next one, and nothing for the last of the sample.

    >>> import torch
    >>> targets_of(torch.tensor([5, -100, 7])).tolist()
    [-100, 7, -100]
    """
    targets_T = labels_T.roll(-1)
    targets_T[-1] = IGNORE
    return targets_T


def mtp_targets_of(labels_T: Tensor, depths: int) -> Tensor:
    """`[K, T]`: what each token is to predict at each depth of multi-token prediction, the label of the token
    `k + 1` places on in its sample.

    >>> import torch
    >>> mtp_targets_of(torch.tensor([5, -100, 7, 8]), 2).tolist()
    [[7, 8, -100, -100], [8, -100, -100, -100]]
    """
    return ahead_of(targets_of(labels_T), depths, IGNORE)


def ahead_of(values_T: Tensor, depths: int, fill: int = 0) -> Tensor:
    """`[K, T]`: what stands 1 to K places on in a sample, and `fill` behind its end."""
    found_KT = values_T.new_full((depths, len(values_T)), fill)
    for depth, row_T in enumerate(found_KT, start=1):
        row_T[: max(0, len(values_T) - depth)] = values_T[depth:]
    return found_KT


def num_targets(labels_T: Tensor) -> int:
    """How many tokens of a sample the loss covers: the first one has none before it that could predict it.

    >>> import torch
    >>> num_targets(torch.tensor([5, -100, 7]))
    1
    """
    return int((labels_T[1:] != IGNORE).sum())
