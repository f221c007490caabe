"""What was tokenized is tokenized once, and never taken for what it is not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqbraid import Mesh
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.source import open_source
from seqbraid.data.stream import token_cache
from seqbraid.data.stream.loader import Loader, Reading, StepData
from seqbraid.data.stream.plan import RowOptions
from seqbraid.data.stream.token_cache import TokenCache, Tokenized
from seqbraid.data.tiny import tiny_training_model
from tests.helpers import ranks

MODEL, TOKENIZER = tiny_training_model("llama")
RECORDS: list[dict[str, Any]] = [{"query": f"What is {n}?", "response": f"It is {n}."} for n in range(40)]
RECORDS += [{"text": "It is a small red square. " * n} for n in range(1, 20)]
ROW = 48


class Counting(SampleEncoder):
    """Counts the texts that it makes."""

    made = 0

    def _text(self, *given: Any) -> Any:
        Counting.made += 1
        return super()._text(*given)


def loader(folder: Path, mesh: Mesh | None = None, limit: float = 1e9, **options: Any) -> Loader:
    encoder = Counting(TOKENIZER, MODEL.config, MediaFiles(folder), **options)
    reading = Reading(
        open_source(str(folder / "a.jsonl")), lambda: encoder, None, TokenCache(str(folder), limit)
    )
    rows = RowOptions(ROW, 2, epochs=2, buffer_size=16, over_long="truncate")
    return Loader(reading, mesh or Mesh(), rows)


def steps(found: Loader) -> tuple[list[StepData], int]:
    """The steps, and how many texts were made for them."""
    before = Counting.made
    return list(found), Counting.made - before


def same(found: list[StepData], wanted: list[StepData]) -> None:
    assert [step.where for step in found] == [step.where for step in wanted]
    for one, other in zip(found, wanted, strict=True):
        for row, wanted_row in zip(one.rows, other.rows, strict=True):
            for sample, expected in zip(row, wanted_row, strict=True):
                assert sample.keys() == expected.keys()
                assert all(torch.equal(sample[key], expected[key]) for key in expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return tmp_path


def test_a_second_start_tokenizes_nothing_and_has_the_same_steps(folder: Path) -> None:
    first, made = steps(loader(folder))
    assert made >= len(RECORDS)
    again, made = steps(loader(folder))
    assert made == 0
    same(again, first)
    plain, _ = steps(
        Loader(
            Reading(
                open_source(str(folder / "a.jsonl")),
                lambda: SampleEncoder(TOKENIZER, MODEL.config, MediaFiles(folder)),
            ),
            Mesh(),
            RowOptions(ROW, 2, epochs=2, buffer_size=16, over_long="truncate"),
        )
    )
    same(first, plain)


def test_whatever_changes_the_tokens_makes_them_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(loader(folder))
    assert steps(loader(folder, system="Be brief."))[1] >= len(RECORDS)
    assert steps(loader(folder, end_of_document="<|endoftext|>"))[1] >= len(RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "chat_template", TOKENIZER.chat_template + " ")
        assert steps(loader(folder))[1] >= len(RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr("seqbraid.data.encode.code_digest", lambda: "other code")
        assert steps(loader(folder))[1] >= len(RECORDS)
    assert steps(loader(folder))[1] == 0
    # A file that changes unseen by its fingerprint: the record tells.
    with monkeypatch.context() as patch:
        patch.setattr("seqbraid.data.records.jsonl.JsonlSource.fingerprint", "the same")
        steps(loader(folder))
        text = (folder / "a.jsonl").read_text()
        (folder / "a.jsonl").write_text(text.replace("It is 7.", "It is 8."))
        found, made = steps(loader(folder))
        assert made == 2  # once in each epoch
        said = [
            TOKENIZER.decode(sample["input_ids"]) for step in found for row in step.rows for sample in row
        ]
        assert sum("What is 7?" in one and "It is 8." in one for one in said) == 2


@pytest.mark.parametrize("harm", ["texts", "cut", "gone", "places", "flags", "length"])
def test_what_is_damaged_is_tokenized_again(folder: Path, harm: str) -> None:
    first, _ = steps(loader(folder))
    (texts,) = folder.rglob("*.texts")
    places = texts.with_suffix(".places")
    if harm == "texts":
        data = bytearray(texts.read_bytes())
        data[::7] = bytes(len(data[::7]))
        texts.write_bytes(data)
    elif harm == "cut":
        texts.write_bytes(texts.read_bytes()[:500])
    elif harm == "gone":
        texts.unlink()
    elif harm == "places":
        places.write_bytes(places.read_bytes()[: len(places.read_bytes()) // 2])
    else:
        entries = np.fromfile(places, token_cache.ENTRY)
        entries["flags" if harm == "flags" else "tokens"] ^= 1 if harm == "flags" else 1 << 30
        entries.tofile(places)
    again, made = steps(loader(folder))
    assert made > 0
    same(again, first)


def test_it_is_bounded_and_what_was_not_used_for_longest_goes_first(folder: Path) -> None:
    steps(loader(folder))
    (whole,) = (folder / "tokens").iterdir()
    size = token_cache._size(folder / "tokens")
    steps(loader(folder, limit=1.5 * size, system="Be brief."))  # of which a part has room
    assert whole.exists() and token_cache._size(folder / "tokens") <= 1.5 * size
    steps(loader(folder, limit=0.5 * size, system="Be kind."))
    assert not whole.exists() and token_cache._size(folder / "tokens") <= size
    (folder / "tokens" / "x").mkdir()
    blocked = folder / "no"
    blocked.write_text("a file where a folder should be")
    cache = TokenCache(str(blocked))
    cache.open("a", "b", 3)
    assert cache.get(0, {}) is None
    cache.put(0, {}, Tokenized(np.array([1]), np.array([1])))


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    writer = TokenCache(str(tmp_path))
    writer.open("source", "encoder", 5)
    made = Tokenized(np.array([7, 8, 9, 10]), np.array([-100, 8, -100, 10]), 3, False)
    writer.put(4, {"text": "\ud800"}, made)
    writer.put(2, {"a": 1}, Tokenized(np.arange(19), np.arange(19), 0, True))
    writer.put(3, {}, Tokenized(np.array([7, 8]), np.array([-100, 9])))  # a label that is another token
    writer.flush()
    reader = pickle.loads(pickle.dumps(writer))
    reader.open("source", "encoder", 5)
    found = reader.get(4, {"text": "\ud800"})
    assert found is not None and found.ids_T.tolist() == [7, 8, 9, 10]
    assert found.labels_T.tolist() == [-100, 8, -100, 10] and found[2:] == (3, False)
    found = reader.get(2, {"a": 1})
    assert found is not None and found.labels_T.tolist() == list(range(19)) and found.all_labelled
    assert reader.get(2, {"a": 2}) is None and reader.get(3, {}) is None and reader.get(0, {}) is None
    other = TokenCache(str(tmp_path))
    other.open("source", "another encoder", 5)
    assert other.get(4, {"text": "\ud800"}) is None


def test_a_later_epoch_finds_what_an_earlier_one_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, made = steps(loader(folder))
    assert made > len(RECORDS)  # in less than half a minute nobody looks again
    monkeypatch.setattr(token_cache, "LOOK_AGAIN_S", 0.0)
    found, made = steps(loader(folder, system=""))
    assert made == len(RECORDS)
    same(found, wanted)


def on_ranks(folder: Path) -> tuple[list[Any], int]:
    found, made = steps(loader(folder, Mesh(dp_shard=2)))
    return [step.where for step in found], made


def test_ranks_share_what_they_tokenize(folder: Path) -> None:
    first = ranks.run(on_ranks, 2, folder)
    assert sum(made for _, made in first) >= len(RECORDS)
    again = ranks.run(on_ranks, 2, folder)
    assert [made for _, made in again] == [0, 0] and [one for one, _ in again] == [one for one, _ in first]
    assert steps(loader(folder))[1] == 0  # and one process
