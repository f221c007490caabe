"""Multi-token prediction on any mesh: loss and every gradient are those of one process, sample by sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import seqbraid as sb
from benchmarks.mtp_meshes import AXES, figures
from seqbraid import Mesh
from seqbraid.models.step import forward_backward
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_config, tiny_media_model
from seqbraid.models.tiny.mtp import with_mtp
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.plan.pipeline import PipelineOptions
from seqbraid.train.lora import LoraOptions, add_lora
from seqbraid.verify.exchange import stage_bytes
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from tests.distributed.test_units import whole
from tests.helpers import ranks
from tests.train.test_lora import shaken

LENGTHS = (13, 5, 70, 2, 1, 22, 1, 40, 3)
Changes = dict[str, Any]

TEXT: list[tuple[str, Changes, int, dict[str, int], list[dict[str, Any]]]] = [
    (
        "qwen3_5",
        {"tie_word_embeddings": True},
        3,
        {"ring": 4},
        [{"policy": "zigzag"}, {"policy": "balanced"}],
    ),
    ("qwen3_5", {"tie_word_embeddings": True}, 3, {"ulysses": 4}, [{"policy": "contiguous"}]),
    ("qwen3_5", {"tie_word_embeddings": True}, 3, {"ring": 2, "ulysses": 2}, [{"policy": "zigzag"}]),
    ("qwen3_5", {"tie_word_embeddings": True}, 3, {"tp": 2}, [{}]),
    ("qwen3_5", {"tie_word_embeddings": True}, 3, {"ring": 2, "tp": 2}, [{}]),
    ("qwen3_next", {}, 2, {"ring": 2, "ep": 2}, [{}]),
    ("qwen3_next", {}, 2, {"tp": 2, "ep": 2}, [{}]),
    ("qwen3_next", {}, 2, {"dp_shard": 2}, [{"micro_batches": 2}]),
    ("qwen3_5", {"tie_word_embeddings": True}, 3, {"pp": 2}, [{"micro_batches": 3}]),
    ("qwen3_5", {"tie_word_embeddings": True}, 3, {"pp": 2, "ring": 2}, [{}]),
    ("qwen3_next", {}, 2, {"pp": 2, "tp": 2}, [{}]),
    ("qwen3_next", {}, 2, {"pp": 2}, [{"pipeline": PipelineOptions("interleaved"), "micro_batches": 3}]),
    ("qwen3_5", {"adapted": True}, 2, {"tp": 2}, [{}]),
    ("qwen3_5", {"adapted": True}, 2, {"pp": 2}, [{"micro_batches": 3}]),
    ("qwen3_5", {"mtp_num_hidden_layers": 2}, 3, {"dp_shard": 2, "ring": 2}, [{}]),  # two layers in turn
]


def build(family: str, changes: Changes, depth: int) -> PreTrainedModel:
    if changes.get("media"):
        return with_mtp(tiny_media_model(family), depth)
    if not changes.get("adapted"):
        return with_mtp(tiny_model(family, **changes), depth)
    model = with_mtp(tiny_model(family), depth)
    add_lora(model, LoraOptions(rank=3, alpha=6.0))
    return shaken(model)


def samples_of(family: str, changes: Changes) -> list[dict[str, Any]]:
    if changes.get("media"):
        return mixed_samples(tiny_media_config(family))[:-1]
    return random_samples(LENGTHS, 97, seed=3, ignored="some")


def references(folder: Path, family: str, changes: Changes, depth: int, data: int, micro: int) -> str:
    """Made once by the test process, read by all ranks."""
    path = folder / f"{family}-{depth}-{data}-{micro}-{sorted(changes)}.pt"
    if not path.exists():
        samples = samples_of(family, changes)
        rows = rows_of(len(samples), data, micro)
        torch.save(stock_references(build(family, changes, depth), samples, rows), path)
    return str(path)


def verdicts(
    path: str, family: str, changes: Changes, depth: int, mesh: dict[str, int], cases: list[dict[str, Any]]
) -> list[tuple[bool, Any]]:
    known, found = torch.load(path, weights_only=False), []
    for case in cases:
        parity = check_parity(
            build(family, changes, depth),
            samples_of(family, changes),
            Mesh(**mesh),
            references=known,
            multiple_of=8,
            **case,
        )
        found.append((parity.holds, parity.worst))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize("case", TEXT, ids=lambda case: f"{case[0]}-{case[3]}")
def test_all_depths_equal_each_sample_alone(folder: Path, case: Any) -> None:
    family, changes, depth, mesh, cases = case
    data = mesh.get("dp_shard", 1)
    path = references(folder, family, changes, depth, data, cases[0].get("micro_batches", 1))
    size = math.prod(size for axis, size in mesh.items() if axis != "ep")
    for found in ranks.run(verdicts, size, path, family, changes, depth, mesh, cases):
        for holds, worst in found:
            assert holds, (mesh, worst)


@pytest.mark.parametrize("mesh", [{"ring": 2, "ulysses": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_media_are_predicted_from_as_they_were_seen(folder: Path, mesh: dict[str, int]) -> None:
    changes = {"media": True}
    path = references(folder, "qwen3_5", changes, 2, 1, 1)
    size = math.prod(mesh.values())
    for ((holds, worst),) in ranks.run(
        verdicts, size, path, "qwen3_5", changes, 2, mesh, [{"policy": "zigzag"}]
    ):
        assert holds, worst


def test_every_mesh_of_four_gives_the_numbers_of_one_process() -> None:
    """The table in docs/mtp.md."""
    loss, norm, accepted = figures(Mesh(rank=0, world_size=1))
    for axis in AXES:
        for found in ranks.run(on_an_axis, 4, axis):
            assert found[:2] == pytest.approx((loss, norm), rel=1e-5) and found[2] == accepted, axis


def on_an_axis(axis: str) -> Any:
    return figures(Mesh(**{axis: 4}))


def memory_gradients(options: dict[str, Any], axes: dict[str, int]) -> dict[str, Tensor]:
    model = with_mtp(tiny_model("qwen3_5_moe"), depth=2)
    mesh = Mesh(**axes)
    braided = sb.parallelize(model, mesh, memory=MemoryOptions(**options))
    rows = [random_samples(lengths, 97, seed=3, ignored="some") for lengths in ((40, 3, 1), (2, 1), (70, 9))]
    batches = [sb.pack(row, model.config, mesh, policy="zigzag", mtp_depth=2) for row in rows]
    forward_backward(braided, batches)
    return whole(model)


def test_no_switch_for_memory_changes_a_gradient() -> None:
    expected = memory_gradients({}, {})
    size = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for options, axes in (
        ({"checkpointing": "full", "reduce_gradients": "once", "mlp_tile": 7}, {"ring": 2}),
        ({"checkpointing": "selective", "offload": True, "loss_chunk": 9}, {"ulysses": 2}),
        ({"checkpointing": "full", "offload": True}, {"ring": 2, "tp": 2, "ep": 2}),
    ):
        size_of_mesh = math.prod(n for axis, n in axes.items() if axis != "ep")
        for found in ranks.run(memory_gradients, size_of_mesh, options, axes):
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * size)
                assert error < 5e-5, (name, float(error), options)


def dropped(axes: dict[str, int], options: dict[str, Any], depth: int = 2, seed: int = 5) -> Any:
    """Losses of a step whose adapters drop channels, and the gradients of multi-token prediction."""
    mesh, model = Mesh(**axes), with_mtp(tiny_model("qwen3_5"), depth=depth)
    add_lora(model, LoraOptions(rank=3, alpha=6.0, targets="all-linear", dropout=0.3))
    braided = sb.parallelize(shaken(model), mesh, memory=MemoryOptions(**options))
    rows = [random_samples(lengths, 97, seed=3) for lengths in ((30, 2, 1), (9, 4))]
    batches = [sb.pack(row, model.config, mesh, mtp_depth=depth) for row in rows]
    out = forward_backward(braided, batches, seed=seed)
    found = {name: gradient for name, gradient in whole(model).items() if name.startswith("mtp.")}
    return float(out.mean_loss), float(out.mtp_loss), found  # type: ignore[arg-type]


def test_dropout_of_all_depths_is_the_same_on_every_mesh() -> None:
    ((loss, of_depths, gradients),) = ranks.run(dropped, 1, {}, {})
    ((_, other, _),) = ranks.run(dropped, 1, {}, {}, 2, 6)
    assert abs(of_depths - other) > 1e-3 * of_depths and gradients
    for axes, options in (
        ({"ring": 2}, {"checkpointing": "full"}),
        ({"tp": 2}, {"checkpointing": "selective"}),
        ({"pp": 2}, {"mlp_tile": 7}),
    ):
        found = ranks.run(dropped, 2, axes, options)
        for mine in found:
            assert mine[:2] == pytest.approx((loss, of_depths), rel=1e-5), axes
        assert found[-1][2].keys() == gradients.keys()  # of the last stage
        for name, gradient in gradients.items():
            assert (found[-1][2][name] - gradient).norm() < 1e-4 * gradient.norm(), (axes, name)


def test_each_depth_drops_other_channels() -> None:
    """One layer serves both."""
    model = with_mtp(tiny_model("qwen3_5"), depth=2)
    model.mtp.fc = torch.nn.Sequential(model.mtp.fc, torch.nn.Dropout(0.5))
    braided, kept = sb.parallelize(model), []
    model.mtp.fc[1].register_forward_hook(lambda _, __, out: kept.append(out != 0))
    batch = sb.pack(random_samples((30,), 97), model.config, mtp_depth=2)
    forward_backward(braided, [batch], seed=1)
    first, second = kept
    assert 0.4 < (first == second).double().mean() < 0.6


def saved_by_stages(folder: Path) -> dict[str, int]:
    """And what a rank has sent."""
    model = build("qwen3_5", {"tie_word_embeddings": True}, 2)
    mesh = Mesh(pp=2)
    braided = sb.parallelize(model, mesh, pipeline=PipelineOptions("interleaved"))
    rows = [random_samples(lengths, 97, seed=3) for lengths in ((30, 2, 1), (9, 4))]
    forward_backward(braided, [sb.pack(row, model.config, mesh, mtp_depth=2) for row in rows])
    braided.save_pretrained(folder)
    return dict(braided.groups["pp"].sent)


def test_stages_save_each_tensor_once_and_send_what_the_formula_says(tmp_path: Path) -> None:
    sent = ranks.run(saved_by_stages, 2, tmp_path)
    # Rank 0 has the first and the third of four stages, rank 1 the others: two ways on, and one back.
    one_way = stage_bytes(33, 32, 4, mtp=True) + stage_bytes(13, 32, 4, mtp=True)
    assert [of_rank["activations"] for of_rank in sent] == [2 * one_way, one_way]
    assert [of_rank["activation gradients"] for of_rank in sent] == [one_way, 2 * one_way]
    found: dict[str, Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    wanted = dict(build("qwen3_5", {"tie_word_embeddings": True}, 2).named_parameters())
    assert found.keys() == wanted.keys() and "lm_head.weight" not in found
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
