"""The model card of an export: a header that the Hub reads, what the run was, and a picture of its curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from huggingface_hub import ModelCard

from seqbraid.cli import main
from seqbraid.data.tiny import tiny_training_model
from seqbraid.mesh import Mesh
from seqbraid.models.braided import BraidedModel
from seqbraid.train.after.card import card_text
from seqbraid.train.after.load import Trained
from seqbraid.train.config import CheckpointConfig, DataConfig, LoraConfig, StepConfig, TrainConfig
from tests.helpers.ranks import run
from tests.helpers.runs import RING, config, logged, train


def test_an_export_has_a_card_with_its_curves(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"steps": 4, "eval_every": 2, "lr": 3e-3, "weight_decay": 0.1}
    kept = CheckpointConfig(every=2, keep=9)
    settings = config(folder, tmp_path / "run", train=step, evaluated=True, mesh=RING, checkpoint=kept)
    run(train, 2, settings)
    assert main(["export", settings.out, "--checkpoint", "2", "--out", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "README.md", "curves.svg"):
        assert (out / name).is_file(), name
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["seqbraid"] and card.data.base_model is None  # a tiny model has no name there
    text = card.text
    losses, evals = logged(settings, "loss"), logged(settings, "eval_loss")
    for wanted in (
        "# out", "from `tiny:qwen3`, 2 optimizer steps", "| source 1 | `text.jsonl` |", "ring=2",
        "| optimizer | `torch.optim.AdamW` |", "| peak learning rate | 0.003 |", "| weight decay | 0.1 |",
        f"| training loss | {losses[1]:.4f} (step 2) |",
        f"| loss on held-out data | {evals[0]:.4f} (step 2) |",
        "![Curves of the run](curves.svg)", "| transformers | ", "| precision | float32 |",
    ):  # fmt: skip
        assert wanted in text, (wanted, text)
    assert str(tmp_path) not in text and str(folder) not in text  # nobody's folders
    picture = ET.parse(out / "curves.svg").getroot()
    curves = [e.get("data-series") for e in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert curves == ["run", "run, eval", "run", "run, eval", "run", "run"]


def test_the_header_names_models_and_data_of_the_hub() -> None:
    model = tiny_training_model("qwen3_vl")[0]
    data = DataConfig(
        train=[
            {"path": "hf:some/talks:en@train", "weight": 0.5},
            {"path": "/home/me/secret plans/a|b.jsonl", "weight": 0.5},
        ]
    )
    step = StepConfig(
        steps=3, batch_tokens=8192, optimizer="torch.optim.SGD", optimizer_options={"momentum": 0.9}
    )
    settings = TrainConfig(
        model="some/base@0123abc", out="runs/a", data=data, train=step, lora=LoraConfig(rank=8, alpha=4)
    ).check()
    state = {"step": 3, "mesh": {"dp_shard": 1}, "best": {"step": 2, "eval_accuracy": 0.25}}
    braided = BraidedModel(model, Mesh(rank=0, world_size=1))
    text = card_text(Path("x.tmp-12"), Trained(braided, settings, state, Path("step-3")), None, False)
    card = ModelCard(text)
    assert card.data.base_model == "some/base" and card.data.datasets == ["some/talks"]
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "[some/base](https://huggingface.co/some/base) at revision `0123abc`" in text
    assert "| best | eval_accuracy 0.2500 at step 2 |" in text and "| mesh | one process |" in text
    assert "`a\\|b.jsonl`, weight 0.5" in text and "/home/me" not in text and "secret" not in text
    assert "LoRA of rank 8, alpha 4, merged into the weights" in text and "{'momentum': 0.9}" in text
    assert "curves" not in text and text.startswith("---\n") and "# x\n" in text
    local = replace(settings, model="/home/me/base", train=StepConfig(steps=3, batch_tokens=8192))
    text = card_text(Path("x"), Trained(braided, local, state, Path("step-3")), None, False)
    assert ModelCard(text).data.base_model is None and "`base`" in text and "/home" not in text
