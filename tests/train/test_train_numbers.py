"""What a run says of itself and does to its weights, against numbers that are found in other ways."""

from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from seqbraid.data.media.files import MediaFiles
from seqbraid.data.media.items import MediaOptions
from seqbraid.mesh import Mesh
from seqbraid.plan.memory import MemoryOptions
from seqbraid.train.config import CheckpointConfig, DataConfig, LoraConfig, TrainConfig
from seqbraid.train.evaluate import evaluate
from seqbraid.train.nonfinite import NonFiniteError
from seqbraid.train.setup import EncoderFactory, make_eval_loader, make_loader, make_mesh, make_model
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import run
from tests.helpers.runs import DATA_RANKS, RING, ROW, config, logged, said, shown, train, write

HERE = Mesh(rank=0, world_size=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and a picture."""
    found = tmp_path_factory.mktemp("data")
    write(found / "text.jsonl", [said(number) for number in range(24)])
    write(found / "eval.jsonl", [said(number) for number in range(50, 57)])
    Image.new("RGB", (48, 48), (60, 90, 10)).save(found / "1.png")
    return found


def one_step(config: TrainConfig) -> Trainer:
    """A run that is asked to stop before it begins, and so does one step."""
    trainer = Trainer(config, HERE)
    trainer.stop = True
    trainer.run()
    return trainer


# --- the log


def long(number: int) -> dict[str, Any]:
    """More than half a row, so that each has a row of its own."""
    record = said(number)
    record["messages"][0]["content"] += "Read the digits from left to right. " * (4 + number)
    return record


def test_what_is_evaluated_is_what_the_next_step_learns(folder: Path, tmp_path: Path) -> None:
    """Three rows to a step, three samples that fill one each: every step and every evaluation sees all."""
    path = write(folder / "long.jsonl", [long(number) for number in range(3)])
    same = config(folder, tmp_path / "run", "long", {"eval_every": 1}, evaluated=True, mesh=RING)
    same = replace(same, data=replace(same.data, eval=path, shuffle=False, buffer_size=1))
    run(train, 2, same)
    found = {key: logged(same, key) for key in ("loss", "accuracy", "label_tokens", "epoch", "tokens")}
    assert found["loss"][1:] == pytest.approx(logged(same, "eval_loss")[:-1], rel=1e-5)
    assert found["accuracy"][1:] == pytest.approx(logged(same, "eval_accuracy")[:-1])
    assert len(set(found["accuracy"])) > 1
    assert found["label_tokens"] == logged(same, "eval_label_tokens")
    assert found["epoch"] == [1, 2, 3, 4]

    encoder = EncoderFactory(same.model, same.data, make_model(same).config)()
    lengths = [encoder.length(long(number)) for number in range(3)]
    assert min(lengths) > ROW / 2
    assert found["tokens"] == [sum(lengths)] * 4
    assert all(0 <= padding < 0.1 for padding in logged(same, "padding"))
    per_rank = [rate / 2 for rate in logged(same, "tokens_per_s")]
    assert logged(same, "tokens_per_s_per_device") == pytest.approx(per_rank)
    assert min(logged(same, "data_wait_s")) > 0  # without workers a step waits for its samples


def test_the_time_of_a_step_is_without_what_comes_between_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slept = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + slept[0])
    slow = config(folder, tmp_path / "run", train={"steps": 3})
    trainer = Trainer(slow, HERE)
    between = trainer._after_step

    def an_hour(metrics: dict[str, float], asked: bool) -> None:
        slept[0] += 3600.0
        between(metrics, asked)

    trainer._after_step = an_hour  # type: ignore[method-assign]
    trainer.run()
    assert len(logged(slow, "step_s")) == 3 and max(logged(slow, "step_s")) < 3600


# --- a step


def test_the_first_step_moves_by_its_rate_and_sees_the_clipped_gradient(folder: Path, tmp_path: Path) -> None:
    """Adam's first step moves every parameter by its rate, and leaves a tenth of the gradient behind."""
    seen = {}
    for name, clip in (("free", None), ("clipped", 0.01)):
        rising = {"steps": 2, "warmup": 2, "lr": 1e-3, "clip_norm": clip}
        wanted = config(folder, tmp_path / name, train=rising)
        before = {n: p.detach().clone() for n, p in Trainer(wanted, HERE).model.named_parameters()}
        trainer = one_step(wanted)
        assert logged(wanted, "lr") == pytest.approx([5e-4])
        for n, p in trainer.model.named_parameters():
            assert float((p.detach() - before[n]).abs().max()) == pytest.approx(5e-4, rel=0.01), n
        moments = [state["exp_avg"].double() for state in trainer.optimizer.state.values()]
        seen[name] = 10 * float(torch.cat([m.flatten() for m in moments]).norm())
        assert logged(wanted, "grad_norm") == pytest.approx([seen["free"]], rel=1e-5)
    assert seen["clipped"] == pytest.approx(0.01, rel=1e-4)


def test_a_gradient_that_is_no_number_stops_before_the_update(folder: Path, tmp_path: Path) -> None:
    """The loss is a number still; what is written names the gradient, and no more than that."""
    write(folder / "picture.jsonl", [shown(1, "1.png")])
    whole = config(folder, tmp_path / "run", "picture", {"batch_tokens": ROW}, model="tiny:qwen3_vl")
    trainer = Trainer(replace(whole, data=replace(whole.data, buffer_size=1)), HERE)
    name, poisoned = next((n, p) for n, p in trainer.model.named_parameters() if "layers.0.mlp" in n)
    poisoned.register_hook(lambda gradient: gradient * math.nan)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteError, match=r"step 1.*nothing was updated"):
        trainer.run()
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
    known = json.loads((tmp_path / "run/nonfinite/step-00000001/rank0.json").read_text())
    assert known["gradients_not_finite"] == [name] and known["parameters_not_finite"] == []
    assert all(math.isfinite(float(loss)) for loss in known["losses"])
    seen = load_file(tmp_path / "run/nonfinite/step-00000001/rank0.safetensors")
    wanted = {f"batch0.{what}" for what in ("input_ids", "targets", "positions", "media0.image")}
    assert wanted <= set(seen)
    assert not logged(whole, "loss") and not list((tmp_path / "run/checkpoints").glob("step-*"))


def _seeds(config: TrainConfig) -> list[int]:
    trainer = Trainer(config, make_mesh(config))
    found: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *_: found.append(torch.initial_seed()))
    trainer.run()
    return found


def test_every_step_and_rank_draws_numbers_of_its_own(folder: Path, tmp_path: Path) -> None:
    wanted = config(folder, tmp_path / "run", train={"steps": 3, "batch_tokens": 2 * ROW}, mesh=DATA_RANKS)
    found = [seed for seeds in run(_seeds, 2, wanted) for seed in seeds]
    assert len(found) == 6 and len(set(found)) == 6


def test_dropout_is_for_training_alone(folder: Path, tmp_path: Path) -> None:
    dropped = LoraConfig(rank=4, dropout=0.5)
    adapted = config(folder, tmp_path / "run", train={"lr": 0.1}, evaluated=True, lora=dropped)
    trainer = Trainer(adapted, HERE)
    trainer.run()
    assert trainer.model.training
    seen = []
    for seed in range(2):
        torch.manual_seed(seed)
        held_out = make_eval_loader(adapted, trainer.model_config, HERE)
        found = evaluate(trainer.model, held_out)
        seen.append(found["eval_loss"])
    assert seen[0] == seen[1] == logged(adapted, "eval_loss")[-1]
    assert trainer.model.training


def test_a_run_gives_the_signal_back(folder: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one_step(config(folder, tmp_path / "run"))
    assert signal.getsignal(signal.SIGTERM) is before


# --- the best


def test_the_best_is_saved_at_once_kept_and_remembered(folder: Path, tmp_path: Path) -> None:
    """At a rate of 0 no evaluation is better than the first."""
    last_only = CheckpointConfig(keep=1)
    still = config(
        folder, tmp_path / "run", train={"steps": 2, "lr": 0, "eval_every": 1}, evaluated=True,
        checkpoint=last_only,
    )  # fmt: skip
    for steps in (2, 3):
        Trainer(replace(still, train=replace(still.train, steps=steps)), HERE).run()
        checkpoints = tmp_path / "run/checkpoints"
        assert (checkpoints / "best").read_text().strip() == "step-00000001"
        assert sorted(path.name for path in checkpoints.glob("step-*")) == [
            "step-00000001", f"step-{steps:08d}",
        ]  # fmt: skip
    assert "resumed" in logged(still, "event")


# --- what the configuration decides


@pytest.mark.parametrize(
    ("precision", "kept", "computed"),
    [
        ("float32", torch.float32, torch.float32),
        ("mixed", torch.float32, torch.bfloat16),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precisions_are_what_they_say(
    folder: Path, tmp_path: Path, precision: str, kept: torch.dtype, computed: torch.dtype
) -> None:
    trainer = Trainer(config(folder, tmp_path / "run", precision=precision), HERE)
    found: set[torch.dtype] = set()
    projection = trainer.model.parts.layer_list[0].mlp.down_proj
    projection.register_forward_hook(lambda module, inputs, output: found.add(output.dtype))
    trainer.stop = True
    trainer.run()
    assert found == {computed}
    assert {p.dtype for p in trainer.model.parameters()} == {kept}
    assert trainer.optimizer.has_masters == (kept == torch.bfloat16)


def test_adapters_are_what_is_asked_for(folder: Path, tmp_path: Path) -> None:
    asked = LoraConfig(rank=4, alpha=12, dropout=0.25, rslora=True, targets=["q_proj", "down_proj"])
    model = make_model(config(folder, tmp_path / "run", lora=asked))
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert {name.rsplit(".", 1)[-1] for name in adapted} == {"q_proj", "down_proj"}
    for module in adapted.values():
        assert module.lora_A["default"].out_features == 4
        assert module.scaling["default"] == pytest.approx(12 / math.sqrt(4))
        assert module.lora_dropout["default"].p == 0.25


def test_memory_and_gated_delta_reach_the_model(folder: Path, tmp_path: Path) -> None:
    memory = MemoryOptions(loss_chunk=32)
    asked = config(folder, tmp_path / "run", model="tiny:qwen3_next", gated_delta="heads", memory=memory)
    trainer = Trainer(asked, HERE)
    trainer.loader.close()
    assert (trainer.model.loss_chunk, trainer.model.gated_delta) == (32, "heads")


def test_media_are_read_as_the_configuration_says(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "min_pixels": 4096, "max_pixels": 8192, "video_min_pixels": 2048, "video_max_pixels": 6144,
        "fps": 1.5, "max_frames": 6, "use_audio_in_video": True,
    }  # fmt: skip
    data = DataConfig(media_root=str(tmp_path), allow_urls=True, **asked)
    model = "tiny:qwen3_omni"
    encoder = EncoderFactory(model, data, make_model(TrainConfig(model=model)).config)()
    assert encoder.media.options == MediaOptions(**asked)
    assert encoder.media.files == MediaFiles(tmp_path, allow_urls=True)
    careful = EncoderFactory(model, DataConfig(), encoder.config)()
    assert careful.media.options == MediaOptions() and not careful.media.files.allow_urls


@pytest.mark.parametrize(("over_long", "samples"), [("drop", 2), ("truncate", 3)])
def test_over_long_samples_are_dropped_or_cut_as_the_configuration_says(
    folder: Path, tmp_path: Path, over_long: str, samples: int
) -> None:
    endless = said(1)
    endless["messages"][-1]["content"] += " Read the digits." * ROW  # the answer: the part kept has labels
    write(folder / "endless.jsonl", [said(0), endless, said(2)])
    wanted = config(folder, tmp_path / "run", "endless", {"steps": None, "epochs": 1})
    wanted = replace(wanted, data=replace(wanted.data, over_long=over_long))
    (tmp_path / "run").mkdir()
    loader = make_loader(wanted, make_model(wanted).config, HERE)
    assert sum(step.samples for step in loader) == samples
    assert loader.over_long.count == 1
    loader.close()
