"""Deliberate defects of media training, each switched on for the length of a `with`; see `mutants.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ..data import pack as pack_module
from ..models import media_adapter as adapter_module
from ..models import towers as towers_module
from ..sequence_parallel import media as media_module
from .mutants import Mutant


def _positions_of_the_row() -> AbstractContextManager[Any]:
    """What a decoder makes up when it is given a packed row and no positions."""
    build = pack_module.build_row

    def wrong(*args: Any) -> Any:
        row = build(*args)
        counted = torch.arange(len(row.input_ids), dtype=row.positions.dtype)
        return replace(row, positions=counted.expand(4, -1))

    return patch.object(pack_module, "build_row", wrong)


def _deepstack_as_it_arrives() -> AbstractContextManager[Any]:
    """Embeddings are put in the order of their tokens, the levels of DeepStack stay as they came."""
    right = adapter_module.spread_features

    def wrong(features: Any, plan: Any, group: Any) -> Any:
        found = right(features, plan, group)
        width = found.shape[1] // 3  # the tiny models have two levels
        return torch.cat([found[:, :width], found[plan.order.argsort()][:, width:]], dim=1)

    return patch.object(adapter_module, "spread_features", wrong)


def _to_the_wrong_rank() -> AbstractContextManager[Any]:
    """Each rank gets as many features as it expects, but another's."""
    right = media_module.exchange_rows
    return patch.object(
        media_module, "exchange_rows", lambda x, plan, *rest: right(x.roll(len(x) // 2, 0), plan, *rest)
    )


def _gradient_lost() -> AbstractContextManager[Any]:
    right = adapter_module.spread_features
    return patch.object(
        adapter_module, "spread_features", lambda features, *rest: right(features.detach(), *rest)
    )


def _swapped() -> AbstractContextManager[Any]:
    """An image gets the features of a video of its size, and the other way round."""
    right = towers_module.Towers._see

    def wrong(self: Any, items: Any) -> Any:
        parts = list(right(self, items))
        for i, image in enumerate(items):
            for j, video in enumerate(items):
                kinds = [getattr(media.item, "kind", "") for media in (image, video)]
                if kinds == ["image", "video"] and len(parts[i]) == len(parts[j]):
                    parts[i], parts[j] = parts[j], parts[i]
        return parts

    return patch.object(towers_module.Towers, "_see", wrong)


def encoder_skipped() -> AbstractContextManager[Any]:
    """A rank without media does not pass through the towers; the others wait for it, or sum without it."""
    right = towers_module.Towers.features

    def wrong(self: Any, own: Any) -> Any:
        return right(self, own) if own else self._nothing()

    return patch.object(towers_module.Towers, "features", wrong)


MEDIA_MUTANTS: tuple[Mutant, ...] = (
    Mutant("3-D positions recomputed on the packed row", _positions_of_the_row, "qwen3_vl"),
    Mutant("DeepStack rows not re-indexed", _deepstack_as_it_arrives, "qwen3_vl", ring=2),
    Mutant("features sent to the wrong rank", _to_the_wrong_rank, "qwen3_vl", ring=2),
    Mutant("feature gradients lost", _gradient_lost, "qwen3_vl"),
    Mutant("image and video features swapped", _swapped, "qwen3_vl"),
)
