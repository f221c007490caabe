"""Norms, optimizer, weights and checkpoints of experts over ranks: each number once, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from seqbraid import Mesh, pack, parallelize
from seqbraid.distributed.gradients import clip_grad_norm_, clip_gradients, gradient_norm
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.estimate import memory_estimate
from seqbraid.plan.units import Units
from seqbraid.train.checkpoint.checkpoints import Checkpoints
from seqbraid.train.config import StepConfig
from seqbraid.train.optimizer import (
    make_optimizer,
)
from tests.helpers import ranks
from tests.train.test_checkpoint import STATE, build, differences, save_on, whole

MESHES: list[dict[str, int]] = [
    {"dp_replicate": 2, "ring": 2, "ep": 2},
    {"dp_shard": 2, "ulysses": 2, "ep": 4},
    {"dp_replicate": 2, "tp": 2, "ep": 2},
]
"""`shared_grid.py` has others."""


def size_of(axes: dict[str, int]) -> int:
    return int(torch.tensor([size for axis, size in axes.items() if axis != "ep"]).prod())


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def stepped(axes: dict[str, int], dtype: torch.dtype) -> Any:
    """On a rank: the norm of a gradient, and the weights after two clipped steps on it."""
    mesh = Mesh(**axes)
    model = parallelize(tiny_model("qwen3_moe", dtype=dtype), mesh)
    optimizer = make_optimizer(model, StepConfig(lr=1e-2))
    norms = []
    for _ in range(2):
        data = random_samples([40, 9, 30, 21], 97)[mesh.data_rank :: mesh.data_world_size]
        model(pack(data, model.model.config, mesh)).loss.backward()
        gradients = list(optimizer.gradients().values())
        norms.append(gradient_norm(gradients, mesh))
        clip_gradients(gradients, norms[-1], norms[-1] / 2)
        norms.append(gradient_norm(gradients, mesh))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.has_masters == (dtype == torch.bfloat16)
    return norms, {name: full(p) for name, p in model.model.named_parameters()}


def clipped() -> Any:
    mesh = Mesh(dp_shard=2, ep=2)
    model = parallelize(tiny_model("qwen3_moe"), mesh)
    data = random_samples([40, 9, 30, 21], 97)[mesh.data_rank :: 2]
    model(pack(data, model.model.config, mesh)).loss.backward()
    torchs = False
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except Exception:
        torchs = True
    found = [clip_grad_norm_(model, 0.1), clip_grad_norm_(model, 0.1)]
    whole = torch.stack([full(p.grad).norm() for p in model.parameters() if p.grad is not None]).norm()
    return torchs, found, float(whole)


def test_own_loops_clip_where_torch_raises() -> None:
    for torchs, (before, after), norm in ranks.run(clipped, 2):
        assert torchs and before > 0.1 and after == pytest.approx(0.1) == pytest.approx(norm)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_each_part_of_the_gradient_counts_once_and_is_stepped_on(axes: dict[str, int]) -> None:
    # The routers' loss is that of a row, and a data rank has one of its own.
    own = {axis: size for axis, size in axes.items() if axis.startswith("dp")}
    norms, weights = ranks.run(stepped, size_of(own), own, torch.float32)[0]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)
    for found_norms, found in ranks.run(stepped, size_of(axes), axes, torch.float32):
        assert found_norms == pytest.approx(norms, rel=1e-4)
        for name, weight in weights.items():
            # Adam's step is about its rate wherever a gradient is noise.
            assert (found[name] - weight).norm() < 2e-3 * weight.norm(), name


def shards() -> list[tuple[str, list[int], list[int]]]:
    mesh = Mesh(ring=4, ep=2)
    model = parallelize(tiny_model("qwen3_moe"), mesh)
    found = Units.of(model.parts, mesh.ep)
    return [
        (unit.axes, [p.to_local().numel() for p in found.own(unit)], [p.numel() for p in found.own(unit)])  # type: ignore[attr-defined]
        for unit in found.units
        if unit.name in ("layer 0", "experts 0")
    ]


def test_a_rank_holds_its_share_of_its_experts() -> None:
    for layer, experts in ranks.run(shards, 4):
        assert layer[0] == "fsdp" and experts[0] == "efsdp"
        assert [4 * n for n in experts[1]] == experts[2]


def estimated(experts: int, axes: dict[str, int]) -> tuple[int, int]:
    mesh, model = Mesh(**axes), tiny_model("qwen3_moe", num_experts=experts)
    ours = memory_estimate(model, mesh, None, "float32", "adamw", 64)
    braided = parallelize(model, mesh)
    return ours["parameters"], sum(p.to_local().nbytes for p in braided.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("experts", [2, 6])  # one of a rank over two, and three
def test_the_estimate_is_what_the_fullest_rank_holds(experts: int) -> None:
    found = ranks.run(estimated, 4, experts, {"ring": 4, "ep": 2})
    assert {estimate for estimate, _ in found} == {max(held for _, held in found)}


def loaded(folder: str, axes: dict[str, int]) -> dict[str, Any]:
    mesh = Mesh(**axes)
    model, optimizer = build(mesh, "qwen3_moe", 1)
    checkpoints = Checkpoints(Path(folder), mesh)
    path = checkpoints.last()
    assert path is not None and checkpoints.load(path, model, optimizer) == STATE
    return whole(model, optimizer)


SAVED: list[tuple[dict[str, int], list[dict[str, int]]]] = [
    ({"ring": 4, "ep": 2}, [{"dp_shard": 2, "ulysses": 2}, {"ring": 4, "ep": 4}]),
    ({"dp_shard": 2}, [{"dp_replicate": 2, "ring": 2, "ep": 2}]),
]


@pytest.mark.parametrize(("there", "others"), SAVED, ids=str)
def test_what_one_mesh_saves_another_loads(
    tmp_path: Path, there: dict[str, int], others: list[dict[str, int]]
) -> None:
    folder = str(tmp_path)
    saved, *_ = ranks.run(save_on, size_of(there), folder, there, "qwen3_moe", {})
    assert all(tuple(x.shape) == tuple(p.shape) for x, p in _experts(saved))
    for here in others:
        for found in ranks.run(loaded, size_of(here), folder, here):
            assert differences(saved, found) == [], here


def _experts(saved: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    named = dict(tiny_model("qwen3_moe").named_parameters())
    found = [(x, named[name.removeprefix("model.")]) for name, x in saved.items() if name.endswith("_proj")]
    assert len(found) == 4
    return found


def exported(folder: str, axes: dict[str, int], family: str) -> list[Tensor]:
    mesh = Mesh(**axes)
    model = parallelize(tiny_model(family), mesh)
    model.save_pretrained(folder)
    samples = random_samples([9, 20], 97)
    return model.logits(pack(samples, model.model.config, mesh))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stock_loads_what_ep_exports(tmp_path: Path, family: str) -> None:
    axes = {"dp_replicate": 2, "ulysses": 2, "ep": 2}
    found, *_ = ranks.run(exported, 4, str(tmp_path), axes, family)
    stock, source = AutoModelForCausalLM.from_pretrained(tmp_path), tiny_model(family)
    state = stock.state_dict()
    assert state.keys() == source.state_dict().keys()
    for name, x in source.state_dict().items():
        assert torch.equal(x, state[name]), name
    for sample, logits in zip(random_samples([9, 20], 97), found, strict=True):
        wanted = source(input_ids=sample["input_ids"][None]).logits[0]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
