"""From data to `from_pretrained`: runs of every family, exported, and loaded by the stock."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from seqbraid.cli import main
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.media.processor import load_processor
from seqbraid.data.pack import pack
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, TEXT_MODELS
from seqbraid.train.config import (
    DataConfig,
    LogConfig,
    LoraConfig,
    MeshConfig,
    StepConfig,
    TrainConfig,
)
from seqbraid.train.config_file import to_yaml
from seqbraid.train.setup import EncoderFactory, load_model_processor, make_mesh
from seqbraid.train.trainer import Trainer
from seqbraid.verify.reference import stock_step
from tests.helpers.ranks import run
from tests.train.test_export import raw, source
from tests.train.test_train import EXAMPLES, losses, train


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "make_data.py"))["main"](folder)
    return folder


def config(examples: Path, out: Path, model: str, **changes: Any) -> TrainConfig:
    """Two steps on what the model can take: pictures, beeps or ledgers."""
    family = model.removeprefix("tiny:")
    what = "beeps" if "omni" in family else "ledgers" if family in TEXT_MODELS else "shapes"
    base = TrainConfig(
        model=model,
        out=str(out),
        precision="float32",
        data=DataConfig(
            train=str(examples / what / "train.jsonl"),
            media_root=str(examples / what),
            row_tokens=256,
            over_long="drop",
            workers=0,
            buffer_size=8,
        ),
        # Large steps, so that a model that was not trained, or not exported, gives other logits.
        train=StepConfig(steps=2, batch_tokens=256, lr=3e-3, warmup=0.0),
        log=LogConfig(sinks=[], every=1000),
    )
    return replace(base, **changes).check()


def a_sample(config: TrainConfig, model_config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A record of the data that fits a row, and its sample."""
    encoder = EncoderFactory(config.model, config.data, model_config)()
    for line in Path(str(config.data.train)).read_text().splitlines():
        record = json.loads(line)
        if encoder.length(record) <= config.data.row_tokens:
            return record, encoder.encode(record)
    raise AssertionError("no record fits")


def trained_logits(config: TrainConfig) -> tuple[Tensor, Tensor]:
    """A run on this rank; the logits of a sample before and after."""
    trainer = Trainer(config, make_mesh(config))
    batch = pack([a_sample(config, trainer.model_config)[1]], trainer.model_config, trainer.mesh)
    before = trainer.model.logits(batch)[0].detach()
    trainer.run()
    return before, trainer.model.logits(batch)[0].detach()


def stock_logits(model: Any, sample: dict[str, Any]) -> Tensor:
    return stock_step(model, [sample]).logits[0]


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def exported(run_folder: str | Path, out: Path) -> PreTrainedModel:
    """What the stock makes of `seqbraid export`, by nothing but the folder."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["export", str(run_folder), "--out", str(out)]) == 0
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    model, found = getattr(transformers, name).from_pretrained(out, output_loading_info=True)
    assert not any(found.values()), found
    return model.train()


@pytest.mark.parametrize("family", [*MEDIA_FAMILIES, *TEXT_MODELS])
def test_a_run_of_every_family_comes_out_as_the_stock_loads_it(
    family: str, examples: Path, tmp_path: Path
) -> None:
    settings = config(examples, tmp_path / "run", f"tiny:{family}")
    before, after = trained_logits(settings)
    model = exported(settings.out, tmp_path / "out")
    record, sample = a_sample(settings, model.config)
    assert difference(before, after) > 1e-2
    assert difference(stock_logits(model, sample), after) < 1e-6

    processor = load_processor(tmp_path / "out")
    again = SampleEncoder(processor, model.config, MediaFiles(Path(settings.data.media_root))).encode(record)
    assert again.keys() == sample.keys()
    for key, value in sample.items():
        assert torch.equal(again[key], value) if isinstance(value, Tensor) else again[key] == value
    text = "<|im_start|>user\nWhat was in entry 4217?<|im_end|> it's  naïve, cafe\u0301\n\n 猫 🐈"
    stock = AutoTokenizer.from_pretrained(tmp_path / "out")
    wanted = load_model_processor(settings.model)
    wanted = getattr(wanted, "tokenizer", wanted)
    assert stock(text)["input_ids"] == wanted(text)["input_ids"]
    message = [{"role": "user", "content": "What?"}]
    assert stock.apply_chat_template(message, tokenize=False) == wanted.apply_chat_template(
        message, tokenize=False
    )


def test_a_folder_is_trained_on_two_ranks_and_what_is_not_the_models_is_carried_over(
    examples: Path, tmp_path: Path
) -> None:
    model, processor = tiny_training_model("qwen3_5", seed=3)
    extra = {
        "mtp.norm.weight": torch.tensor([0x7FC1, 0x0001, 0xFFFF], dtype=torch.uint16).view(torch.bfloat16),
        "mtp.layers.0.mlp.up_proj.weight": torch.randn(60, 70),
    }
    folder = tmp_path / "source"
    source(model, folder, **extra)
    processor.save_pretrained(folder)
    settings = config(examples, tmp_path / "run", str(folder), mesh=MeshConfig(ring=2))
    sample = a_sample(settings, model.config)[1]
    (before, after), (_, others) = run(trained_logits, 2, settings)
    assert torch.equal(after, others)
    assert difference(before, stock_logits(model, sample)) < 1e-5  # it began with the folder's weights
    trained = exported(settings.out, tmp_path / "out")
    assert difference(stock_logits(trained, sample), after) < 1e-5 < 1e-2 < difference(before, after)
    for name in extra:
        assert raw(tmp_path / "out", name) == raw(folder, name)


def test_the_adapter_of_a_run_is_pefts_and_export_merges_it(examples: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=32)
    settings = config(examples, tmp_path / "run", "tiny:qwen3_vl", lora=lora)
    settings = replace(settings, train=replace(settings.train, lr=3e-2))
    before, after = trained_logits(settings)
    base = tiny_training_model("qwen3_vl", settings.seed)[0]
    sample = a_sample(settings, base.config)[1]
    assert difference(stock_logits(base, sample), before) < 1e-6 < 1e-2 < difference(before, after)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter", is_trainable=True)
    assert difference(stock_logits(adapted.get_base_model(), sample), after) < 1e-6
    (index,) = (tmp_path / "run" / "checkpoints").glob("*/index.json")
    saved = [key for key in json.loads(index.read_text()) if key.startswith("model.")]
    assert saved and all("lora_" in key for key in saved)  # nothing of what does not change
    merged = exported(settings.out, tmp_path / "out")
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    assert difference(stock_logits(merged, sample), after) < 2e-6


# The command line.


def options(settings: TrainConfig, *more: str) -> list[str]:
    data, step = settings.data, settings.train
    return [
        f"--model={settings.model}", f"--out={settings.out}", f"--precision={settings.precision}",
        f"--data.train={data.train}", f"--data.media_root={data.media_root}",
        f"--data.row_tokens={data.row_tokens}", f"--train.steps={step.steps}",
        f"--train.batch_tokens={step.batch_tokens}", f"--data.workers={data.workers}",
        *more,
    ]  # fmt: skip


def test_a_dry_run_shows_the_plan_of_a_mesh_that_is_not_there(
    examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    settings = config(examples, tmp_path / "run", "tiny:qwen3_vl")
    settings = replace(settings, train=replace(settings.train, batch_tokens=512))

    def plan(*more: str, model: str = settings.model) -> tuple[int, str, str]:
        code = main(["train", *options(replace(settings, model=model), "--dry-run", *more)])
        return code, *capsys.readouterr()

    code, out, err = plan("--mesh.ring=2", "--mesh.ulysses=2")
    assert code == 0, err
    assert "ring=2, ulysses=2: 4 processes" in out
    assert "512 tokens: 2 rows of 256, 2 for each of 1 data ranks" in out
    first = out.split("First row")[1]
    images = [int(line.split("│")[4]) for line in first.splitlines() if line.count("│") == 7 and "0" in line]
    assert images and sum(images) >= len(images)  # every sample of the set has a picture
    assert "memory" in out.lower() and "iB" in out
    assert not (tmp_path / "run").exists()

    code, _, err = plan("--mesh.ulysses=3")
    assert code == 2 and "ulysses=3" in err
    code, out, err = plan("--mesh.pp=2")
    assert code == 0 and "1f1b, of 2, 1 layers; ranks wait 33% of a step" in out, err  # two rows
    code, _, err = plan("--mesh.pp=4")
    assert code == 2 and "too few for 4 stages" in err
    code, _, err = plan(model=str(tmp_path / "nothing"))
    assert code == 2 and "nothing" in err and not (tmp_path / "nothing").exists()


def test_torchrun_gives_the_losses_of_this_process_group_and_a_report(
    examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(examples, tmp_path / "ours", "tiny:qwen3_5", mesh=MeshConfig(ring=2))
    run(train, 2, settings)
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "seqbraid", "train", str(tmp_path / "config.yaml"), f"--out={tmp_path / 'torchrun'}"]
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, env=_clean_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("loading PyTorch and transformers") == 1  # by the first rank alone
    assert len(losses(tmp_path / "ours")) == 2
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "ours")

    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "ours"), str(tmp_path / "torchrun"), "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.lstrip().lower().startswith("<!doctype html") and "ours" in text and "torchrun" in text
    assert main(["report", str(tmp_path / "none"), "--out", str(page)]) == 2
    assert "none" in capsys.readouterr().err


def _clean_environment() -> dict[str, str]:
    ours: Sequence[str] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ours}
