"""One step of a model with some of its layers, and what it took."""

from __future__ import annotations

import gc
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from ..data.pack import pack
from ..distributed.api import parallelize
from ..models.braided import BraidedModel
from ..models.parts import ModelParts
from ..models.step import forward_backward
from ..models.stock import stock_class, trained_config
from ..plan.memory import MemoryOptions

WARM_UP = 256
"""Tokens of the step before the one that is measured, in which kernels are compiled."""


@dataclass(frozen=True)
class Trial:
    """A step's forward and backward, without an optimizer."""

    layers: int
    tokens: int
    peak: int
    """Bytes on the device at the height of the step; parameters and gradients included."""
    seconds: float


def run_trial(
    config: Any, layers: int, tokens: int, memory: MemoryOptions, dtype: torch.dtype, device: torch.device
) -> Trial | None:
    """A step of one sequence; None where the device's memory does not suffice."""
    try:
        return _run(config, layers, tokens, memory, dtype, device)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _run(
    config: Any, layers: int, tokens: int, memory: MemoryOptions, dtype: torch.dtype, device: torch.device
) -> Trial:
    config = with_layers(config, layers, tokens)
    torch.manual_seed(0)
    with device:
        stock = stock_class(config)._from_config(trained_config(config), dtype=dtype)
    model = parallelize(stock.train(), memory=memory)
    _step(model, config, min(WARM_UP, tokens))
    model.zero_grad(set_to_none=True)
    if device.type != "cuda":
        return Trial(layers, tokens, *_on_cpu(model, config, tokens))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin = perf_counter()
    _step(model, config, tokens)
    torch.cuda.synchronize(device)
    return Trial(layers, tokens, torch.cuda.max_memory_allocated(device), perf_counter() - begin)


def _step(model: BraidedModel, config: Any, tokens: int) -> None:
    ids = torch.randint(0, _text_ids(config), (tokens,), generator=torch.Generator().manual_seed(tokens))
    forward_backward(model, [pack([{"input_ids": ids}], model.model.config)])


def _text_ids(config: Any) -> int:
    """How many ids from 0 on are text: those of media placeholders come last."""
    special = [value for name, value in vars(trained_config(config)).items() if name.endswith("token_id")]
    return min([trained_config(config).get_text_config().vocab_size, *(i for i in special if i)])


def _on_cpu(model: BraidedModel, config: Any, tokens: int) -> tuple[int, float]:
    begin = perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        _step(model, config, tokens)
    seconds = perf_counter() - begin
    return sum(_bytes(p) for p in model.parameters()) + net_and_peak(found)[1], seconds


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def net_and_peak(found: Any) -> tuple[int, int]:
    """Bytes that are left of what was allocated while a profile ran, and the most that there were."""
    events = found.profiler.kineto_results.events()
    net = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        net += size
        peak = max(peak, net)
    return net, peak


def with_layers(config: Any, layers: int, tokens: int = 0) -> Any:
    """The config of the same model with its first layers alone, and positions for this many tokens."""
    config = deepcopy(config)
    text = trained_config(config).get_text_config()
    depth = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == depth:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    if tokens > getattr(text, "max_position_embeddings", tokens):
        text.max_position_embeddings = tokens
    return config


def whole_model(config: Any) -> PreTrainedModel:
    """The model in all of its layers, without memory for weights."""
    with torch.device("meta"):
        model: PreTrainedModel = stock_class(config)._from_config(trained_config(config))
    return model


def layer_period(model: PreTrainedModel) -> int:
    """After how many layers their kinds repeat.

    >>> from seqbraid.models.tiny.decoders import tiny_model
    >>> layer_period(tiny_model("llama")), layer_period(tiny_model("qwen3_5"))
    (1, 4)
    """
    kinds = [(layer.kind, layer.window, bool(layer.experts)) for layer in ModelParts.of(model).layers]
    return next(n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)])
