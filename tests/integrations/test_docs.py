"""The examples of trainers in README and docs/coming_from.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator

import seqbraid as sb
from seqbraid.data.tiny import tiny_training_model
from tests.helpers import runs
from tests.helpers.trainers import arguments, as_torchrun_starts, tokens

ROOT = Path(__file__).parents[2]


def examples(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return [example for example in found if "integrations" in example]


@as_torchrun_starts()
def run(example: str, quiet: str) -> Any:
    """On the CPU, which computes in float32, and without reports to anyone."""
    model, tokenizer = tiny_training_model("qwen3", seed=0)
    scope: dict[str, Any] = {
        "sb": sb,
        "model": model,
        "hf_model": model,
        "tokenizer": tokenizer,
        "mesh": sb.Mesh(),
        "args": arguments("out", max_steps=2),
        "collator": default_data_collator,
        "dataset": Dataset.from_list(tokens(20)),
        "conversations": Dataset.from_list([runs.said(number) for number in range(20)]),
    }
    exec(re.sub(r"(TrainingArguments|SFTConfig)\(", rf"\1({quiet}, output_dir=", example), scope)
    return scope["trainer"]


def test_the_examples_train_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = "report_to='none', use_cpu=True, bf16=False"
    (short,), (whole, sft) = examples("README.md"), examples("docs/coming_from.md")
    for example, folder in ((short, "out"), (whole, "out/run"), (sft, None)):
        made = run(example, quiet)
        assert made.state.global_step == made.args.max_steps > 1
        if folder is not None:
            assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained("out/run")("What is it?")["input_ids"]
    assert made.braiding.row_tokens == 512
