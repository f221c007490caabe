"""Ranks, and a run and its resume, have the same model: config, tokenizer, template, processor, revision."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest

from seqbraid.data.tiny import tiny_training_model
from seqbraid.train import identity, trainer
from seqbraid.train.config import DataConfig, LogConfig, MeshConfig, StepConfig, TrainConfig
from seqbraid.train.config_file import load_config
from seqbraid.train.run_folder import versions
from seqbraid.train.setup import make_mesh
from seqbraid.train.trainer import Trainer
from seqbraid.train.weights import checkpoint_folder, split_revision
from tests.helpers.ranks import errors

RECORD = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder with all that can differ."""
    folder = tmp_path_factory.mktemp("models") / "model"
    stock, processor = tiny_training_model("qwen3_vl")
    stock.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def config(folder: Path, model: Path | str, **changes: object) -> TrainConfig:
    (folder / "data.jsonl").write_text(json.dumps(RECORD) + "\n")
    data = DataConfig(train=str(folder / "data.jsonl"), row_tokens=64, workers=0)
    base = TrainConfig(
        model=str(model), out=str(folder / "run"), precision="float32", data=data,
        train=StepConfig(steps=1, batch_tokens=64), log=LogConfig(sinks=[]),
    )  # fmt: skip
    return replace(base, **changes).check()  # type: ignore[arg-type]


def train(config: TrainConfig, other: Path | None = None) -> None:
    """A run on this rank; the second one may have another model."""
    if other is not None and os.environ["RANK"] == "1":
        config = replace(config, model=str(other))
    Trainer(config, make_mesh(config)).run()


def _edit(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    def edit(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        change(values)
        (folder / file).write_text(json.dumps(values))

    return edit


def _permute(values: dict) -> None:  # type: ignore[type-arg]
    vocab = values["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "epsilon": (
        _edit("config.json", lambda values: values["text_config"].update(rms_norm_eps=1e-3)),
        "config text_config.rms_norm_eps",
    ),
    "ids": (_edit("tokenizer.json", _permute), "file tokenizer.json"),
    "template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        "file chat_template.jinja",
    ),
    "pixels": (
        _edit("processor_config.json", lambda values: values["image_processor"].update(rescale_factor=0.5)),
        "file processor_config.json",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_ranks_with_other_models_refuse_together(model: Path, tmp_path: Path, case: str) -> None:
    edit, message = EDITS[case]
    shutil.copytree(model, tmp_path / "other")
    edit(tmp_path / "other")
    for error in errors(train, 2, config(tmp_path, model, mesh=MeshConfig(ring=2)), tmp_path / "other"):
        assert re.match(f"rank 1 has {message} = ", error.message), error.message
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def train_with_another_torch(config: TrainConfig) -> None:
    """A run on this rank; that of the second one has another version."""
    found = {**versions(), **({"torch": "2.10.0"} if os.environ["RANK"] == "1" else {})}
    with mock.patch.object(identity, "versions", lambda: found):
        train(config)


def test_ranks_with_other_versions_refuse_together(model: Path, tmp_path: Path) -> None:
    for error in errors(train_with_another_torch, 2, config(tmp_path, model, mesh=MeshConfig(ring=2))):
        assert "rank 1 has version of torch = '2.10.0' but rank 0 has " in error.message


def test_a_resume_says_what_is_otherwise_besides_settings(model: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(json.dumps(RECORD) + "\n")
    settings = config(tmp_path, model)
    settings = replace(settings, data=replace(settings.data, eval=str(tmp_path / "eval.jsonl")))
    train(settings)
    longer = replace(settings, train=replace(settings.train, steps=2))
    (tmp_path / "eval.jsonl").write_text(2 * (json.dumps(RECORD) + "\n"))
    with mock.patch.object(trainer, "versions", lambda: {**versions(), "torch": "2.10.0"}):
        train(longer)
    records = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    said = [record["what"] for record in records if record.get("event") == "changed"]
    assert any(line.startswith(f"torch is 2.10.0, was {versions()['torch']}: ") for line in said)
    assert any(line.startswith("data.eval: eval.jsonl changed: evaluations before and") for line in said)


def test_a_run_does_not_go_on_with_a_model_that_was_edited(model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, tmp_path / "model")
    shutil.copytree(model, tmp_path / "model")
    train(settings)
    longer = replace(settings, train=replace(settings.train, steps=2))
    for edit, message in EDITS.values():
        shutil.rmtree(tmp_path / "model")
        shutil.copytree(model, tmp_path / "model")
        edit(tmp_path / "model")
        with pytest.raises(ValueError, match=f"step-00000001 was trained with {message} = .*restore it"):
            train(longer)
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(model, tmp_path / "model")
    _edit("config.json", lambda values: values.update(transformers_version="6.0"))(tmp_path / "model")
    train(longer)
    assert (tmp_path / "run/checkpoints/last").read_text().strip() == "step-00000002"


def test_a_run_keeps_the_revision_of_the_hub_that_it_began_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    first, second = "1" * 40, "2" * 40
    for revision in (first, second):
        shutil.copytree(model, repository / "snapshots" / revision)
    _edit("config.json", lambda values: values.update(pad_token_id=7))(repository / "snapshots" / second)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(first)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_folder("owner/name").name == first
    assert checkpoint_folder(f"owner/name@{second}").name == second
    settings = config(tmp_path, "owner/name")
    train(settings)
    assert load_config(tmp_path / "run/config.yaml").model == f"owner/name@{first}"
    (repository / "refs/main").write_text(second)
    train(replace(settings, train=replace(settings.train, steps=2)))
    assert load_config(tmp_path / "run/config.yaml").model == f"owner/name@{first}"
    with pytest.raises(ValueError, match=f"model='owner/name@{first}', not 'owner/name@{second}'"):
        train(replace(settings, model=f"owner/name@{second}"))
    train(replace(settings, out=str(tmp_path / "new")))
    assert load_config(tmp_path / "new/config.yaml").model == f"owner/name@{second}"


def test_a_folder_may_have_an_at_sign_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a@b").mkdir()
    assert split_revision(tmp_path / "a@b") == (str(tmp_path / "a@b"), None)
    assert checkpoint_folder(tmp_path / "a@b") == tmp_path / "a@b"
