"""A model is taken over, released, and taken over again with other kernels: nothing of before is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import seqbraid as sb
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_model
from seqbraid.models.tiny.samples import random_samples

TORCH = sb.KernelOptions(**dict.fromkeys(vars(sb.KernelOptions()), "torch"))
SMALL = sb.MemoryOptions("full", offload=True, mlp_tile=8, loss_chunk=5)


def trace(model: PreTrainedModel) -> Any:
    """All that a module or config says, and which objects they hold, without gradients."""

    def held(value: Any) -> Any:
        return (id(value), tuple(value)) if isinstance(value, dict) else id(value)

    modules = {
        name: (type(module), {key: held(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    }
    configs = [{key: repr(value) for key, value in vars(model.config.get_text_config()).items()}]
    configs.append({key: repr(value) for key, value in vars(model.config).items()})
    return modules, configs


def gradients(stock: PreTrainedModel, kernels: sb.KernelOptions, memory: sb.MemoryOptions | None) -> Any:
    """Of a step of the model, which is taken over for it and then released."""
    is_media = stock.config is not stock.config.get_text_config()
    samples = mixed_samples(stock.config, 1) if is_media else random_samples([40, 3, 17], 97)
    model = sb.parallelize(stock, kernels=kernels, memory=memory)
    assert model.kernels.options == kernels
    model(sb.pack(samples, stock.config)).loss.backward()
    found = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    stock.zero_grad(set_to_none=True)
    assert model.release() is stock
    return found


CASES = [
    (tiny_model, "llama"),
    (tiny_model, "qwen3_5"),
    (tiny_model, "qwen3_moe"),
    (tiny_media_model, "qwen3_vl"),
]


@pytest.mark.parametrize(("make", "family"), CASES)
def test_the_second_time_is_as_the_first(make: Callable[[str], PreTrainedModel], family: str) -> None:
    stock = make(family)
    with torch.no_grad():  # transformers keeps hooks of its own from a first call on
        stock(torch.tensor([[1, 2, 3]]))
    fresh, before = copy.deepcopy(stock), trace(stock)
    gradients(stock, TORCH, SMALL if family != "qwen3_moe" else replace(SMALL, mlp_tile=None))
    assert trace(stock) == before
    found, wanted = gradients(stock, sb.KernelOptions(), None), gradients(fresh, sb.KernelOptions(), None)
    assert trace(stock) == before
    assert found.keys() == wanted.keys() and any(gradient.norm() > 0 for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
