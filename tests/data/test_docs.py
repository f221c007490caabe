"""The examples of data in docs/training.md are read as they stand."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.formats import FORMATS, parse_record
from seqbraid.data.tiny import tiny_training_model
from seqbraid.mesh import Mesh
from seqbraid.train.config_file import parse_config
from seqbraid.train.setup import make_loader

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
SECTION = PAGE.split("### Data formats\n")[1].split("\n### ")[0]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return str(found)


def test_each_record_is_of_the_format_that_the_table_names(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    model, processor = tiny_training_model("qwen3_vl")
    encoder = SampleEncoder(processor, model.config, MediaFiles(tmp_path))
    records = [json.loads(line) for line in block("json").splitlines()]
    learnt = set()
    for record in records:
        sample = encoder.encode(record)
        assert ("image_grid_thw" in sample) == ("a.png" in json.dumps(record))
        ids = sample["labels"]
        learnt.add(processor.tokenizer.decode(ids[ids != -100]))
    assert {"A square.<|im_end|>", " blue.<|im_end|>", "The sky is blue.<|im_end|>"} < learnt
    named = re.findall(r"^\| `(\w+)` \| `(\w+)`", SECTION, re.MULTILINE)
    assert {name for name, _ in named} == set(FORMATS)
    for name, key in named:
        assert key in FORMATS[name].needs  # type: ignore[index]
        fits = [record for record in records if set(FORMATS[name].needs) <= record.keys()]  # type: ignore[index]
        assert fits and all(parse_record(one, name=name) for one in fits)  # type: ignore[arg-type]


def test_the_configuration_is_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    _, tokenizer = tiny_training_model("llama")
    (tmp_path / "chat.jinja").write_text(tokenizer.chat_template)
    with gzip.open(tmp_path / "books.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": "The sky is blue. " * n}) + "\n" for n in (1, 900, 3)))
    chat = {"id": 7, "query": "What?", "response": "A square."}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 5)
    (tmp_path / "pairs.csv").write_text("prompt,completion\nThe sky is, blue.\n")
    (tmp_path / "config.yaml").write_text(
        "model: tiny:llama\nout: run\ntrain: {epochs: 2, batch_tokens: 8192}\n" + block("yaml")
    )
    config, _ = parse_config(["config.yaml", "--data.workers=0"])
    model, _ = tiny_training_model("llama")
    loader = make_loader(config, model.config, Mesh())
    texts = [tokenizer.decode(sample["input_ids"]) for step in loader for row in step.rows for sample in row]
    assert sum("system\nBe brief." in text for text in texts) == 2 * 3
    assert sum(text == "The sky is blue.<|im_end|>" for text in texts) >= 2
    assert sum(len(text) for text in texts) > 2 * 900 * len("The sky is blue. ")
