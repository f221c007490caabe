"""Dropout follows from the step's seed, the layer and the token: every mesh and split drops the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.dropout import drawn
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.train.lora import LoraOptions, add_lora
from tests.helpers import ranks

LENGTHS = (30, 5, 1, 64, 40, 17)


def test_every_channel_of_every_token_is_kept_as_often_as_it_should_be() -> None:
    keys = (torch.arange(40)[:, None] << 32 | torch.arange(25)).flatten()
    for p in (0.05, 0.5, 0.9):
        keep = drawn(keys, 64, seed=3, layer=5, p=p).double()
        for dims, count in (((0, 1), keep.numel()), ((0,), len(keys)), ((1,), 64)):
            spread = (p * (1 - p) / count) ** 0.5
            assert ((keep.mean(dims) - (1 - p)).abs() < 6 * spread).all(), (p, dims)


def test_tokens_channels_layers_and_seeds_are_drawn_apart() -> None:
    """Two independent masks agree in half of their entries."""
    keys = torch.arange(200) | (7 << 32)
    base = drawn(keys, 64, seed=3, layer=5, p=0.5)
    others = {
        "seed": drawn(keys, 64, seed=4, layer=5, p=0.5),
        "layer": drawn(keys, 64, seed=3, layer=6, p=0.5),
        "sample": drawn(keys ^ (1 << 32), 64, seed=3, layer=5, p=0.5),
        "token": base.roll(1, 0),
        "channel": base.roll(1, 1),
    }
    for name, other in others.items():
        share = (base == other).double().mean()
        assert abs(share - 0.5) < 6 * (0.25 / base.numel()) ** 0.5, name
    assert torch.equal(base, drawn(keys, 64, seed=3, layer=5, p=0.5))


def dropping(family: str) -> Any:
    if family == "gpt2":
        return tiny_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.2)
    model: Any = tiny_model(family)
    add_lora(model, LoraOptions(rank=4, alpha=8, targets="all-linear", dropout=0.3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def step(family: str, mesh: dict[str, int], parts: int, checkpointing: str, seed: int = 11) -> Any:
    """Loss and whole gradients of one optimizer step."""
    stock, ours = dropping(family), Mesh(**mesh)
    if checkpointing == "stock":
        stock.gradient_checkpointing_enable({"use_reentrant": False})
        checkpointing = "none"
    model = sb.parallelize(stock, ours, memory=MemoryOptions(checkpointing=checkpointing))  # type: ignore[arg-type]
    samples = random_samples(LENGTHS, 97)[ours.data_rank :: ours.data_world_size]
    size = -(-len(samples) // parts)
    batches = [sb.pack(samples[i : i + size], stock.config, ours) for i in range(0, len(samples), size)]
    total = sum(int((s["labels"][1:] != -100).sum()) for s in random_samples(LENGTHS, 97))
    loss = 0.0
    for batch in batches:
        out = model(batch, label_tokens=total, seed=seed)
        out.loss.backward()
        loss += float(out.mean_loss)
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss, {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in found.items()}


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_5"])
def test_every_mesh_drops_the_same(family: str) -> None:
    expected, gradients = step(family, {}, 1, "none")
    other, _ = step(family, {}, 1, "none", seed=12)
    assert abs(other - expected) > 1e-3 * expected  # something is dropped, and other seeds drop other things
    cases: list[tuple[dict[str, int], int, str]] = [({}, 3, "full"), ({"ring": 2}, 1, "selective")]
    cases += [({"ulysses": 2}, 1, "full"), ({"dp_shard": 2}, 2, "none"), ({}, 1, "stock")]
    if family != "gpt2":
        cases += [({"tp": 2}, 1, "full"), ({"ring": 2, "tp": 2}, 2, "none")]
    for mesh, parts, checkpointing in cases:
        for loss, found in ranks.run(step, math.prod(mesh.values()), family, mesh, parts, checkpointing):
            assert abs(loss - expected) < 1e-5 * expected, (mesh, parts)
            for name, gradient in gradients.items():
                assert (found[name] - gradient).norm() < 2e-3 * gradient.norm(), (mesh, parts, name)
