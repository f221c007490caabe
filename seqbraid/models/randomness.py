"""Random numbers that we cannot draw by token are refused: ranks that share a row would not draw what one
process draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

WORDS = ("drop", "jitter")
"""What configs call that for which random numbers are drawn."""

ELSEWHERE = ("classifier", "summary", "encoder_", "cls_")
"""Keys that speak of parts which a decoder with a language-model head does not have."""


UNUSED_AT_ZERO = {"phimoe": "router_jitter_noise"}
"""Families that draw random numbers in training even where they use none of them: where this value is 0."""


def refuse_random_layers(model: nn.Module, text: Iterable[nn.Module], config: Any, name: str) -> None:
    """Refuse a step in training that would drop whole layers, parts of attention, or of what encoders see;
    dropout among the modules of the text model is drawn by token.
    """
    own = {id(module) for module in text if type(module) is nn.Dropout}
    for path, module in model.named_modules():
        if id(module) in own or not isinstance(module, nn.modules.dropout._DropoutNd):
            continue
        if module.training and module.p:
            raise ValueError(
                f"{name} trains with {type(module).__name__.lower()} {module.p} at {path!r}, and ranks "
                "that share a row would draw other numbers than one process; set it to 0 in the config "
                "before the model is built, or call .eval()"
            )
    for key, value in _random_keys(config).items():
        if "attn" in key or "attention" in key or "layerdrop" in key:
            raise ValueError(
                f"{name} trains with {key}={value}, which cannot be reproduced when a sequence is split; "
                f"set config.{key}=0 before the model is built, or call .eval()"
            )


@contextmanager
def no_random_numbers(device: torch.device, config: Any, name: str) -> Iterator[None]:
    """Refuse afterwards what drew random numbers by functions, which no module shows."""
    before = _state(device)
    host = torch.get_rng_state()
    yield
    if torch.equal(_state(device), before) or _only_scalars(host, config.num_hidden_layers):
        return
    switch = UNUSED_AT_ZERO.get(config.model_type)
    if switch is not None and getattr(config, switch) == 0:
        return
    found = ", ".join(f"{key}={value}" for key, value in _random_keys(config).items())
    raise ValueError(
        f"{name} draws random numbers in training"
        + (f" (its config has {found})" if found else " (in its router, for example)")
        + ", and ranks that share a row would draw other numbers than one process; "
        + ("set those to 0 before the model is built, or " if found else "")
        + "call .eval()"
    )


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _only_scalars(before: torch.Tensor, num_layers: int) -> bool:
    """Whether one number a layer was drawn at most, as families do that may skip layers, though none is."""
    generator = torch.Generator()
    generator.set_state(before)
    after = torch.get_rng_state()
    for _ in range(num_layers):
        torch.rand([], generator=generator)
        if torch.equal(generator.get_state(), after):
            return True
    return False


def _random_keys(config: Any) -> dict[str, float]:
    return {
        key: value
        for key, value in config.to_dict().items()
        if any(word in key for word in WORDS) and not key.startswith(ELSEWHERE)
        if isinstance(value, int | float) and value
    }
