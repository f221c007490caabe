"""Deliberate defects of multi-token prediction, each switched on for the length of a `with` (`mutants.py`).
Their models have depth 2.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from ..data import pack as pack_module
from ..layout.labels import IGNORE
from ..models import adapter as adapter_module
from ..models import step_loss as loss_module
from ..models.mtp_module import MtpModule
from .mutants import Mutant


def _other_way_round() -> AbstractContextManager[Any]:
    """Hidden states first, embeddings behind them."""
    right = MtpModule.joined
    return patch.object(
        MtpModule, "joined", lambda *args: torch.cat(right(*args).chunk(2, dim=-1)[::-1], dim=-1)
    )


def _across_samples() -> AbstractContextManager[Any]:
    """The last tokens of a sample predict the first ones of the next."""
    build = pack_module.build_row

    def wrong(samples: Any, *args: Any) -> Any:
        row = build(samples, *args)
        labels = torch.cat([torch.as_tensor(s.get("labels", s["input_ids"])) for s in samples])
        ahead = [
            F.pad(labels[depth + 1 :], (0, depth + 1), value=IGNORE)
            for depth in range(1, len(row.mtp_targets) + 1)
        ]
        return replace(row, mtp_targets=torch.stack(ahead))

    return patch.object(pack_module, "build_row", wrong)


def _factors(change: Any) -> AbstractContextManager[Any]:
    right = loss_module.losses_of_parts

    def wrong(hidden: Any, weight: Any, targets: Any, bias: Any, factors: Any, *rest: Any) -> Any:
        changed = factors._replace(parts=tuple(change(factors.parts, targets)))
        return right(hidden, weight, targets, bias, changed, *rest)

    return patch.object(loss_module, "losses_of_parts", wrong)


def _own_count() -> AbstractContextManager[Any]:
    """Each depth is divided by its own labels."""

    def change(parts: Any, targets: Any) -> Any:
        counts = [int((x != IGNORE).sum()) for x in targets.split([part.num_tokens for part in parts])]
        return [
            part._replace(factor=part.factor * counts[0] / max(1, n))
            for part, n in zip(parts, counts, strict=True)
        ]

    return _factors(change)


def _scaled(share: float) -> AbstractContextManager[Any]:
    """The loss is right, but its gradient is a share of itself, as if the ranks would add more."""
    right = adapter_module.run_mtp

    def wrong(*args: Any) -> Any:
        found = right(*args)
        hidden = tuple(share * x + (1 - share) * x.detach() for x in found.hidden_KTD)
        return found._replace(hidden_KTD=hidden)

    return patch.object(adapter_module, "run_mtp", wrong)


def _before_the_norm() -> AbstractContextManager[Any]:
    """The module is given what the decoder has before its final norm."""
    decode, run, kept = adapter_module.Adapter.decode, adapter_module.run_mtp, list[Any]()

    def listening(self: Any, *args: Any) -> Any:
        norm = self.parts.final_norm
        hook = norm.register_forward_pre_hook(lambda _, given: kept.__setitem__(slice(None), given))
        try:
            return decode(self, *args)
        finally:
            hook.remove()

    stack = ExitStack()
    stack.enter_context(patch.object(adapter_module.Adapter, "decode", listening))
    stack.enter_context(
        patch.object(adapter_module, "run_mtp", lambda parts, _, *rest: run(parts, kept[0].squeeze(0), *rest))
    )
    return stack


def _placeholders() -> AbstractContextManager[Any]:
    """Where media are, the module sees the embedding of the placeholder's id."""
    right = adapter_module.run_mtp

    def wrong(parts: Any, hidden: Any, embeds: Any, batch: Any, *rest: Any) -> Any:
        return right(parts, hidden, parts.embedding(batch.input_ids), batch, *rest)

    return patch.object(adapter_module, "run_mtp", wrong)


MTP_MUTANTS: tuple[Mutant, ...] = (
    Mutant("MTP: embedding and hidden the other way round", _other_way_round, "qwen3_5"),
    Mutant("MTP: shifted across a sample boundary", _across_samples, "qwen3_5"),
    Mutant("MTP: divided by its own count", _own_count, "qwen3_5"),
    Mutant("MTP: hidden before the norm", _before_the_norm, "qwen3_5"),
    Mutant("MTP: gradient scaled by the ring", lambda: _scaled(0.5), "qwen3_5", ring=2),
    Mutant("MTP: placeholder embeddings", _placeholders, "qwen3_5 with media"),
)
"""Each with the tiny model that must show it."""
