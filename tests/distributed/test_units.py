"""Units of sharding: which there are, what is gathered when, and when gradients are exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqbraid as sb
from seqbraid.models import step_loss
from seqbraid.models.braided import BraidedModel
from seqbraid.models.parts import ModelParts
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.plan.units import Units
from seqbraid.train.freeze import freeze
from tests.helpers import ranks
from tests.models.tiny_types import tiny_type_model

AUDIO = "qwen3_omni"


def make(family: str) -> Any:
    if family in ("qwen3_vl", AUDIO):
        return tiny_media_model(family)
    name = family.removesuffix(" tied")
    return tiny_model(name, tie_word_embeddings=name != family)


def names(model: Any) -> list[str]:
    return [unit.name for unit in Units.of(ModelParts.of(model)).units]


def test_embedding_head_layers_and_blocks_are_units() -> None:
    assert names(tiny_model("llama")) == ["embedding", "layer 0", "layer 1", "head"]
    # A tied weight is gathered for both.
    assert names(tiny_type_model("gpt2", torch.float32)) == ["layer 0", "layer 1"]
    omni = names(make(AUDIO))
    vision = [name for name in omni if name.startswith("vision block")]
    layers = [name for name in omni if name.startswith("layer")]
    assert vision and layers and omni == ["embedding", "vision", *vision, "audio", *layers, "head"]


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", AUDIO])
def test_every_parameter_is_in_one_unit_or_in_none(family: str) -> None:
    model = make(family)
    units = Units.of(ModelParts.of(model))
    found = [id(p) for unit in units.units for p in units.own(unit)] + [id(p) for p in units.rest]
    assert len(found) == len(set(found)) and set(found) == {id(p) for p in model.parameters()}
    assert sum(p.numel() for p in units.rest) < 0.02 * sum(p.numel() for p in model.parameters())


def test_layers_that_share_a_weight_are_gathered_together() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    assert names(model) == ["embedding", "layer 1", "head"]


def test_the_backward_comes_to_a_tower_before_its_blocks_and_not_to_frozen_ones() -> None:
    model = tiny_media_model("qwen3_vl")
    order = [unit.name for unit in Units.of(ModelParts.of(model)).backward]
    assert order.index("layer 0") < order.index("vision") < order.index("vision block 1")
    assert order.index("vision block 1") < order.index("vision block 0")
    assert order[-1] == "embedding" and order[0] == "head"
    freeze(model, ["vision", "embeddings"])
    order = [unit.name for unit in Units.of(ModelParts.of(model)).backward]
    assert order[-1] == "vision", "its mergers learn, and nothing below them"
    freeze(model, ["merger", r"re:layers\.0\."])
    assert [unit.name for unit in Units.of(ModelParts.of(model)).backward][-1] == "layer 1"


def gathered(model: BraidedModel) -> set[str]:
    """The units of which no parameter is sharded."""
    found = Units.of(model.parts)
    return {u.name for u in found.units if not any(isinstance(p, DTensor) for p in found.own(u))}


def seen_on_a_rank() -> dict[str, set[str]]:
    mesh = sb.Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama", num_hidden_layers=3), mesh)
    batch = sb.pack(random_samples([40, 9], 97), model.model.config, mesh)
    seen: dict[str, set[str]] = {}
    mlp: Any = model.parts.layer_list[1].mlp
    mlp.register_forward_hook(lambda *_: seen.update({"layer 1": gathered(model)}))
    mlp.register_full_backward_hook(lambda *_: seen.update({"backward of layer 1": gathered(model)}))
    right = step_loss.linear_cross_entropy

    def looking(*args: Any, **kwargs: Any) -> Any:
        seen["loss"] = gathered(model)
        return right(*args, **kwargs)

    step_loss.linear_cross_entropy = looking  # type: ignore[assignment]
    try:
        out = model(batch)
    finally:
        step_loss.linear_cross_entropy = right
    seen["between"] = gathered(model)
    out.loss.backward()
    seen["after"] = gathered(model)
    model.logits(batch)
    seen["after an evaluation"] = gathered(model)
    return seen


def test_a_unit_is_gathered_while_it_works_and_the_next_beside_it() -> None:
    for seen in ranks.run(seen_on_a_rank, 2):
        assert seen["layer 1"] == {"layer 1"}  # the next is on its way, and not there before it is waited for
        assert seen["loss"] == {"layer 2", "head"}
        assert seen["between"] == {"layer 2"}
        assert seen["backward of layer 1"] == {"layer 1"}
        assert seen["after"] == seen["after an evaluation"] == set()


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found}


def micro_batches(family: str, config: Any) -> list[Any]:
    if family == AUDIO:  # one rank has clips of three lengths, and the other none
        few = [media_sample(config, ["audio"] * 3, 5, [2, 3, 1, 4], encoder_inputs=True)]
        return [few, random_samples([40, 9], 60), mixed_samples(config)[:3]]
    if family == "qwen3_vl":
        return [mixed_samples(config), random_samples([40, 9], 60), mixed_samples(config, seed=1)[:3]]
    return [random_samples(lengths, 97) for lengths in ([40, 9], [70, 1, 3], [25])]


class Exchanges(TorchDispatchMode):
    """Counts how often gradients are summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func) and str(func).startswith("c10d")
        return func(*args, **(kwargs or {}))


def accumulated(family: str, parts: list[str], reduce: str, axes: dict[str, int]) -> Any:
    """On a rank: gradients of three micro-batches, how many exchanges each made, and logits beside them."""
    mesh, stock = sb.Mesh(**axes), make(family)
    if parts:
        freeze(stock, parts)
    model = sb.parallelize(stock, mesh, memory=MemoryOptions(reduce_gradients=reduce))  # type: ignore[arg-type]
    batches = [sb.pack(samples, stock.config, mesh) for samples in micro_batches(family, stock.config)]
    total = sum(batch.label_tokens for batch in batches)
    counts = []
    for number, batch in enumerate(batches):
        with Exchanges() as found, model.accumulating(last=number == len(batches) - 1):
            model(batch, label_tokens=total).loss.backward()
        counts.append(found.count)
    with torch.no_grad():
        logits = model.logits(batches[0])
    return whole(stock), counts, logits


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", []),
        ("llama", ["embeddings", r"re:layers\.0\."]),
        ("llama tied", []),
        ("qwen3_5_moe", []),
        ("qwen3_vl", []),
        ("qwen3_vl", ["vision"]),
        (AUDIO, []),
        (AUDIO, ["vision", "merger", "audio", "embeddings"]),
    ],
)
def test_gradients_are_those_of_one_process_reduced_each_time_or_once(family: str, parts: list[str]) -> None:
    expected, none, logits = accumulated(family, parts, "each", {})
    assert none == [0, 0, 0]
    size = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for reduce in ("each", "once"):
        for found, counts, seen in ranks.run(accumulated, 2, family, parts, reduce, {"ring": 2}):
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                # One that is zero in exact arithmetic is noise.
                error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * size)
                assert error < 5e-5, (name, float(error), reduce)
            assert counts[-1] > 0 and counts[:-1] == ([counts[-1]] * 2 if reduce == "each" else [0, 0])
            for ours, theirs in zip(seen, logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
