"""What is saved of a model that is cut over `tp`: stock names and shapes, each tensor once, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import seqbraid as sb
from seqbraid.distributed.gradients import clip_gradients, gradient_norm
from seqbraid.models.step import forward_backward
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.checkpoint.checkpoints import Checkpoints
from seqbraid.train.config import StepConfig
from seqbraid.train.optimizer import make_optimizer
from tests.helpers import ranks

FAMILIES: dict[str, dict[str, int]] = {
    "qwen3": {"ring": 2, "tp": 2},
    "qwen3_5": {"ring": 2, "tp": 2},
    "qwen3_moe": {"ring": 2, "tp": 2, "ep": 2},
}
"""Tied; with matrices of which a rank uses some rows in sections; and with experts over ranks."""

CHANGES: dict[str, dict[str, Any]] = {"qwen3_moe": {"output_router_logits": False}}
"""The loss of routers is that of a row, and the data ranks of one mesh pack rows of their own."""


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def trained(family: str, axes: dict[str, int], folder: str, steps: list[int], resume: bool) -> Trained:
    """On a rank: losses and gradient norms, weights and the optimizer's state after some steps; saved after
    the second step.
    """
    mesh, stock = sb.Mesh(**axes), tiny_model(family, **CHANGES.get(family, {}))
    model = sb.parallelize(stock, mesh)
    optimizer = make_optimizer(model, StepConfig(lr=1e-2))
    checkpoints = Checkpoints(Path(folder), mesh, asynchronous=False)
    if resume:
        path = checkpoints.last("must")
        assert path is not None
        checkpoints.load(path, model, optimizer)
    numbers: list[float] = []
    for step in steps:
        samples = random_samples([40, 9, 30], 97, seed=step)
        out = forward_backward(
            model, [sb.pack(samples[mesh.data_rank :: mesh.data_world_size], stock.config, mesh)]
        )
        gradients = list(optimizer.gradients().values())
        norm = gradient_norm(gradients, mesh)
        clip_gradients(gradients, norm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [float(out.mean_loss), norm]
        if step == 1 and not resume:
            checkpoints.save(step, model, optimizer, {})
    state = {
        f"{name}.{entry}": whole(value)
        for name, p in stock.named_parameters()
        for entry, value in optimizer.state[p].items()
    }
    model.save_pretrained(Path(folder) / "stock")
    return numbers, {name: whole(p) for name, p in stock.named_parameters()}, state


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_from_tp_on_another_mesh_and_back(tmp_path: Path, family: str) -> None:
    tp_and_ring, without = FAMILIES[family], {"dp_shard": 2, "ulysses": 2}
    folder, before, known = "", None, (list[float](), dict[str, Tensor](), dict[str, Tensor]())
    back = [(without, tp_and_ring)] if family == "qwen3_5" else []
    for there, here in (*back, (tp_and_ring, without), (tp_and_ring, tp_and_ring)):
        if there != before:
            folder, before = str(tmp_path / "-".join(there)), there
            known = ranks.run(trained, 4, family, there, folder, [0, 1, 2, 3], False)[0]
        numbers, weights, state = known
        for found in ranks.run(trained, 4, family, here, folder, [2, 3], True):
            if here == there:
                assert found[0] == numbers[4:]
                assert all(torch.equal(found[1][name], weights[name]) for name in weights)
                assert all(torch.equal(found[2][name], state[name]) for name in state)
                continue
            assert found[0] == pytest.approx(numbers[4:], rel=1e-5)
            for ours, theirs in ((found[1], weights), (found[2], state)):
                assert ours.keys() == theirs.keys()
                for name in ours:
                    torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=3e-5)
    exported = AutoModelForCausalLM.from_pretrained(Path(folder) / "stock")
    loaded = dict(exported.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    source = tiny_model(family)
    source.load_state_dict(weights, strict=False)
    ids = random_samples([20], 97)[0]["input_ids"][None]
    assert torch.equal(exported(input_ids=ids).logits, source(input_ids=ids).logits)
