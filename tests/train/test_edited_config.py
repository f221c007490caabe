"""A checkpoint whose config.json was edited by hand is refused in one line that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from seqbraid.cli import main
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.tiny import tiny_training_model
from seqbraid.train.weights import load_stock

HUB = "kernels-community/flash-attn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("checkpoint")
    for part in tiny_training_model("qwen3", 0, torch.float32):
        part.save_pretrained(found)
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat17"}, "dtype='bfloat17' is not a floating-point dtype of torch"),
        ({"dtype": "Tensor"}, "dtype='Tensor' is not a floating-point dtype"),
        ({"dtype": ["float32"]}, "dtype=.'float32'. is not a floating-point dtype"),
        ({"torch_dtype": "int8"}, "torch_dtype='int8' is not a floating-point dtype"),
        ({"attn_implementation": HUB}, f"a kernel of the Hub.*set kernels.attention={HUB}"),
        ({"_attn_implementation": HUB}, f"a kernel of the Hub.*set kernels.attention={HUB}"),
        ({"vocab_size": 50}, "pad_token_id=385, outside its own vocabulary of vocab_size=50"),
        ({"vocab_size": 0}, "vocab_size=0; it must be at least 1"),
        ({"vocab_size": "many"}, "config.json cannot be read: .*vocab_size"),
        ({"vocab_size": 50, "pad_token_id": None}, r"embed_tokens.weight of shape \[400, 32\].*\[50, 32\]"),
    ],
)
def test_an_edited_config_is_refused_by_the_key(folder: Path, changes: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    try:
        with pytest.raises(ValueError, match=f"{folder}.*{message}"):
            load_stock(folder)
    finally:
        path.write_text(before)


def test_a_vocabulary_below_the_tokenizers_ids_is_refused_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny_training_model("qwen3", 0, torch.float32)
    model.resize_token_embeddings(386)
    model.save_pretrained(tmp_path / "model")
    tokenizer.add_tokens([f"word{n}" for n in range(30)])
    tokenizer.save_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "word3"}, {"role": "assistant", "content": "word29"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    options = {
        "model": tmp_path / "model", "out": tmp_path / "run", "data.train": tmp_path / "a.jsonl",
        "data.row_tokens": 64, "data.workers": 0, "train.batch_tokens": 64, "train.steps": 1,
        "precision": "float32", "log.sinks": "", "data.on_bad_sample": "skip",
    }  # fmt: skip
    assert main(["train", *(f"--{name}={value}" for name, value in options.items())]) == 2
    assert "but the model's vocabulary is 386; they belong to different models" in capfd.readouterr().err


def test_ids_with_gaps_are_compared_by_the_largest(tmp_path: Path) -> None:
    words = {"hi": 0, "there": 500}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="hi")))
    tokenizer.chat_template = "{{ messages }}"
    config = Qwen3ForCausalLM.config_class(vocab_size=500)
    with pytest.raises(ValueError, match="token ids up to 500, but the model's vocabulary is 500"):
        SampleEncoder(tokenizer, config, MediaFiles(tmp_path))
    config.vocab_size = 501
    SampleEncoder(tokenizer, config, MediaFiles(tmp_path))
