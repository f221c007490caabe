"""Multi-token prediction written plainly: one sample, one process, stock layers, whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..layout.labels import IGNORE
from ..models.mtp_module import NAME, MtpModule, MtpOptions
from ..models.parts import ModelParts


def mtp_options(model: PreTrainedModel) -> MtpOptions | None:
    """How a model is trained to predict several tokens; None where it is not."""
    module = getattr(model, NAME, None)
    return module.options if isinstance(module, MtpModule) else None


class DecoderTrace(NamedTuple):
    """What the stock decoder was given and gave in a call, `[B, T, D]`."""

    embeds: list[Tensor]
    hidden: list[Tensor]
    angles: list[tuple[Tensor, Tensor]]


class MtpSums(NamedTuple):
    """What a sample adds."""

    losses: list[Tensor]
    """The sum of the token losses of each depth."""
    router_logits: list[Tensor]
    """`[T - k, E]` of each depth k: the last k tokens have nobody to predict from."""
    best: list[Tensor]
    """`[T - k - 1]`, the most likely token at each place of each depth."""


@contextmanager
def seen_by_decoder(model: PreTrainedModel) -> Iterator[DecoderTrace]:
    """The embeddings that the first layer gets, with media in them; the states behind the last norm; and the
    angles of the positions as the stock model counts them.
    """
    parts, seen = ModelParts.of(model), DecoderTrace([], [], [])
    if parts.mtp is None:
        yield seen
        return

    def first(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.embeds.append(args[0] if args else kwargs["hidden_states"])
        seen.angles.append(kwargs["position_embeddings"])

    assert parts.final_norm is not None
    hooks = [
        parts.layer_list[0].register_forward_pre_hook(first, with_kwargs=True),
        parts.final_norm.register_forward_hook(lambda _, __, out: seen.hidden.append(out)),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def mtp_step(model: PreTrainedModel, seen: DecoderTrace, labels: Tensor, left_padding: int = 0) -> MtpSums:
    """The depths of one sample with these (unshifted) labels, behind a call of the stock model."""
    parts = ModelParts.of(model)
    assert parts.mtp is not None
    mtp: Any = parts.mtp.module
    embeds, hidden = seen.embeds[0][:1, left_padding:], seen.hidden[0][:1, left_padding:]
    angles = tuple(x[:1, left_padding:] for x in seen.angles[0])
    length = len(labels)
    mask = torch.full((1, 1, length, length), -torch.inf, dtype=hidden.dtype).triu(1)
    found = MtpSums([], [], [])
    for depth in range(1, mtp.options.depth + 1):
        ahead = F.pad(embeds[:, depth:], (0, 0, 0, min(depth, length)))
        joined = torch.cat([mtp.pre_fc_norm_embedding(ahead), mtp.pre_fc_norm_hidden(hidden)], dim=-1)
        number = (depth - 1) % len(mtp.layers)
        router, recorded = parts.mtp.layers[number].router, list[Tensor]()
        hook = router and router.register_forward_hook(lambda _, __, out, to=recorded: to.append(out[0]))
        x = mtp.layers[number](mtp.fc(joined), position_embeddings=angles, attention_mask=mask)
        if hook is not None:
            hook.remove()
            found.router_logits.append(recorded[0][: max(0, length - depth)])
        hidden = mtp.norm(x)
        logits = parts.head(hidden[0, : max(0, length - depth - 1)])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        found.best.append(logits.detach().argmax(1))
        targets = labels[depth + 1 :]
        found.losses.append(F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum"))
    return found
