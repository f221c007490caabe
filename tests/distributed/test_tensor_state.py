"""What is saved of a model that is cut over `tp`: stock names and shapes, each tensor once, on any mesh."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, _redistribute
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

TWO_KINDS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_5": TWO_KINDS,
    # The loss of routers is that of a row, and the data ranks of one mesh pack rows of their own.
    "qwen3_moe": {"output_router_logits": False, "tie_word_embeddings": True},
}
"""The first and the last one tied; the second with matrices of which a rank uses some rows in sections."""

WITHOUT = {"dp_shard": 2, "ulysses": 2}


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def trained(family: str, axes: dict[str, int], folder: str, steps: list[int], resume: bool) -> Trained:
    """On a rank: losses and gradient norms, weights and the optimizer's state after some steps; saved after
    the second step.
    """
    mesh, stock = sb.Mesh(**axes), tiny_model(family, **CHANGES[family])
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
    if not resume:
        model.save_pretrained(Path(folder) / "stock")
    return numbers, {name: whole(p) for name, p in stock.named_parameters()}, state


Case = tuple[str, dict[str, int], list[dict[str, int]]]

CASES: list[Case] = [
    ("qwen3_5", {"ring": 2, "tp": 2}, [WITHOUT]),
    ("qwen3_moe", {"ring": 2, "tp": 2, "ep": 2}, [WITHOUT, {"ring": 2, "tp": 2, "ep": 2}]),
]
"""Where a run is saved, and where it goes on; `shared_grid.py` has others."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_from_tp_on_another_mesh_and_the_same(tmp_path: Path, case: Case) -> None:
    family, there, others = case
    folder = str(tmp_path)
    numbers, weights, state = ranks.run(trained, 4, family, there, folder, [0, 1, 2], False)[0]
    for here in others:
        for found in ranks.run(trained, 4, family, here, folder, [2], True):
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
    assert_exported(family, tmp_path / "stock", weights)


def assert_exported(family: str, folder: Path, weights: dict[str, Tensor]) -> None:
    """By the run that was saved."""
    exported = AutoModelForCausalLM.from_pretrained(folder)
    loaded = dict(exported.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    source = tiny_model(family, **CHANGES[family])
    source.load_state_dict(weights, strict=False)
    ids = random_samples([20], 97)[0]["input_ids"][None]
    assert torch.equal(exported(input_ids=ids).logits, source(input_ids=ids).logits)


def gathered(family: str, axes: dict[str, int]) -> tuple[list[str], set[str], list[str]]:
    """What of the full state is otherwise than in the stock model; how parts lie; and what torch warns of."""
    warned: list[str] = []
    listens = logging.Handler()
    listens.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    stock = tiny_model(family)
    before = {name: x.detach().clone() for name, x in stock.state_dict().items()}
    model = sb.parallelize(stock, sb.Mesh(**axes))
    _redistribute._warned_flatten_issues.clear()  # it says so once a process
    _redistribute.logger.addHandler(listens)
    try:
        found = model.full_state()
        head = model.head_weight()
    finally:
        _redistribute.logger.removeHandler(listens)
    assert torch.equal(head, before["lm_head.weight"])
    assert found.keys() == (before.keys() if model.mesh.rank == 0 else set())
    lies = {str(p.placements) for p in stock.parameters() if isinstance(p, DTensor)}
    return [name for name in found if not torch.equal(found[name], before[name])], lies, warned


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", {"tp": 2, "dp_shard": 2}),
        ("qwen3_5", {"tp": 2, "dp_shard": 3}),
        ("qwen3_moe", {"dp_shard": 4, "ep": 2}),
    ],
    ids=str,
)
def test_parts_are_gathered_without_a_warning(family: str, axes: dict[str, int]) -> None:
    for differ, lies, warned in ranks.run(gathered, prod(axes.values()) // axes.get("ep", 1), family, axes):
        assert not differ and not warned
        assert any("_StridedShard" in one for one in lies) or "ep" in axes
