"""A model's folder that is damaged is refused in one line, whichever command meets it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqbraid.cli import main
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.stock import read_config
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.weights import load_stock, read_headers, weights_fingerprint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be trained."""
    folder = tmp_path_factory.mktemp("model")
    model, processor = tiny_training_model("qwen3")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def with_header_bytes(count: int) -> Callable[[bytes], bytes]:
    return lambda data: count.to_bytes(8, "little") + data[8:]


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "header of 2**63": with_header_bytes(2**63),
    "header of 2**64 - 1": with_header_bytes(2**64 - 1),
    "header past the end": with_header_bytes(10**6),
    "nothing": lambda _: b"",
    "cut in the header's size": lambda data: data[:5],
    "cut in the header": lambda data: data[:100],
    "cut in the data": lambda data: data[:-1],
    "garbled header": lambda data: data[:8] + bytes(byte ^ 0x80 for byte in data[8:60]) + data[60:],
    "a page of a web server": lambda _: b"<!doctype html><title>404</title>" * 40,
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_safetensors_header_that_cannot_be_true(damage: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / WEIGHTS
    weights.write_bytes(HEADERS[damage](weights.read_bytes()))
    for reads in (read_headers, weights_fingerprint, load_stock):
        with pytest.raises(
            ValueError, match=r"model\.safetensors is not a complete safetensors file: .*again"
        ):
            reads(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "3", "null", '"x"', "{}", '{"weight_map":', "[" * 100_000, '{"weight_map": null}',
        '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["model-1.safetensors"]}}', '{"weight_map": {"a": "..", "b": 1}}',
    ],
)  # fmt: skip
def test_an_index_of_the_wrong_type(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not (an index of safetensors files|JSON): .*again"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "floaty"}, {"hidden_size": "wide"}, {"layer_types": 3}, {"rope_parameters": 3},
        {"model_type": 3}, None,
    ],
)  # fmt: skip
def test_a_config_with_an_entry_of_the_wrong_type(
    wrong: dict[str, Any] | None, whole: Path, tmp_path: Path
) -> None:
    config = json.loads((whole / "config.json").read_text())
    (tmp_path / "config.json").write_text("[" * 100_000 if wrong is None else json.dumps({**config, **wrong}))
    with pytest.raises(ValueError, match=r"^\S+/config.json cannot be read: .+$"):
        read_config(tmp_path)


def command(name: str, model: Path, out: Path, *more: str) -> list[str]:
    if name == "verify":
        return ["verify", "--model", str(model)]
    data = out.parent / "data.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    command = ["train", f"--model={model}", f"--out={out}", f"--data.train={data}", "--data.row_tokens=64"]
    return [*command, "--train.steps=1", "--train.batch_tokens=64", "--data.workers=0", *more]


COMMANDS = {
    "verify": ("verify",),
    "dry run": ("train", "--dry-run"),
    "train": ("train", "--lora.rank=2"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_it_in_one_line(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *more = COMMANDS[name]
    model, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(whole, model)

    def refused(message: str) -> None:
        assert main(command(verb, model, out, *more)) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seqbraid ")]
        assert len(said) == 1 and message in said[0], said

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "floaty"}))
    refused("config.json cannot be read: ")
    (model / "config.json").write_text(json.dumps(config))
    weights = model / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(with_header_bytes(2**63)(data))
    refused("is not a complete safetensors file: ")
    weights.rename(model / "part.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": 1}}))
    refused("is not an index of safetensors files: ")
