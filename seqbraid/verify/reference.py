"""The stock model in one process, each sample alone: what every split and packing must reproduce."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..layout.labels import IGNORE
from ..models.families import family_of
from ..models.media_tokens import token_types
from ..models.parts import towers_of
from ..models.router import stock_num_experts
from ..models.stock import in_torch
from .mtp_reference import mtp_options, mtp_step, seen_by_decoder
from .objective import Objective


@dataclass(frozen=True)
class Measurement:
    """Loss, gradient and logits of one way to compute a step."""

    loss: Tensor
    logits: list[Tensor]
    gradients: dict[str, Tensor]


def stock_step(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    left_padding: int = 0,
    backwards: bool = False,
    rows: Sequence[Sequence[int]] | None = None,
    objective: Objective | None = None,
) -> Measurement:
    """Sum of token losses over the samples, one forward each, divided by the number of labels; its gradient.
    An `objective` takes the place of cross entropy.

    `left_padding` and `backwards` change the order of the sums and nothing else: each sample gets that many
    masked tokens in front (which moves the chunks of a gated-delta layer), and the samples are visited in
    reverse. The loss of routers is formed per row: `rows` says which samples share one; all do when it is
    left out.
    """
    with fresh_gradients(model):
        labels = [int((shifted_targets(sample) != IGNORE).sum()) for sample in samples]
        count = max(1, sum(labels))
        with_router = bool(getattr(model.config.get_text_config(), "output_router_logits", False))
        mtp = mtp_options(model)
        losses: list[Tensor] = []
        mtp_routers: dict[int, list[Tensor]] = {}
        routers: dict[int, tuple[Tensor, ...]] = {}
        logits: dict[int, Tensor] = {}
        order = range(len(samples))
        for i in reversed(order) if backwards else order:
            with seen_by_decoder(model) as seen:
                outputs, found = _forward(model, samples[i], left_padding, with_router)
            wide = found.float() if found.dtype != torch.float64 else found
            if objective is None:
                loss = F.cross_entropy(
                    wide, shifted_targets(samples[i]), ignore_index=IGNORE, reduction="sum"
                )
            else:
                loss = objective.of_logits(wide, samples[i])
            loss = loss / count
            if mtp is not None:
                given = torch.as_tensor(samples[i].get("labels", samples[i]["input_ids"]))
                with in_torch(model):
                    sums = mtp_step(model, seen, given, left_padding)
                loss = loss + mtp.loss_factor / mtp.depth * torch.stack(sums.losses).sum() / count
                mtp_routers[i] = sums.router_logits
            if with_router:
                tokens = slice(left_padding, left_padding + len(found))
                routers[i] = tuple(r[tokens] for r in outputs.router_logits)
            else:
                loss.backward()
                loss = loss.detach()
            losses.append(loss)
            logits[i] = found.detach()
        total = torch.stack(losses).sum()
        if with_router:
            for row in [range(len(samples))] if rows is None else rows:
                share = sum(labels[i] for i in row) / count
                total = total + share * _router_loss(model, [routers[i] for i in row])
                of_mtp = [logits for i in row for logits in mtp_routers.get(i, ())]
                if sum(map(len, of_mtp)):
                    total = total + share * _router_loss(model, [(torch.cat(of_mtp),)])
            total.backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
    return Measurement(total.detach(), [logits[i] for i in order], gradients)


def shifted_targets(sample: dict[str, Any]) -> Tensor:
    """The target of each token of a sample."""
    labels = torch.as_tensor(sample.get("labels", sample["input_ids"]))
    return torch.cat([labels[1:], labels.new_tensor([IGNORE])])


@contextmanager
def fresh_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Run with no gradients there, and leave those that were there before as they were."""
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


@contextmanager
def one_rounding_away(model: torch.nn.Module, seed: int = 0) -> Iterator[None]:
    """Every weight is the number next to it, above or below at random; afterwards they are what they were."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p for p in model.parameters() if p.is_floating_point()]
    before = [p.detach().clone() for p in weights]
    with torch.no_grad():
        for p in weights:
            above = torch.rand(p.shape, generator=generator) < 0.5
            target = torch.where(above, torch.inf, -torch.inf).to(p)
            p.copy_(torch.nextafter(p, target))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, values in zip(weights, before, strict=True):
                p.copy_(values)


def _forward(
    model: PreTrainedModel, sample: dict[str, Any], left_padding: int, with_router: bool
) -> tuple[Any, Tensor]:
    if family_of(model.config) is not None:
        return _media_forward(model, sample, left_padding, with_router)
    ids = torch.as_tensor(sample["input_ids"])
    length = len(ids)
    inputs = {
        "input_ids": F.pad(ids, (left_padding, 0))[None],
        "position_ids": F.pad(torch.arange(length), (left_padding, 0))[None],
    }
    if left_padding:
        # Twice: some releases heed the mask of a gated-delta layer only in a batch. The first one counts.
        mask = F.pad(torch.ones_like(ids), (left_padding, 0))[None]
        inputs = {name: x.expand(2, -1) for name, x in (inputs | {"attention_mask": mask}).items()}
    extra = {"output_router_logits": True} if with_router else {}
    with in_torch(model):
        outputs = model(**inputs, use_cache=False, **extra)
    return outputs, outputs.logits[0, left_padding:]


def _media_forward(
    model: PreTrainedModel, sample: dict[str, Any], left_padding: int, with_router: bool
) -> tuple[Any, Tensor]:
    """As a user of the stock model would call it: positions are the model's own affair."""
    ids = torch.as_tensor(sample["input_ids"])
    beside = ("input_ids", "labels", "attention_mask", "fields")
    media = {key: value for key, value in sample.items() if key not in beside}
    media.setdefault("mm_token_type_ids", token_types(ids, model.config))
    per_token = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": media.pop("mm_token_type_ids"),
    }
    copies = 2 if left_padding else 1  # see `_forward`
    inputs: dict[str, Any] = {
        name: F.pad(torch.as_tensor(x), (left_padding, 0))[None].expand(copies, -1)
        for name, x in per_token.items()
    }
    if "audio" in family_of(model.config).kinds:
        del inputs["mm_token_type_ids"]
    elif not left_padding:
        del inputs["attention_mask"]
    if "second_per_grid_ts" in media:  # what the model calls it
        media["video_second_per_grid"] = media.pop("second_per_grid_ts")
    for name, value in media.items():
        inputs[name] = torch.cat([torch.as_tensor(value)] * copies) if not isinstance(value, bool) else value
    extra = {"output_router_logits": True} if with_router else {}
    with _clips_alone(model), in_torch(model):
        outputs = model(**inputs, use_cache=False, **extra)
    return outputs, outputs.logits[0, left_padding:]


@contextmanager
def _clips_alone(model: PreTrainedModel) -> Iterator[None]:
    """Let the stock audio tower see one clip at a time: beside a longer one it gives a short
    clip other features.
    """
    inner: Any = towers_of(model)
    if not hasattr(inner, "audio_tower"):
        yield
        return
    stock = inner.get_audio_features

    def one_by_one(features: Tensor, mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = [stock(f[None], m[None], *args, **kwargs) for f, m in zip(features, mask, strict=True)]
        joined = torch.cat([o.last_hidden_state for o in outputs])
        return type(outputs[0])(last_hidden_state=joined)

    inner.get_audio_features = one_by_one
    try:
        yield
    finally:
        del inner.get_audio_features


def _router_loss(model: PreTrainedModel, routers: list[tuple[Tensor, ...]]) -> Tensor:
    """The stock function on the router logits of all tokens of a row."""
    config = model.config.get_text_config()
    stock = importlib.import_module(type(model).__module__).load_balancing_loss_func
    joined = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    experts = stock_num_experts(config)
    loss: Tensor = config.router_aux_loss_coef * stock(joined, experts, config.num_experts_per_tok)
    return loss
