"""Files of records as TRL, OpenAI, ms-swift, LLaMA-Factory and axolotl document them become their
tokens and labels.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.cache import RecordCache
from seqbraid.data.records.formats import parse_record
from seqbraid.data.records.source import open_source
from seqbraid.data.tiny import tiny_training_model

from .formats.trl_tokens import FOLDER, KEPT, MODES, everything, generating

MODEL, TOKENIZER = tiny_training_model("llama")
OF_TRL: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))["made"]
END = "<|im_end|>"
CALL = "\n<tool_call>\n{}\n</tool_call>" + END
WEATHER = (
    '{"name": "get_current_weather", "arguments": {"location": "San Francisco, USA", "format": "celsius"}}'
)
AIR = '{"name": "realtime_aqi", "arguments": {"city": "Beijing"}}'

LEARNT: dict[str, list[list[str]]] = {
    "openai_chat.jsonl": [
        ["Paris, as if everyone doesn't know that already." + END],
        [CALL.format(WEATHER)],
    ],
    "ms_swift.jsonl": [
        ["Tomorrow's weather will be sunny" + END],
        ["It equals 2" + END],
        [CALL.format(AIR), "The air is good." + END],
        ["A" + END, "B" + END],
        ["A" + END],
    ],
    "llama_factory_alpaca.json": [
        ["Mix the flour first." + END],
        ["Yes?" + END, "Fine." + END, "zero one two" + END],
    ],
    "llama_factory_sharegpt.json": [
        [
            CALL.format('{"name": "calculate_discount", "arguments": {"original_price": 99, '
            '"discount_percentage": 10}}'),
            "It will cost $89.10." + END,
        ],
    ],
    "axolotl.jsonl": [
        ["Hello" + END, "Hi there!" + END],
        ["Hello!" + END],
        ["3" + END],
        ["A whole page of a book." + END],
    ],
}  # fmt: skip
"""Of each record, what its labels say, run by run, as the documentation of the file's tool has it."""


def samples(name: str, tmp_path: Path, tokenizer: Any = TOKENIZER) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of the records of a file."""
    source = open_source(str(FOLDER / name), RecordCache(str(tmp_path)))
    encoder = SampleEncoder(tokenizer, MODEL.config, MediaFiles(tmp_path))
    found = [encoder.encode(source[number]) for number in range(len(source))]
    return [(sample["input_ids"].tolist(), sample["labels"].tolist()) for sample in found]


@pytest.mark.parametrize("name", LEARNT)
def test_a_documented_file_has_the_labels_that_its_tool_documents(name: str, tmp_path: Path) -> None:
    found = []
    for ids, labels in samples(name, tmp_path):
        assert all(label in (-100, one) for one, label in zip(ids, labels, strict=True))
        runs: list[list[int]] = [[]]
        for label in labels:
            runs[-1:] = [[*runs[-1], label]] if label != -100 else [runs[-1], []] if runs[-1] else [[]]
        found.append([TOKENIZER.decode(run) for run in runs if run])
    assert found == LEARNT[name]


def test_every_file_is_looked_at() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".jsonl")}
    of_trl = {f"{name}.jsonl" for name in MODES} | {KEPT.name, "axolotl_pretokenized.jsonl"}
    assert files == set(LEARNT) | of_trl


def test_tokens_of_others_are_theirs(tmp_path: Path) -> None:
    name = "axolotl_pretokenized.jsonl"
    lines = (FOLDER / name).read_text().splitlines()
    assert samples(name, tmp_path) == [
        (record["input_ids"], record["labels"]) for record in map(json.loads, lines)
    ]


@pytest.mark.parametrize("name", ["language_modeling", "prompt_completion"])
def test_plain_texts_are_what_trl_makes_of_them(name: str, tmp_path: Path) -> None:
    wanted = [(sample["input_ids"], sample["labels"]) for sample in OF_TRL[name]]
    assert samples(f"{name}.jsonl", tmp_path) == wanted


def test_completions_of_conversations_are_what_trl_makes_but_for_what_nobody_generates(
    tmp_path: Path,
) -> None:
    name = "conversational_prompt_completion"
    found = samples(f"{name}.jsonl", tmp_path)
    for (ids, labels), of_trl in zip(found, OF_TRL[name], strict=True):
        assert ids == of_trl["input_ids"] and TOKENIZER.decode(ids[-1:]) == "\n"
        assert [*labels[:-1], ids[-1]] == of_trl["labels"] and labels[-1] == -100


def test_conversations_are_what_trl_makes_with_assistant_only_loss(tmp_path: Path) -> None:
    name = "conversational_language_modeling"
    found = samples(f"{name}.jsonl", tmp_path)
    assert [ids for ids, _ in found] == [sample["input_ids"] for sample in OF_TRL[name]]
    wanted = [(sample["input_ids"], sample["labels"]) for sample in OF_TRL[f"{name}, assistant_only_loss"]]
    assert found == wanted
    tagged = tiny_training_model("llama")[1]
    tagged.chat_template = generating(tagged.chat_template)
    assert samples(f"{name}.jsonl", tmp_path, tagged) == wanted


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: what it made before is compared")
def test_trl_makes_what_it_made() -> None:
    assert everything() == OF_TRL


@pytest.mark.parametrize("answers", ["chosen", "rejected_response", "rejected_messages", "label", "kto_tag"])
def test_preference_data_is_refused_by_name_and_sent_to_an_example_that_is_there(answers: str) -> None:
    with pytest.raises(ValueError, match=f"the key '{answers}', so it is preference data") as error:
        parse_record({"prompt": "a", "completion": "b", answers: "c"})
    (path,) = re.findall(r"examples/[\w/]+\.py", str(error.value))
    assert "dpo" in (FOLDER.parents[2] / path).read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "human", "value": "a", "train": True}, "train is True .* on a user turn; only assistant"),
        (
            {"from": "gpt", "value": "a", "train_detail": [{"begin_offset": 0, "end_offset": 0}]},
            "train_detail is not supported; a turn has labels as a whole",
        ),
        ({"from": "gpt", "value": "a", "loss": 0.5}, "give 0 or 1, true or false; a `weight` may be any"),
        ({"from": "gpt", "value": "a", "loss_scale": 2.0}, "loss_scale is not supported"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_as_their_tool_has_them_are_refused_by_name(
    turn: dict[str, Any], reason: str
) -> None:
    talk = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}, turn]
    with pytest.raises(ValueError, match=reason):
        parse_record({"conversations": talk})
