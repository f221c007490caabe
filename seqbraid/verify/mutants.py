"""Deliberate defects, each switched on for the length of a `with`: a check that none of them fails is no
check.

A mutant replaces one function of the library by one that makes a mistake seen in the wild. Nothing here is
reachable in a normal run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from ..data import pack as pack_module
from ..models import attention as attention_module
from ..models import batch as batch_module
from ..models import braided as braided_module
from ..models import gated_delta as gated_delta_module
from ..ops import attention as attention_ops


@dataclass(frozen=True)
class Mutant:
    """A defect, and the check that it must fail: parity of a family, or of the attention blocks alone."""

    name: str
    switched_on: Callable[[], AbstractContextManager[Any]]
    check: str
    """A family of `tiny.FAMILIES`, or `blocks`."""


def _positions_not_reset() -> AbstractContextManager[Any]:
    build = pack_module.build_row

    def wrong(*args: Any) -> Any:
        row = build(*args)
        return replace(row, positions=torch.arange(len(row.input_ids)).expand(4, -1))

    return patch.object(pack_module, "build_row", wrong)


def _targets_shifted_across_samples() -> AbstractContextManager[Any]:
    build = pack_module.build_row

    def wrong(samples: Any, vocab_size: int) -> Any:
        labels = torch.cat([torch.as_tensor(s.get("labels", s["input_ids"])) for s in samples])
        targets = torch.cat([labels[1:], labels.new_tensor([-100])])
        return replace(build(samples, vocab_size), targets=targets)

    return patch.object(pack_module, "build_row", wrong)


def _boundaries_ignored(name: str, position: int) -> AbstractContextManager[Any]:
    """Give one gated-delta op a single boundary around all sequences."""
    right = getattr(gated_delta_module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        arguments[position] = (arguments[position][0], arguments[position][-1])
        return right(*arguments, **kwargs)

    return patch.object(gated_delta_module, name, wrong)


def _padding_counted() -> AbstractContextManager[Any]:
    split = batch_module.Row.split

    def wrong(self: Any, layout: Any, rank: int) -> Any:
        extra = layout.num_local_tokens * layout.num_ranks - layout.num_tokens
        batch = split(self, layout, rank)
        return replace(batch, label_tokens=batch.label_tokens + extra)

    return patch.object(batch_module.Row, "split", wrong)


def _padding_routed() -> AbstractContextManager[Any]:
    right = braided_module.load_balancing_loss
    return patch.object(
        braided_module,
        "load_balancing_loss",
        lambda logits, real, *rest: right(logits, torch.ones_like(real), *rest),
    )


def _lse_gradient_dropped() -> AbstractContextManager[Any]:
    """The backward of a block from the block's own out and LSE instead of the merged ones."""
    right = attention_ops.block_attention_backward

    def wrong(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, plan: Any, scale: float, *dq: Any
    ) -> Any:
        return right(dout, q, k, v, *attention_ops.block_attention(q, k, v, plan, scale), plan, scale, *dq)

    return patch.object(attention_ops, "block_attention_backward", wrong)


def _attention_changed(**changes: Any) -> AbstractContextManager[Any]:
    right = attention_module.softmax_attention

    def wrong(q: Any, k: Any, v: Any, context: Any, scale: float, window: Any, sink: Any) -> Any:
        arguments = {"window": window, "sink_H": sink} | changes
        return right(q, k, v, context, scale, **arguments)

    return patch.object(attention_module, "softmax_attention", wrong)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("positions not reset", _positions_not_reset, "gpt2"),
    Mutant("conv boundary ignored", lambda: _boundaries_ignored("causal_conv", 3), "qwen3_5"),
    Mutant("state not reset", lambda: _boundaries_ignored("gated_delta_rule", 5), "qwen3_5"),
    Mutant("targets shifted across samples", _targets_shifted_across_samples, "llama"),
    Mutant("padding counted in the divisor", _padding_counted, "llama"),
    Mutant("padding counted by the router", _padding_routed, "qwen3_moe"),
    Mutant("LSE gradient dropped", _lse_gradient_dropped, "blocks"),
    Mutant("sliding window ignored", lambda: _attention_changed(window=None), "gemma3"),
    Mutant("sink ignored", lambda: _attention_changed(sink_H=None), "gpt_oss"),
)
