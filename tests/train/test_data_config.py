"""Sources, system prompt and chat template as a configuration names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqbraid.data.records.mix import MixedSource
from seqbraid.mesh import Mesh
from seqbraid.train.changes import changes
from seqbraid.train.config import TrainConfig, as_dict
from seqbraid.train.config_file import load_config, parse_config, to_yaml
from seqbraid.train.run_folder import write_description
from seqbraid.train.setup import EncoderFactory, make_model, open_data

TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}
TEMPLATE = """\
{%- for m in messages -%}{{- '<' ~ m.role ~ '>' ~ m.content ~ '<|im_end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def config(tmp_path: Path, data: dict[str, Any], *more: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    values = {
        "model": "tiny:llama", "out": str(tmp_path / "run"), "data": data,
        "train": {"steps": 2, "batch_tokens": 128},
    }  # fmt: skip
    path.write_text(json.dumps(values))
    return parse_config([str(path), *more])[0]


def text_of(found: TrainConfig, record: Any = TALK) -> str:
    encoder = EncoderFactory(found.model, found.data, make_model(found).config)()
    return str(encoder.tokenizer.decode(encoder.encode(record)["input_ids"]))


def test_weighted_sources_come_from_yaml_and_go_back(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(TALK) + "\n" + json.dumps(TALK))
    train = [{"path": f"{tmp_path}/{name}.jsonl", "weight": weight} for name, weight in (("a", 3), ("b", 1))]
    found = config(tmp_path, {"train": train, "row_tokens": 128})
    assert found.data.train == train
    source = open_data(found.data.train, found.data, Mesh())
    assert isinstance(source, MixedSource) and source.weights == [3, 1]
    (tmp_path / "again.yaml").write_text(to_yaml(found))
    assert load_config(tmp_path / "again.yaml") == found
    by_hand = config(tmp_path, {"row_tokens": 128}, f"--data.train={json.dumps(train)}")
    assert by_hand == found
    at_home = config(tmp_path, {"train": ["~/a.jsonl", {"path": "~/b"}], "row_tokens": 128}).data.train
    assert at_home == [str(Path.home() / "a.jsonl"), {"path": str(Path.home() / "b")}]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"train": [{"path": "a", "wieght": 1}]}, "did you mean 'weight'"),
        ({"train": "a", "eval": [{"path": "a", "weight": 1}]}, "data.eval has weights"),
        ({"train": "a", "format": "alpca"}, "data.format=alpca is unknown; use one of auto, messages"),
        ({"train": "a", "chat_template": "no/such.jinja"}, "cannot be read as a file"),
        ({"train": "a", "cache_gib": 0}, "data.cache_gib=0.0 must be above 0"),
        ({"train": "a", "over_long": "cut"}, "data.over_long=cut is unknown; use one of .*split"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, data: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config(tmp_path, {"row_tokens": 128, **data})


def test_the_system_prompt_is_of_conversations_that_have_none(tmp_path: Path) -> None:
    found = config(tmp_path, {"train": "a", "row_tokens": 128, "system": "Be kind."})
    assert text_of(found).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user")
    own = {"messages": [{"role": "system", "content": "No."}, *TALK["messages"]]}
    assert "Be kind." not in text_of(found, own) and "No." in text_of(found, own)
    assert "Be kind." not in text_of(found, {"text": "Hi"})


def test_a_chat_template_is_a_file_or_a_text_and_stays_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    found = config(tmp_path, {"train": "a", "row_tokens": 128, "chat_template": f"{tmp_path}/chat.jinja"})
    assert found.data.chat_template == TEMPLATE
    assert found == config(tmp_path, {"train": "a", "row_tokens": 128, "chat_template": TEMPLATE})
    assert text_of(found) == "<user>Hi<|im_end|><assistant>Yes?<|im_end|>"
    plain = config(tmp_path, {"train": "a", "row_tokens": 128})
    assert text_of(plain).startswith("<|im_start|>user")
    run = tmp_path / "described"
    run.mkdir()
    write_description(run, found, make_model(found).config, Mesh())
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(run / "model").chat_template == TEMPLATE
    (line,) = changes(as_dict(plain), as_dict(found), 3)
    assert line.startswith("data.chat_template is ") and len(line) < 300
