"""LoRA beside layers that tensor parallel ranks share: gradients of one process, peft's names and shapes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.comm.tokens import scatter_tokens
from seqbraid.distributed import tensor as tensor_module
from seqbraid.models.parts import ModelParts
from seqbraid.models.step import forward_backward
from seqbraid.models.tensor import TensorPlan
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.train.checkpoint.checkpoints import Checkpoints
from seqbraid.train.config import StepConfig
from seqbraid.train.lora import LoraOptions, add_lora, is_adapter, save_adapter
from seqbraid.train.optimizer import make_optimizer
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from seqbraid.verify.verdict import ALLOWANCE
from tests.distributed.test_tensor_state import TWO_KINDS
from tests.helpers import ranks
from tests.train.test_lora import shaken

LENGTHS = (20, 7, 40, 1, 33, 5)
BIASES = {"attention_bias": True, "mlp_bias": True}


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def adapted(family: str, rank: int = 3, learns: str = "adapters", **changes: Any) -> Any:
    """Of a rank that tp need not divide; with adapters that do something."""
    model = tiny_model(family, **changes)
    add_lora(model, LoraOptions(rank=rank, alpha=6.0))
    for p in model.parameters() if learns == "all" else ():
        p.requires_grad_()
    return shaken(model)


def verdict(path: str, family: str, mesh: dict[str, int], options: dict[str, Any]) -> tuple[bool, str, int]:
    samples, references = torch.load(path, weights_only=False)
    parity = check_parity(adapted(family, **options), samples, Mesh(**mesh), references=references)
    return parity.holds, parity.reason, sum(is_adapter(line.name) for line in parity.lines)


@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("llama", {"tp": 2}, BIASES | {"learns": "all"}),
        ("llama", {"tp": 4}, {"num_key_value_heads": 1}),
        ("qwen3_5", {"ring": 2, "tp": 2}, {}),
        ("qwen3_next", {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_every_adapter_has_the_gradient_of_one_process(
    tmp_path: Path, family: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    model, samples = adapted(family, **options), random_samples(LENGTHS, 97)
    rows = rows_of(len(samples), mesh.get("dp_shard", 1))
    torch.save((samples, stock_references(model, samples, rows)), tmp_path / "references")
    size = math.prod(n for axis, n in mesh.items() if axis != "ep")
    expected = sum(is_adapter(name) for name, _ in model.named_parameters())
    for holds, reason, count in ranks.run(verdict, size, str(tmp_path / "references"), family, mesh, options):
        assert holds and count == expected > 20, reason


def partial_sums_not_summed() -> Any:
    """What A makes of a rank's channels is taken for what it makes of all."""
    wrong = lambda x, group: tensor_module._own(x, group) if x.shape[-1] == 3 else scatter_tokens(x, group)  # noqa: E731
    return patch.object(tensor_module, "scatter_tokens", wrong)


def added_by_every_rank() -> Any:
    """What B makes of a rank's tokens is added to those of the first rank."""
    return patch.object(tensor_module, "_own", lambda x, group: x.narrow(-2, 0, x.shape[-2] // group.size))


def rows_of_the_neighbour() -> Any:
    right = tensor_module._ChosenLinear.__init__

    def wrong(self: Any, linear: Any, chosen: Any) -> None:
        if linear.weight.shape[1] == 3:
            size = chosen[0].rows[0].stop - chosen[0].rows[0].start
            start = (chosen[0].rows[0].start + size) % len(linear.weight)
            chosen = (replace(chosen[0], rows=(slice(start, start + size),)),)
        right(self, linear, chosen)

    return patch.object(tensor_module._ChosenLinear, "__init__", wrong)


def errors_of_defects(path: str) -> list[float]:
    samples, references = torch.load(path, weights_only=False)
    found = []
    for defect in (partial_sums_not_summed, added_by_every_rank, rows_of_the_neighbour):
        with defect():
            parity = check_parity(adapted("llama"), samples, Mesh(tp=2), references=references)
        found.append(parity.worst.ratio)
    return found


def test_defects_of_adapters_are_seen(tmp_path: Path) -> None:
    samples = random_samples(LENGTHS, 97)
    torch.save((samples, stock_references(adapted("llama"), samples)), tmp_path / "references")
    for found in ranks.run(errors_of_defects, 2, str(tmp_path / "references")):
        assert min(found) > 100 * ALLOWANCE, found


def losses_of_changes(axes: dict[str, int]) -> list[float]:
    """As adapters were, taken away for a while, and with another scale."""
    model = sb.parallelize(adapted("llama"), Mesh(**axes))
    batch = sb.pack(random_samples(LENGTHS, 97), model.model.config, model.mesh)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    found = []
    for change in ("none", "off", "on", "scaled"):
        for layer in layers:
            if change == "scaled":
                layer.set_scale("default", 5.0)
            elif change != "none":
                layer.enable_adapters(change == "on")
        with torch.no_grad():
            found.append(float(model(batch).mean_loss))
    layers[0]._active_adapter = []
    with pytest.raises(ValueError, match="not one plain LoRA") if "tp" in axes else nullcontext():
        model(batch)
    return found


def test_adapters_that_are_taken_away_or_scaled_are_so_for_all_ranks() -> None:
    """As for a reference, whose log-probabilities are those of the model without its adapters."""
    (expected,) = ranks.run(losses_of_changes, 1, {})
    with_adapters, without, again, scaled = expected
    assert with_adapters == again and min(abs(with_adapters - x) for x in (without, scaled)) > 0.01
    for found in ranks.run(losses_of_changes, 2, {"tp": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def trained(axes: dict[str, int], folder: str, steps: list[int], resume: bool) -> Trained:
    """On a rank: losses, adapters, and what is saved; a checkpoint of the adapters after the second step."""
    mesh, stock = Mesh(**axes), adapted("qwen3_5", **TWO_KINDS)
    model = sb.parallelize(stock, mesh, memory=MemoryOptions(checkpointing="full", mlp_tile=15))
    optimizer = make_optimizer(model, StepConfig(lr=1e-2))
    checkpoints = Checkpoints(Path(folder), mesh, asynchronous=False, base="the same")
    if resume:
        path = checkpoints.last("must")
        assert path is not None
        checkpoints.load(path, model, optimizer)
    losses = []
    for step in steps:
        samples = random_samples([40, 9, 30], 97, seed=step)[mesh.data_rank :: mesh.data_world_size]
        losses.append(float(forward_backward(model, [sb.pack(samples, stock.config, mesh)]).mean_loss))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and not resume:
            checkpoints.save(step, model, optimizer, {})
    save_adapter(model, Path(folder) / f"adapter {resume}")
    whole = {n: full(p.detach()) for n, p in stock.named_parameters() if is_adapter(n)}
    return losses, whole, load_file(Path(folder) / f"adapter {resume}" / "adapter_model.safetensors")


SAVED: tuple[dict[str, int], list[dict[str, int]]] = (
    {"ring": 2, "tp": 2},
    [{"dp_shard": 2, "ulysses": 2}, {"ring": 2, "tp": 2}],
)
"""Where a run is saved, and where it goes on; `shared_grid.py` has the way back."""


@pytest.mark.parametrize(("there", "others"), [SAVED], ids=str)
def test_adapters_are_saved_and_go_on_anywhere(
    tmp_path: Path, there: dict[str, int], others: list[dict[str, int]]
) -> None:
    folder = str(tmp_path)
    losses, adapters, saved = ranks.run(trained, 4, there, folder, [0, 1, 2], False)[0]
    model = adapted("qwen3_5", **TWO_KINDS)
    stock = {name: p.shape for name, p in model.named_parameters() if is_adapter(name)}
    assert {name: x.shape for name, x in adapters.items()} == stock
    for name, x in adapters.items():
        assert torch.equal(x, saved["base_model.model." + name.replace(".default.", ".")])
    for here in others:
        for found in ranks.run(trained, 4, here, folder, [2], True):
            if here == there:
                assert found[0] == losses[2:]
                assert all(torch.equal(found[1][n], x) for n, x in adapters.items())
            assert found[0] == pytest.approx(losses[2:], rel=1e-5)
            for name, x in adapters.items():
                torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=3e-5)


def tiled(axes: dict[str, int], tile: int | None) -> dict[str, Tensor]:
    mesh, stock = Mesh(**axes), tiny_model("llama", **BIASES)
    for p in stock.parameters():  # stock biases are zero
        p.data += 0.01
    model = sb.parallelize(stock, mesh, memory=MemoryOptions(mlp_tile=tile))
    model(sb.pack(random_samples([50, 13], 97), stock.config, mesh)).loss.backward()
    return {name: full(p.grad) for name, p in stock.named_parameters()}


def test_tiles_of_an_mlp_that_tp_does_not_divide() -> None:
    expected = tiled({}, None)
    for found in ranks.run(tiled, 2, {"tp": 2}, 7):
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < 2e-5 * gradient.norm(), name


def refused_tiles() -> None:
    sb.parallelize(adapted("llama", learns="all"), Mesh(tp=2), memory=MemoryOptions(mlp_tile=8))


def test_tiles_of_an_mlp_that_is_gathered_in_parts_and_learns_are_refused() -> None:
    for error in ranks.errors(refused_tiles, 2):
        assert error.kind == "ValueError"
        assert (
            "mlp_tile=8: the MLP of layer 0 of LlamaForCausalLM is gathered matrix by matrix" in error.message
        )


def with_dora() -> Any:
    model = tiny_model("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), model)
    return model


def with_two() -> Any:
    model = tiny_model("llama")
    for name in ("one", "two"):
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["down_proj"]), model, name)
    return model


def with_a_bias() -> Any:
    model = tiny_model("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["up_proj"], lora_bias=True), model)
    return model


@pytest.mark.parametrize(
    ("make", "name"), [(with_dora, "q_proj"), (with_two, "down_proj"), (with_a_bias, "up_proj")]
)
def test_adapters_of_other_kinds_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} of layer 0 .* is not one plain LoRA, .*; use tp=1"):
        TensorPlan.of(ModelParts.of(make()), 2)
