"""Padding is nobody: it touches no gradient, whatever a family computes on it, and is routed to no expert."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.verify.parity import check_parity
from seqbraid.verify.reference import stock_step
from tests.helpers import ranks


class NoGradientAtZero(nn.Module):
    """A scale of each channel, and the root of their size, whose slope at zero is infinite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return x.norm(dim=-1, keepdim=True).sqrt() * x


def model_without_gradient_at_zero() -> Any:
    """Padding of id 0, whose embedding is zero as that of a pad token is, would be NaN in every gradient."""
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    for layer in model.model.layers:
        layer.mlp.act_fn = NoGradientAtZero(48)
        layer.self_attn.o_proj = nn.Sequential(NoGradientAtZero(64), layer.self_attn.o_proj)
    return model


def gemma3n() -> Any:
    """A family whose MLP takes the standard deviation of its channels, which has no gradient at zero."""
    config = AutoConfig.for_model(
        "gemma3n_text", vocab_size=97, vocab_size_per_layer_input=97, hidden_size=32,
        intermediate_size=[48, 48], hidden_size_per_layer_input=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, laurel_rank=4, altup_num_inputs=2,
        num_kv_shared_layers=0, pad_token_id=0,
        layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.95, 0.0],
    )  # fmt: skip
    vars(config)["final_logit_softcapping"] = None  # with it the family is refused
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


MODELS = {"made up": model_without_gradient_at_zero, "gemma3n": gemma3n}


def padded_verdict(model: str, mesh: dict[str, int], layout: dict[str, int]) -> Any:
    samples = [{"input_ids": sample["input_ids"].clamp(min=1)} for sample in random_samples([9, 30, 4], 97)]
    parity = check_parity(MODELS[model](), samples, Mesh(**mesh), **layout)
    return parity.holds, parity.worst


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [({}, {"pad_to": 64}), ({"ring": 2}, {"multiple_of": 16}), ({"ulysses": 2}, {"pad_to": 128})],
)
@pytest.mark.parametrize("model", MODELS)
def test_padding_touches_no_gradient(model: str, mesh: dict[str, int], layout: dict[str, int]) -> None:
    for holds, worst in ranks.run(padded_verdict, math.prod(mesh.values()), model, mesh, layout):
        assert holds, worst


def test_the_test_above_has_something_to_find() -> None:
    """The stock model itself is NaN on a token whose embedding is zero."""
    found = stock_step(model_without_gradient_at_zero(), [{"input_ids": torch.tensor([0, 5, 6])}])
    assert any(gradient.isnan().any() for gradient in found.gradients.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_padding_is_routed_to_no_expert(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = tiny_model(family)
    (kind,) = {type(m) for m in stock.modules() if type(m).__name__.endswith("Experts")}
    routed: list[int] = []
    forward = kind.forward

    def counted(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        routed.append(len(hidden))
        return forward(self, hidden, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counted)
    model = sb.parallelize(stock, memory=MemoryOptions(checkpointing="full"))
    routed.clear()  # a kind of experts that is new to the process was tried with a few tokens
    out = model(sb.pack(random_samples([9, 30, 4], 97), stock.config, pad_to=64))
    out.loss.backward()  # each layer is computed again here
    layers = stock.config.num_hidden_layers
    assert routed == [43] * (2 * layers)
    assert all(p.grad is None or p.grad.isfinite().all() for p in stock.parameters())
    stock = model.release()
    routed.clear()
    stock(torch.zeros(1, 7, dtype=torch.long))
    assert routed == [7] * layers
