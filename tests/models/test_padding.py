"""Padding is nobody: it touches no gradient, whatever a family computes on it, and is routed to no expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.parallelize.memory import MemoryOptions
from seqbraid.verify.parity import check_parity
from seqbraid.verify.reference import stock_step
from seqbraid.verify.samples import random_samples
from seqbraid.verify.tiny import tiny_model
from tests import ranks


class NoGradientAtZero(nn.Module):
    """The root of what attention gives, whose slope at zero is infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.norm(dim=-1, keepdim=True).sqrt() * x


def model_without_gradient_at_zero() -> Any:
    """Padding of id 0, whose embedding is zero as that of a pad token is, would be NaN in every gradient."""
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    for layer in model.model.layers:
        layer.mlp.act_fn = NoGradientAtZero()
        layer.self_attn.o_proj = nn.Sequential(NoGradientAtZero(), layer.self_attn.o_proj)
    return model


def padded_verdict(mesh: dict[str, int], layout: dict[str, int]) -> Any:
    samples = [{"input_ids": sample["input_ids"].clamp(min=1)} for sample in random_samples([9, 30, 4], 97)]
    parity = check_parity(model_without_gradient_at_zero(), samples, Mesh(**mesh), **layout)
    return parity.holds, parity.worst


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [({}, {"pad_to": 64}), ({"ring": 2}, {"multiple_of": 16}), ({"ulysses": 2}, {"pad_to": 128})],
)
def test_padding_touches_no_gradient(mesh: dict[str, int], layout: dict[str, int]) -> None:
    size = 1
    for axis in mesh.values():
        size *= axis
    for holds, worst in ranks.run(padded_verdict, size, mesh, layout):
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
    out = model(sb.pack(random_samples([9, 30, 4], 97), stock.config, pad_to=64))
    out.loss.backward()  # each layer is computed again here
    layers = stock.config.num_hidden_layers
    assert routed == [43] * (2 * layers)
    assert all(p.grad is None or p.grad.isfinite().all() for p in stock.parameters())
    stock = model.release()
    routed.clear()
    stock(torch.zeros(1, 7, dtype=torch.long))
    assert routed == [7] * layers
