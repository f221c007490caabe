"""The Trainer of transformers on any mesh: the losses of `seqbraid train`, checkpoints, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, default_data_collator
from transformers.trainer_utils import get_last_checkpoint

from seqbraid.data.tiny import tiny_training_model
from seqbraid.integrations.transformers import Trainer
from seqbraid.train.config import DataConfig, LogConfig, LoraConfig, StepConfig, TrainConfig
from seqbraid.train.lora import LoraOptions, add_lora
from tests.helpers import ranks, runs
from tests.helpers.trainers import (
    LR,
    ROW,
    arguments,
    as_torchrun_starts,
    curve,
    on_mesh,
    perplexity,
    tokens,
    trainer,
)

RECORDS = 300
STEPS = 30


def own_run(folder: Path, steps: int, **changes: Any) -> TrainConfig:
    """The same run of `seqbraid train`, in one process."""
    data = runs.write(folder / "data.jsonl", tokens(RECORDS))
    held_out = runs.write(folder / "held_out.jsonl", tokens(6, seed=2))
    config = TrainConfig(
        model="tiny:qwen3",
        out=str(folder / "own"),
        precision="float32",
        data=DataConfig(train=data, eval=held_out, row_tokens=ROW, workers=0),
        train=StepConfig(steps=steps, batch_tokens=2 * ROW, lr=LR, schedule="constant", warmup=0.0),
        log=LogConfig(sinks=[], every=1000),
        **changes,
    ).check()
    runs.train(config)
    return config


@torch.no_grad()
def logits(model: Any, record: dict[str, Any]) -> torch.Tensor:
    return model(input_ids=torch.tensor([record["input_ids"]])).logits[0]


def test_thirty_steps_on_any_mesh_equal_seqbraid_train_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    own = own_run(tmp_path, STEPS)
    wanted, norms = runs.logged(own, "loss"), runs.logged(own, "grad_norm")
    assert len(wanted) == STEPS and max(wanted) - min(wanted) > 0.2
    meshes: dict[str, tuple[dict[str, int], int]] = {
        "one": ({}, 2),
        "split": ({"ring": 2, "ulysses": 2}, 2),
        "both": ({"dp_shard": 2, "ring": 2}, 1),
        "stages": ({"pp": 2, "ring": 2}, 2),  # with the tied weight on both
    }
    for name, (sizes, accumulated) in meshes.items():
        work = (sizes, str(tmp_path / name), RECORDS, name not in ("split", "stages"))
        options = {"gradient_accumulation_steps": accumulated}
        found = [run_here(*work, options)] if not sizes else ranks.run(run_here, 4, *work, options)
        for losses, grad_norms, (of_all, _, of_all_perplexity), again in found:
            assert losses == pytest.approx(wanted, rel=1e-5)
            assert grad_norms == pytest.approx(norms, rel=1e-4)
            assert again == losses  # the second half was computed again from the checkpoint, bit for bit
            assert of_all == pytest.approx(runs.logged(own, "eval_loss")[-1], rel=1e-5)
            assert math.log(of_all_perplexity) == pytest.approx(of_all, rel=1e-5)
    # On another mesh than it was saved on.
    other, _ = tiny_training_model("qwen3", seed=7)
    args = arguments(tmp_path / "both", max_steps=STEPS, gradient_accumulation_steps=2)
    moved = trainer(other, args, tokens(RECORDS), row_tokens=ROW)
    moved.train(resume_from_checkpoint=str(tmp_path / "both" / "checkpoint-15"))
    assert curve(moved, "loss") == pytest.approx(wanted, rel=1e-5)
    # What was damaged since is named, before a step.
    for file, reason in (
        ("scheduler.pt", r"scheduler.pt cannot be read: "),
        ("seqbraid/step-00000015", "damaged: "),
    ):
        harmed = tmp_path / "harmed" / "checkpoint-15"
        shutil.copytree(tmp_path / "both" / "checkpoint-15", harmed)
        path = harmed / file
        path = path if path.is_file() else path / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match=f"{reason}.*give the folder of another checkpoint"):
            moved.train(resume_from_checkpoint=str(harmed))
        shutil.rmtree(harmed)
    # What was saved is stock.
    record = tokens(1)[0]
    results = []
    for name in ("one", "split", "both", "stages"):
        last = get_last_checkpoint(str(tmp_path / name))
        assert last is not None and AutoTokenizer.from_pretrained(last)("What?")["input_ids"]
        for folder in (last, tmp_path / name):
            results.append(logits(AutoModelForCausalLM.from_pretrained(folder), record))
    assert all((one - results[0]).norm() <= 1e-4 * results[0].norm() for one in results[1:])
    fresh = logits(tiny_training_model("qwen3", seed=0)[0], record)
    assert (fresh - results[0]).norm() > 0.1 * results[0].norm()


def run_here(sizes: dict[str, int], out: str, records: int, resumed: bool, options: dict[str, Any]) -> Any:
    return on_mesh(sizes, out, records, resumed, **options)


@as_torchrun_starts()
def with_lora(out: str) -> tuple[list[float], list[float], torch.Tensor]:
    found = []
    for seed in (0, 3):
        model, _ = tiny_training_model("qwen3", seed=0)
        add_lora(model, LoraOptions(rank=4, alpha=16.0), seed)
        args = arguments(out, max_steps=6, save_strategy="steps", save_steps=3)
        run = trainer(model, args, tokens(RECORDS), row_tokens=ROW)
        run.train(resume_from_checkpoint=str(Path(out) / "checkpoint-3") if seed else None)
        found.append(curve(run, "loss"))
    run.save_model()
    prediction = run.predict(Dataset.from_list(tokens(1)))
    return found[0], found[1], torch.from_numpy(prediction.predictions)


def test_adapters_equal_seqbraid_train_are_saved_for_peft_and_go_on(tmp_path: Path) -> None:
    own = own_run(tmp_path, 6, lora=LoraConfig(rank=4))
    found = ranks.run(with_lora, 2, str(tmp_path / "hf"))
    for losses, again, _ in found:
        assert losses == pytest.approx(runs.logged(own, "loss"), rel=1e-5)
        assert again == losses
    stock, _ = tiny_training_model("qwen3", seed=0)
    record = tokens(1)[0]
    before = logits(stock, record)
    loaded = logits(PeftModel.from_pretrained(stock, tmp_path / "hf"), record)
    assert (loaded - before).norm() > 1e-3 * before.norm()
    labels = torch.tensor(record["labels"])
    wanted = loaded[:-1].log_softmax(-1).gather(1, torch.tensor(record["input_ids"])[1:, None])[:, 0]
    assert found[0][2][0, 1:] == pytest.approx(torch.where(labels[1:] == -100, 0.0, wanted), rel=1e-4)
    weights = (tmp_path / "hf" / "checkpoint-6" / "adapter_model.safetensors").stat().st_size
    state = tmp_path / "hf" / "checkpoint-6" / "seqbraid"
    saved = sum(path.stat().st_size for path in state.rglob("*.safetensors"))
    assert saved < 5 * weights  # adapters and their moments, not the model under them


@as_torchrun_starts()
def unpacked(out: str, size: int) -> tuple[list[float], int, list[int], float]:
    model, _ = tiny_training_model("qwen3", seed=0)
    args = arguments(
        out,
        num_train_epochs=2,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=2,
        include_num_input_tokens_seen="all",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_strategy="epoch",
        eval_strategy="epoch",
        save_total_limit=1,
    )
    run = trainer(model, args, tokens(21), eval_dataset=Dataset.from_list(tokens(5, seed=2)))
    run.train()
    best = run.evaluate()["eval_loss"]
    assert best == min(curve(run, "eval_loss")[:2])
    return (
        curve(run, "loss"),
        int(run.state.num_input_tokens_seen),
        [run.state.max_steps],
        run.state.total_flos,
    )


def test_two_ranks_without_a_mesh_see_each_sample_once_as_one_process_does(tmp_path: Path) -> None:
    losses, seen, steps, flops = unpacked(str(tmp_path / "one"), 4)
    assert steps == [6] and seen == 2 * sum(len(record["input_ids"]) for record in tokens(21)) and flops > 0
    for found in ranks.run(unpacked, 2, str(tmp_path / "two"), 2):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1:3] == (seen, steps)
        assert found[3] == pytest.approx(flops, rel=0.05)  # counted in whole megaflops


class StopsHere(TrainerCallback):
    """Asks on one rank alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = args.process_index == 1 and state.global_step == 2


@as_torchrun_starts()
def stopped_by_one_rank(out: str) -> int:
    model, _ = tiny_training_model("qwen3", seed=0)
    run = trainer(model, arguments(out, max_steps=5), tokens(20), callbacks=[StopsHere()])
    run.train()
    return int(run.state.global_step)


@as_torchrun_starts()
def one_bad_sample(out: str) -> None:
    model, _ = tiny_training_model("qwen3", seed=0)
    records = tokens(8)
    records[5]["input_ids"][1] = 10_000
    args = arguments(out, max_steps=5, per_device_train_batch_size=4, train_sampling_strategy="sequential")
    trainer(model, args, records).train()


def test_what_one_rank_meets_all_ranks_act_on(tmp_path: Path) -> None:
    assert ranks.run(stopped_by_one_rank, 2, str(tmp_path)) == [2, 2]
    found = ranks.errors(one_bad_sample, 2, str(tmp_path))
    assert all(one.kind == "ValueError" and "outside the vocabulary" in one.message for one in found)


REFUSED: dict[str, Any] = {
    "torch_compile": True,
    "fsdp": True,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "save_on_each_node": True,
    "train_sampling_strategy": "group_by_length",
    "average_tokens_across_devices": False,
    "bf16_full_eval": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_kept_are_refused(name: str, tmp_path: Path) -> None:
    model, _ = tiny_training_model("qwen3", seed=0)
    args = arguments(tmp_path)
    setattr(args, name, REFUSED[name])
    with pytest.raises(ValueError, match=f"^{name}=.* is not supported: "):
        trainer(model, args, tokens(2))


def test_fp16_data_parallel_and_functions_of_logits_are_refused(tmp_path: Path) -> None:
    model, _ = tiny_training_model("qwen3", seed=0)
    args = arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(ValueError, match="fp16=True is not supported: float16 needs its loss scaled"):
        trainer(model, args, tokens(2))
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="one process sees 2 GPUs"):
        trainer(model, args, tokens(2))
    for name in ("compute_loss_func", "preprocess_logits_for_metrics", "model_init"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            trainer(model, arguments(tmp_path), tokens(2), **{name: perplexity})


def refused(records: list[dict[str, Any]], match: str, folder: Path, **options: Any) -> None:
    model, _ = tiny_training_model("qwen3", seed=0)
    resume = options.pop("resume", None)
    with pytest.raises(ValueError, match=match):
        trainer(model, arguments(folder, max_steps=1), records, **options).train(
            resume_from_checkpoint=resume
        )


def test_data_that_was_packed_before_or_has_no_labels_is_refused(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8]
    packed = [{"input_ids": ids, "labels": ids, "position_ids": [0, 1, 0, 1]}]
    refused(packed, "seems to hold several samples, packed before", tmp_path)
    refused([{"input_ids": ids}], "the collator gives no labels, only input_ids", tmp_path)
    refused(
        [{**record, "seq_lengths": [1, 2]} for record in tokens(2)], "its rows were packed before", tmp_path
    )
    refused(
        tokens(9), r"item \d+ of the data set has \d+ tokens, but a row holds 16", tmp_path, row_tokens=16
    )
    refused(tokens(9), "has no complete seqbraid/ folder", tmp_path, resume=str(tmp_path))


def test_a_stream_is_dealt_out_and_goes_on(tmp_path: Path) -> None:
    found = []
    for data in (Dataset.from_list(tokens(12)), Dataset.from_list(tokens(12)).to_iterable_dataset()):
        model, _ = tiny_training_model("qwen3", seed=0)
        args = arguments(
            tmp_path, max_steps=4, per_device_train_batch_size=2, train_sampling_strategy="sequential"
        )
        run = Trainer(model, args, train_dataset=data, data_collator=default_data_collator)
        run.train()
        found.append(json.dumps(curve(run, "loss")))
    assert found[0] == found[1]


def test_a_loss_of_ones_own_and_bfloat16_train_as_the_loss_and_the_type_of_before(tmp_path: Path) -> None:
    def run(dtype: torch.dtype, **options: Any) -> Trainer:
        model, _ = tiny_training_model("qwen3", seed=0, dtype=dtype)
        args = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2, gradient_checkpointing=True)
        found = trainer(model, args, tokens(20), **options)
        found.train()
        return found

    plain = run(torch.float32)
    own = run(torch.float32, loss=lambda row: -row.logprobs().sum())
    assert curve(own, "loss") == pytest.approx(curve(plain, "loss"), rel=1e-5)
    narrow = run(torch.bfloat16)
    assert curve(narrow, "loss") == pytest.approx(curve(plain, "loss"), rel=1e-3)
    masters = [state["master"] for state in narrow.optimizer.state.values()]
    assert masters and all(master.dtype == torch.float32 for master in masters)
