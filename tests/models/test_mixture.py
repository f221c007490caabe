"""Experts: what routers add to the loss and what dropout takes away are the same on every mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.integrations import moe

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.comm.consensus import gather_objects
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.lora import LoraOptions, add_lora
from tests.helpers import ranks
from tests.models.tiny_types import tiny_type_model

LENGTHS = (30, 5, 1, 64, 40, 17)
ROWS = [[0, 2, 4], [1, 3, 5]]
MESHES: list[dict[str, int]] = [{}, {"ring": 2}, {"ulysses": 2}, {"dp_shard": 2}]
MESHES += [{"ring": 2, "ep": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2}]
COEFFICIENT = 0.1


def size_of(axes: dict[str, int]) -> int:
    return math.prod(size for axis, size in axes.items() if axis != "ep")


def model_of(model_type: str, dropout: float) -> Any:
    model: Any = tiny_type_model(model_type, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    if dropout:
        add_lora(model, LoraOptions(rank=4, alpha=8, targets="all-linear", dropout=dropout))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


def step(model_type: str, axes: dict[str, int], dropout: float, seed: int) -> Any:
    """One optimizer step of two rows: its loss, what the routers add, and whole gradients."""
    mesh = Mesh(**axes)
    stock = model_of(model_type, dropout)
    model = sb.parallelize(stock, mesh)
    samples = random_samples(LENGTHS, 97)
    rows = [ROWS[mesh.data_rank]] if mesh.data_world_size > 1 else ROWS
    batches = [sb.pack([samples[i] for i in row], stock.config, mesh) for row in rows]
    losses = torch.zeros(2, dtype=torch.float64)
    if mesh.pp > 1:
        out = sb.forward_backward(model, batches, seed=seed)
        losses += torch.stack([out.mean_loss, out.aux_loss])  # type: ignore[list-item]
    for batch in batches if mesh.pp == 1 else ():
        out = model(batch, label_tokens=label_tokens(samples), seed=seed)
        out.loss.backward()
        losses += torch.stack([out.mean_loss, out.aux_loss])  # type: ignore[list-item]
    own = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    own = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in own.items()}
    stages = gather_objects(mesh.cpu_group, own) if mesh.pp > 1 else [own]
    return losses, {name: gradient for of_stage in stages for name, gradient in of_stage.items()}


def label_tokens(samples: list[dict[str, Any]]) -> int:
    return sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)


def stock_step(model_type: str) -> Any:
    """The stock model on each sample alone, and its own function on the router logits of each row."""
    from importlib import import_module

    model = model_of(model_type, 0.0)
    balance = import_module(type(model).__module__).load_balancing_loss_func
    samples = random_samples(LENGTHS, 97)
    losses = torch.zeros(2, dtype=torch.float64)
    for row in ROWS:
        outputs = [model(input_ids=samples[i]["input_ids"][None], use_cache=False) for i in row]
        logits = torch.cat([out.logits[0, :-1] for out in outputs])
        labels = torch.cat([samples[i]["labels"][1:] for i in row])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        routers = tuple(
            torch.cat(layer) for layer in zip(*(out.router_logits for out in outputs), strict=True)
        )
        share = label_tokens([samples[i] for i in row]) / label_tokens(samples)
        aux = share * balance(routers, routers[0].shape[-1], model.config.num_experts_per_tok)
        loss = loss / label_tokens(samples)
        (loss + COEFFICIENT * aux).backward()
        losses += torch.stack([loss.detach(), aux.detach()])
    return losses, {name: p.grad for name, p in model.named_parameters()}


def assert_alike(found: Any, expected: Any, what: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0, msg=lambda m: f"{what}: {m}")
    assert found[1].keys() == expected[1].keys() and expected[1]
    for name, gradient in expected[1].items():
        error = float((found[1][name] - gradient).norm() / gradient.norm())
        assert error < 1e-5, (what, name, error)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_router_loss_is_stocks_on_every_mesh(model_type: str) -> None:
    expected = stock_step(model_type)
    assert expected[0][1] > 0.5  # the routers' loss is one when they are level
    for axes in MESHES:
        for found in ranks.run(step, size_of(axes), model_type, axes, 0.0, 0):
            assert_alike(found, expected, axes)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_dropout_is_the_same_on_every_mesh(model_type: str) -> None:
    expected, other = (ranks.run(step, 1, model_type, {}, 0.3, seed)[0] for seed in (11, 12))
    assert (other[0] - expected[0]).abs().max() > 1e-3  # something is dropped
    for axes in MESHES[1:]:
        for found in ranks.run(step, size_of(axes), model_type, axes, 0.3, 11):
            assert_alike(found, expected, axes)


def test_a_kernel_that_the_model_was_told_to_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts: one that a package brings; those of torch are ours."""
    called = []

    def own(module: Any, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        called.append(len(hidden))
        out: torch.Tensor = moe.grouped_mm_experts_forward(module, hidden, *routing)
        return out

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "own", own)
    for name, calls in (("own", [7, 7]), ("grouped_mm", [])):
        stock = tiny_type_model("qwen3_moe", torch.float32)
        stock.set_experts_implementation(name)
        model = sb.parallelize(stock, Mesh(rank=0, world_size=1))
        called.clear()
        model(sb.pack(random_samples([7], 97), stock.config, multiple_of=16)).loss.backward()
        assert called == calls, "without padding, once in each layer"


def test_experts_are_known_by_their_tensors_whatever_their_class_is_called() -> None:
    """As in transformers 5.9, where those of DeepSeek-V3 are a `DeepseekV3NaiveMoe`."""
    stock = tiny_type_model("qwen3_moe", torch.float32)
    for layer in stock.model.layers:
        layer.mlp.experts.__class__ = type("NaiveMoe", (type(layer.mlp.experts),), {})
    model = sb.parallelize(stock, Mesh(rank=0, world_size=1))
    load = model(sb.pack(random_samples([7], 97), stock.config, multiple_of=16)).expert_load
    assert load is not None and load.picks_NE.sum(1).tolist() == [14.0] * len(stock.model.layers)
