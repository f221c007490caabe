"""Calls of tools in everybody's words become what the template writes for an object of arguments."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from seqbraid.data.chat.template import ChatTemplate
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.conversation import parse_conversation
from seqbraid.data.tiny import tiny_tokenizer, tiny_training_model
from tests.helpers.media import write_good

ARGUMENTS = {"city": "Köln", "days": 2, "more": {"x": [1, None]}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
SPELLED = {**CALL, "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
TEXT = json.dumps({"name": "weather", "arguments": ARGUMENTS})

HEAD = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}"
TAIL = "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
TAIL += "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"


def template(arguments: str) -> str:
    calls = (
        "{%- for c in m.tool_calls or [] -%}{{- '<' + c.function.name -}}"
        + arguments
        + "{{- '>' -}}{%- endfor -%}"
    )
    return HEAD + calls + TAIL


TEMPLATES = {
    "makes JSON": template("{{- c.function.arguments | tojson -}}"),
    "takes either": template(
        "{%- if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif -%}"
    ),
    "goes through items": template(
        "{%- for k, v in c.function.arguments | items %}{{ ' ' + k + '=' + (v | tojson) }}{% endfor -%}"
    ),
    "adds text": template("{{- '' + c.function.arguments -}}"),
    "writes text": template("{{- c.function.arguments -}}"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_are_written_the_same_on_every_template(name: str) -> None:
    tokenizer = tiny_tokenizer(with_media=False)
    tokenizer.chat_template = TEMPLATES[name]
    chat = ChatTemplate(tokenizer)
    asked = {"role": "user", "content": "?"}
    texts = set()
    for call in (CALL, SPELLED):
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        rendered = chat.render(parse_conversation({"messages": [asked, said]}))
        (span,) = rendered.spans
        texts.add(rendered.text[slice(*span)])
    (text,) = texts
    wanted = json.dumps(ARGUMENTS, ensure_ascii=False)
    if name == "goes through items":
        wanted = ' city="Köln" days=2 more={"x": [1, null]}'
    assert text == f"<weather{wanted}><|im_end|>"


def labelled(messages: list[dict[str, Any]], style: str = "messages") -> tuple[list[int], list[int]]:
    model, tokenizer = tiny_training_model("qwen3_5_text")
    sample = SampleEncoder(tokenizer, model.config, MediaFiles(Path("."))).encode({style: messages})
    return sample["input_ids"].tolist(), sample["labels"].tolist()


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_calls_that_are_turns_of_their_own_are_those_of_the_assistant() -> None:
    bare = {"type": "function", "function": CALL["function"]}
    end = said("assistant", "Rain.")
    wanted = labelled(
        [said("user", "?"), said("assistant", None, tool_calls=[bare, bare]), said("tool", "x"), end]
    )
    swift = [
        said("user", "?"),
        said("tool_call", TEXT),
        said("tool_call", TEXT),
        said("tool_response", "x"),
        end,
    ]
    assert labelled(swift) == wanted
    spelled = json.dumps({"name": "weather", "arguments": json.dumps(ARGUMENTS)})
    assert (
        labelled([said("user", "?"), said("tool_call", f"[{TEXT}, {spelled}]"), said("tool", "x"), end])
        == wanted
    )
    factory = [("human", "?"), ("function_call", f"[{TEXT}, {TEXT}]"), ("observation", "x"), ("gpt", "Rain.")]
    assert labelled([{"from": who, "value": text} for who, text in factory], "conversations") == wanted
    thought = labelled(
        [said("user", "?"), said("assistant", "Hm.", tool_calls=[bare]), said("tool", "x"), end]
    )
    assert thought == labelled(
        [
            said("user", "?"),
            said("assistant", "Hm."),
            said("tool_call", TEXT),
            said("tool_response", "x"),
            end,
        ]
    )


def test_axolotls_flags_choose_the_turns_with_labels() -> None:
    turns = [
        {"from": "human", "value": "Hello", "train": False},
        {"from": "gpt", "value": "Hi", "train": False},
        {"from": "human", "value": "How?"},
        {"from": "gpt", "value": "So.", "train": True},
    ]
    plain = [{"from": turn["from"], "value": turn["value"]} for turn in turns]
    ids, labels = labelled(turns, "conversations")
    whole_ids, whole = labelled(plain, "conversations")
    assert ids == whole_ids
    _, tokenizer = tiny_training_model("qwen3_5_text")
    assert tokenizer.decode([one for one in labels if one != -100]) == "So.<|im_end|>"
    assert tokenizer.decode([one for one in whole if one != -100]) == "Hi<|im_end|>So.<|im_end|>"
    with pytest.raises(ValueError, match=r"conversations\[2\].train is True \(bool\) on a user turn"):
        labelled([*turns[:2], {**turns[2], "train": True}, turns[3]], "conversations")


def test_media_may_be_inline_or_at_an_absolute_path_inside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    write_good(root)
    (tmp_path / "link").symlink_to(root)
    model, processor = tiny_training_model("qwen3_omni")
    encoder = SampleEncoder(processor, model.config, MediaFiles(tmp_path / "link"))
    answer = said("assistant", "A cat.")

    def encoded(part: dict[str, Any]) -> dict[str, Any]:
        return encoder.encode({"messages": [said("user", [part, {"type": "text", "text": "?"}]), answer]})

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)

    data = base64.b64encode((root / "good.png").read_bytes()).decode()
    wanted = encoded({"type": "image", "image": "good.png"})
    uri = f"data:image/png;base64,{data}"
    for source in (str(root / "good.png"), str(tmp_path / "link" / "good.png"), uri):
        assert same(encoded({"type": "image", "image": source}), wanted)
    assert same(encoded({"type": "image_url", "image_url": {"url": uri}}), wanted)
    beside = {"messages": [said("user", "<image>?"), answer], "image": uri}
    assert same(encoder.encode(beside), wanted)
    sound = base64.b64encode((root / "good.wav").read_bytes()).decode()
    inline = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    assert same(encoded(inline), encoded({"type": "audio", "audio": "good.wav"}))
    for source in (str(tmp_path / "x.png"), f"{root}/../media/good.png", f"{root}x/good.png"):
        with pytest.raises(ValueError, match="leaves the media folder"):
            encoded({"type": "image", "image": source})
