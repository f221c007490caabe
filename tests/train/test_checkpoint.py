"""Checkpoints come back bit for bit, on any mesh, after any kill, and nothing is pickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqbraid import Mesh, pack, parallelize
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.checkpoint import files
from seqbraid.train.checkpoint.checkpoints import Checkpoints, Published
from tests.helpers import ranks
from tests.helpers.checkpoints import (
    STATE,
    build,
    differences,
    no_pickle,
    prepare,
    published,
    save,
    train,
    whole,
)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3_5", {}), ("llama", {"dtype": torch.bfloat16, "tie_word_embeddings": True})],
)
def test_round_trip_is_bit_for_bit_and_unpickles_nothing(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    mesh = Mesh()
    model, optimizer = build(mesh, family, 0, **changes)
    train(mesh, model, optimizer)
    saved = whole(model, optimizer)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", mesh)
    with no_pickle():
        checkpoints.save(2, model, optimizer, STATE)
        with torch.no_grad():  # the copy was taken: what training does now must not show
            for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                if isinstance(tensor, Tensor):
                    tensor.fill_(7)
        (event,) = checkpoints.finish()
        assert isinstance(event, Published) and event.step == 2
        other, fresh = build(mesh, family, 1, **changes)
        assert checkpoints.last() == event.path
        assert checkpoints.load(event.path, other, fresh) == STATE
    assert differences(saved, whole(other, fresh)) == []
    assert [p.dtype for p in other.parameters()] == [p.dtype for p in model.parameters()]
    train(mesh, other, fresh)  # the restored optimizer is one that can step
    for path in event.path.iterdir():
        # A pickle starts with the opcode PROTO (0x80), a zip of torch.save with "PK".
        assert path.suffix in (".json", ".safetensors") and path.read_bytes()[:1] not in (b"\x80", b"P")
    with safe_open(event.path / "rank-00000.safetensors", framework="pt") as tensors:
        keys = set(tensors.keys())
    assert ("model.model.lm_head.weight" in keys) != changes.get("tie_word_embeddings", False)


def test_saving_a_fresh_optimizer_leaves_it_fresh(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, steps=0, asynchronous=False)
    checkpoints.save(0, model, optimizer, {})
    assert not optimizer.state
    other, trained = build(Mesh(), "llama", 1)
    train(Mesh(), other, trained)
    checkpoints.load(checkpoints.last(), other, trained)
    assert not trained.state and differences(whole(model, optimizer), whole(other, trained)) == []


# Meshes.

TWO_HEADS = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
"""Some parameters have two rows then, which do not reach all of four ranks."""


def save_on(folder: str, sizes: dict[str, int], family: str, changes: dict[str, Any]) -> dict[str, Any]:
    mesh = Mesh(**sizes)
    model, optimizer = build(mesh, family, 0, **changes)
    train(mesh, model, optimizer)
    with torch.no_grad():
        model(
            pack(random_samples([8], 97), model.model.config, mesh)
        )  # leaves the root's parameters gathered
    save(Checkpoints(Path(folder), mesh), model, optimizer)
    return whole(model, optimizer)


def load_on(
    folder: str, sizes: dict[str, int], family: str, changes: dict[str, Any], again: str | None
) -> dict[str, Any]:
    """Load, and save again from this mesh if there is a folder for that."""
    mesh = Mesh(**sizes)
    model, optimizer = build(mesh, family, 1, **changes)
    checkpoints = Checkpoints(Path(folder), mesh)
    path = checkpoints.last()
    assert path is not None
    with no_pickle():
        assert checkpoints.load(path, model, optimizer) == STATE
    if again is not None:
        second = Checkpoints(Path(again), mesh)
        save(second, model, optimizer)
        held = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
        assert (0 in held) == (mesh.rank >= 2)
    return whole(model, optimizer)


def test_what_one_mesh_saves_another_loads_and_saves_again(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    case = ("qwen3_5", TWO_HEADS)
    saved, *_ = ranks.run(save_on, 2, first, {"ring": 2}, *case)
    for found in ranks.run(load_on, 4, first, {"dp_shard": 2, "ulysses": 2}, *case, second):
        assert differences(saved, found) == []
    for folder in (first, second):
        assert differences(saved, load_on(folder, {}, *case, None)) == []


def test_copies_of_a_replicated_model_are_written_once_and_by_all_ranks(tmp_path: Path) -> None:
    case = ("llama", {"dtype": torch.bfloat16})
    saved, *_ = ranks.run(save_on, 4, str(tmp_path), {"dp_replicate": 2, "ring": 2}, *case)
    assert differences(saved, load_on(str(tmp_path), {}, *case, None)) == []
    index = json.loads((tmp_path / "step-00000002" / "index.json").read_text())
    parts = [sizes for entry in index.values() for _, _, sizes in entry["chunks"]]
    whole_size = sum(torch.Size(entry["shape"]).numel() for entry in index.values())
    assert sum(torch.Size(sizes).numel() for sizes in parts) == whole_size
    on_disk = [path.stat().st_size for path in (tmp_path / "step-00000002").glob("rank-*.safetensors")]
    assert len(on_disk) == 4 and max(on_disk) < 2 * min(on_disk)


# What does not fit is refused, with its name.


def test_a_damaged_checkpoint_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, asynchronous=False)
    checkpoints.save(2, model, optimizer, STATE)
    path = checkpoints.last()
    before = whole(model, optimizer)
    for name in sorted(os.listdir(path)):
        original = (path / name).read_bytes()
        damaged = bytearray(original)
        damaged[len(damaged) // 2] ^= 1
        (path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            checkpoints.load(path, model, optimizer)
        (path / name).write_bytes(original[:-1])
        with pytest.raises(ValueError, match=name):
            checkpoints.load(path, model, optimizer)
        with pytest.raises(ValueError, match=name):
            checkpoints.last()
        (path / name).unlink()
        with pytest.raises(ValueError, match=name):
            checkpoints.load(path, model, optimizer)
        (path / name).write_bytes(original)
    manifest = (path / files.MANIFEST).read_bytes()
    for place in range(len(manifest)):  # a digit that turns into another is still JSON
        damaged = bytearray(manifest)
        damaged[place] ^= 1
        (path / files.MANIFEST).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"complete\.json is damaged"):
            files.read_manifest(path)
    (path / files.MANIFEST).write_bytes(manifest)
    assert differences(before, whole(model, optimizer)) == []
    checkpoints.load(path, model, optimizer)


def test_a_model_or_optimizer_that_does_not_fit_is_refused_untouched(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, asynchronous=False)
    checkpoints.save(2, model, optimizer, STATE)
    path = checkpoints.last()
    cases = [
        ({"num_hidden_layers": 3}, "is missing model.model.model.layers.2"),
        ({"intermediate_size": 64}, r"model.model.model.layers.0.mlp.gate_proj.weight has shape \[64, 32\]"),
        ({"attention_bias": True}, "is missing model.model.model.layers.0.self_attn.k_proj.bias"),
        ({"tie_word_embeddings": True}, "has model.model.lm_head.weight, unknown"),
        ({"dtype": torch.bfloat16}, "embed_tokens.weight is torch.bfloat16, in the checkpoint torch.float32"),
    ]
    for changes, message in cases:
        dtype = changes.get("dtype", torch.float32)
        other = parallelize(
            tiny_model("llama", 1, dtype, **{k: v for k, v in changes.items() if k != "dtype"})
        )
        with pytest.raises(ValueError, match=message):
            checkpoints.load(path, other, None)
    other, fresh = build(Mesh(), "llama", 1)
    frozen = dict(other.named_parameters())["model.lm_head.weight"]
    before = whole(other, fresh)
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match=r"does not train model.lm_head.weight; the saved one did"):
        checkpoints.load(path, other, fresh)
    assert differences(before, whole(other, fresh)) == []
    with pytest.raises(ValueError, match="not the model's"):
        checkpoints.load(path, other, optimizer)
    checkpoints.save(3, model, None, {})
    with pytest.raises(ValueError, match="has no optimizer state"):
        checkpoints.load(tmp_path / "step-00000003", model, optimizer)
    with pytest.raises(ValueError, match=r"state.loader has the key 3"):
        checkpoints.save(4, model, optimizer, {"loader": {3: 4}})
    with pytest.raises(ValueError, match=r"state.rng\[0\] is a Tensor"):
        checkpoints.save(4, model, optimizer, {"rng": [torch.zeros(1)]})


def test_frozen_parameters_of_known_weights_are_left_out(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, asynchronous=False, base="these")
    (frozen,) = (name for name, p in model.named_parameters() if not p.requires_grad)
    checkpoints.save(2, model, optimizer, STATE)
    path = tmp_path / "step-00000002"
    saved = json.loads((path / "index.json").read_text())
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert {key for key in saved if key.startswith("model.")} == trained
    assert f"model.{frozen}" not in saved

    again, fresh = build(Mesh(), "llama", 1)
    own = dict(again.named_parameters())[frozen].detach().clone()
    before = whole(again, fresh)
    for base in (None, "others"):
        with pytest.raises(ValueError, match=r"on the base weights these but the model has (unknown|others)"):
            Checkpoints(tmp_path, Mesh(), base=base).load(path, again, fresh)
    assert differences(before, whole(again, fresh)) == []
    Checkpoints(tmp_path, Mesh(), base="these").load(path, again, fresh)
    assert differences(whole(model, optimizer), whole(again, fresh)) == [frozen]
    assert torch.equal(dict(again.named_parameters())[frozen], own)

    # What was saved whole is loaded whole.
    Checkpoints(tmp_path, Mesh(), asynchronous=False).save(3, model, optimizer, STATE)
    Checkpoints(tmp_path, Mesh(), base="others").load(tmp_path / "step-00000003", again, fresh)
    assert differences(whole(model, optimizer), whole(again, fresh)) == []


# Retention and pointers.


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints, model, _ = prepare(tmp_path, steps=0, keep=2)
    for step in (10, 20, 30, 40, 50):
        checkpoints.save(step, model, None, {"step": step})
        if step == 20:
            checkpoints.mark_best(20)
    checkpoints.finish()
    assert published(tmp_path) == [20, 40, 50] and (tmp_path / "best").read_text() == "step-00000020\n"
    with pytest.raises(ValueError, match="step 10 has no checkpoint"):
        checkpoints.mark_best(10)
    checkpoints.mark_best(50)
    assert files.pointed(tmp_path, "best") == tmp_path / "step-00000050"
    # Set back to an earlier step, the run's new checkpoints are the newest, whatever their numbers.
    checkpoints.load(tmp_path / "step-00000020", model, None)
    checkpoints.save(25, model, None, {"step": 25})
    checkpoints.save(50, model, None, {"step": 50, "again": True})
    checkpoints.finish()
    assert checkpoints.last() == tmp_path / "step-00000050" and published(tmp_path) == [25, 50]
    assert checkpoints.load(tmp_path / "step-00000050", model, None) == {"step": 50, "again": True}
    files.retain(tmp_path, 1, protected=["step-00000025"])  # as one that is being loaded
    assert published(tmp_path) == [25, 50]
    files.retain(tmp_path, 1, protected=[])
    assert published(tmp_path) == [50]
    # Without a pointer the one published last; what a torn one would have named is not guessed.
    for torn in (b"step-000", b"", b"../step-00000050", b"step-00000099", b"\xff"):
        (tmp_path / "last").write_bytes(torn)
        with pytest.raises(ValueError, match="last names"):
            checkpoints.last()
        assert checkpoints.last("latest-intact") == tmp_path / "step-00000050"
    (tmp_path / "last").unlink()
    assert checkpoints.last() == tmp_path / "step-00000050"
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "step-00000060.tmp").mkdir()
    assert checkpoints.last() is not None and (tmp_path / "mine.tmp").exists()
    assert not (tmp_path / "step-00000060.tmp").exists()
