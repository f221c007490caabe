"""TRL's SFTTrainer with our steps: its data as it prepares them, and the losses that it has itself."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.data.media.processor import load_processor
from seqbraid.data.tiny import CHAT_TEMPLATE, tiny_training_model
from seqbraid.ops.triton_status import package_version
from tests.helpers import ranks, runs
from tests.helpers.trainers import arguments, as_torchrun_starts, curve, tokens

# The text of assistant turns is marked, as TRL wants it for `assistant_only_loss`.
MARKED = CHAT_TEMPLATE.replace(
    "{{- say(message.content) -}}",
    "{%- if message.role == 'assistant' -%}{% generation %}{{- say(message.content) ~ '<|im_end|>' -}}"
    "{% endgeneration %}{%- else -%}{{- say(message.content) -}}{%- endif -%}",
).replace(
    "{{- '<|im_end|>\\n' -}}\n{%- endfor -%}\n{%- if add",
    "{{- ('' if message.role == 'assistant' else '<|im_end|>') ~ '\\n' -}}\n{%- endfor -%}\n{%- if add",
)


def data(kind: str) -> Dataset:
    """What users of TRL have."""
    said = [runs.said(number)["messages"] for number in range(12)]
    if kind == "prompt":
        return Dataset.from_list([{"prompt": turns[:1], "completion": turns[1:]} for turns in said])
    if kind == "vision":
        pictures = [Image.new("RGB", (16 + 8 * (i % 3), 24), (20 * i, 0, 90)) for i in range(12)]
        return Dataset.from_list(
            [{"messages": turns, "images": [image]} for turns, image in zip(said, pictures, strict=True)]
        )
    return Dataset.from_list([{"messages": turns} for turns in said])


@as_torchrun_starts()
def sft(ours: bool, kind: str, out: str, changes: Mapping[str, Any], **options: Any) -> Any:
    """Three steps of TRL's own trainer, or of ours."""
    import trl

    from seqbraid.integrations.trl import SFTTrainer

    model, processor = tiny_training_model("qwen3_vl" if kind == "vision" else "qwen3", seed=0)
    processor.chat_template = MARKED
    settings = {
        "max_steps": 3,
        "bf16": False,
        "max_length": None,
        "train_sampling_strategy": "sequential",
        **changes,
    }
    args = arguments(out, trl.SFTConfig, **settings)
    made = (SFTTrainer if ours else trl.SFTTrainer)(
        model, args, train_dataset=data(kind), processing_class=processor, **options
    )
    made.train()
    return made


KEYS = ("loss", "grad_norm", "num_tokens")


def curves(made: Any) -> dict[str, list[float]]:
    return {key: curve(made, key) for key in KEYS}


def divided_as_ours(made: Any, samples: int) -> dict[str, list[float]]:
    """The curves of stock steps of so many samples, all of whose tokens are labels: older Trainers (5.9)
    divide by the first tokens too, for which nothing is predicted.
    """
    found = curves(made)
    counted = made._get_num_items_in_batch(
        [{"labels": torch.zeros(1, 2, dtype=torch.long)}], torch.device("cpu")
    )
    if counted == 2:
        totals = [0.0, *found["num_tokens"]]
        factors = [(b - a) / (b - a - samples) for a, b in pairwise(totals)]
        for key in ("loss", "grad_norm"):
            found[key] = [x * factor for x, factor in zip(found[key], factors, strict=True)]
    return found


def assert_same(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert len(wanted["loss"]) == 3 and wanted["loss"][0] != wanted["loss"][2]
    for key in KEYS:
        rel = 1e-4 if key == "grad_norm" else 1e-5
        assert found[key] == pytest.approx(wanted[key], rel=rel, abs=1e-7), key


@pytest.mark.parametrize("kind", ["messages", "prompt", "assistant", "adapters"])
def test_in_one_process_it_has_the_losses_of_trl(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options: dict[str, Any] = {}
    if kind == "prompt":
        changes["gradient_accumulation_steps"] = 1
    if kind == "assistant":
        changes["assistant_only_loss"] = True
    if kind == "adapters":
        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    stock, ours = (sft(own, kind, str(tmp_path), changes, **options) for own in (False, True))
    all_labels = kind in ("messages", "adapters")
    assert_same(curves(ours), divided_as_ours(stock, 4) if all_labels else curves(stock))
    if kind == "prompt":  # TRL logs the mean over micro-batches, we that over tokens
        assert curve(ours, "mean_token_accuracy") == pytest.approx(curve(stock, "mean_token_accuracy"))


def vision_on_ranks(out: str, changes: dict[str, Any]) -> tuple[dict[str, list[float]], list[float]]:
    made = sft(True, "vision", out, {**changes, "save_strategy": "steps", "save_steps": 2}, mesh=Mesh(ring=2))
    losses = curves(made)
    made.save_model()
    again = sft(True, "vision", out, {**changes, "max_steps": 2}, mesh=Mesh(ring=2))
    again.args.max_steps = 3
    again.train(resume_from_checkpoint=str(Path(out) / "checkpoint-2"))
    return losses, curve(again, "loss")[-1:]


@pytest.mark.skipif(
    package_version("transformers") < (5, 18),
    reason="TRL marks assistants in pictures' conversations from 5.18 on",
)
def test_pictures_on_two_ranks_have_the_losses_of_trl_in_one_process(tmp_path: Path) -> None:
    # Of a vision model the stock Trainer takes the mean over micro-batches, which is that over label tokens
    # where there is one.
    # Adam divides gradients by their size: with this epsilon, what is rounding alone moves no weight.
    changes: dict[str, Any] = {"assistant_only_loss": True, "adam_epsilon": 1e-4}
    stock = sft(False, "vision", str(tmp_path / "stock"), {**changes, "per_device_train_batch_size": 4})
    wanted = curves(stock)
    changes |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for found, again in ranks.run(vision_on_ranks, 2, str(tmp_path / "ours"), changes):
        assert_same(found, wanted)
        assert again == found["loss"][-1:]
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").state_dict()
    for name, weight in stock.model.state_dict().items():
        assert (loaded[name] - weight).norm() <= 1e-3 * weight.norm() + 1e-6, name
    assert load_processor(tmp_path / "ours").image_processor.patch_size


@as_torchrun_starts()
def packed_sft(out: str, **changes: Any) -> Any:
    import trl

    from seqbraid.integrations.trl import SFTTrainer

    model, tokenizer = tiny_training_model("qwen3", seed=0)
    settings = {"max_steps": 2, "bf16": False, "packing": True, "max_length": 128, "use_cpu": True, **changes}
    args = arguments(out, trl.SFTConfig, **settings)
    return SFTTrainer(model, args, train_dataset=Dataset.from_list(tokens(20)), processing_class=tokenizer)


def test_packing_is_ours_and_what_cuts_samples_is_refused(tmp_path: Path) -> None:
    made = packed_sft(str(tmp_path))
    rows = [row for batch in made.get_train_dataloader().batch_sampler for row in batch]
    lengths = [len(record["input_ids"]) for record in tokens(20)]
    assert sorted(item for row in rows for item in row) == list(range(20))
    assert all(sum(lengths[item] for item in row) <= 128 for row in rows) and len(rows) < 10
    made.train()
    for strategy in ("wrapped", "bfd_split"):
        with pytest.raises(ValueError, match="cuts samples in pieces"):
            packed_sft(str(tmp_path), packing_strategy=strategy)
    with pytest.raises(ValueError, match="loss_type='dft' is not supported"):
        packed_sft(str(tmp_path), loss_type="dft")
    with pytest.raises(ValueError, match="activation_offloading=True is not supported"):
        packed_sft(str(tmp_path), activation_offloading=True)


@as_torchrun_starts()
def test_a_model_on_the_mesh_is_taken_as_it_is_and_no_adapters_are_added(tmp_path: Path) -> None:
    import trl

    from seqbraid.integrations.trl import SFTTrainer

    model, tokenizer = tiny_training_model("qwen3", seed=0)
    braided = sb.parallelize(model)
    args = arguments(tmp_path, trl.SFTConfig, bf16=False, max_steps=1)
    options: dict[str, Any] = {"train_dataset": data("messages"), "processing_class": tokenizer}
    made = SFTTrainer(braided, args, **options)
    assert made.braided is braided
    made.train()
    with pytest.raises(ValueError, match="peft_config adds adapters to a model that is on the mesh already"):
        SFTTrainer(braided, args, peft_config=LoraConfig(target_modules="all-linear"), **options)
    assert torch.equal(made.model.get_input_embeddings().weight, braided.model.get_input_embeddings().weight)
