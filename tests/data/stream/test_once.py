"""A sample without media is tokenized once, on any mesh; what a rank keeps for that is bounded."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqbraid import Mesh
from seqbraid.data.stream.loader import Loader, StepData
from seqbraid.data.stream.plan import Draw
from seqbraid.data.stream.tasks import Tasks, Unmeasured
from seqbraid.data.stream.texts import Texts
from seqbraid.models.tiny.media import MEDIA_FAMILIES
from tests.helpers import ranks
from tests.helpers.toy import ListSource, ToyEncoder, ids, make_loader, records

from .test_shared_media import encoder_for, record

MESHES: list[dict[str, int]] = [{}, {"dp_shard": 2}, {"ring": 2}, {"dp_shard": 2, "ring": 2}, {"tp": 2}]
FATES = {3: "bad", 11: "not json", 17: "body", 20: "lie", 30: "media", 31: "media"}
ROW = 32


class TextToy(ToyEncoder):
    """A `ToyEncoder` that writes down each record that it tokenizes."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def note(self, record: dict[str, Any]) -> None:
        with open(self.notes, "ab", buffering=0) as file:  # appended to by all ranks and workers
            file.write(f"{record['id']}\n".encode())

    def length(self, record: dict[str, Any]) -> int:
        self.note(record)
        return super().length(record)

    def encode(self, record: dict[str, Any]) -> dict[str, Any]:
        self.note(record)
        return super().encode(record)

    def encode_text(self, record: dict[str, Any]) -> Any:
        if record["fate"] in ("media", "body", "lie"):
            return None
        super().length(record)
        self.note(record)
        sample = super().encode(record)
        return sample["input_ids"].numpy(), sample["labels"].numpy()


def loader(mesh: Mesh, notes: Path | None, source: list[dict[str, Any]], **options: Any) -> Loader:
    """One that keeps texts; without notes one whose encoder does not tell of them."""
    settings: dict[str, Any] = {"row_tokens": ROW, "rows_per_step": 3, "buffer_size": 8, "epochs": 1}
    make = ToyEncoder if notes is None else partial(TextToy, notes)
    return make_loader(ListSource(source), make, mesh, on_bad_sample="skip", **{**settings, **options})


def told(step: StepData, mine: Loader) -> Any:
    """All that a step says, to the last bit of its samples, and what the loader says after it."""
    samples = [
        [{key: (value.dtype, value.tolist()) for key, value in sample.items()} for sample in row]
        for row in step.rows
    ]
    numbers = (step.step, step.epoch, step.tokens, step.fill, step.samples)
    return numbers, samples, step.where, mine.state_dict(), mine.bad, mine.over_long


def compared(
    axes: dict[str, int],
    notes: Path,
    source: list[dict[str, Any]],
    options: dict[str, Any],
    state: Any = None,
) -> list[int]:
    """On a rank: the steps with texts kept are those without; gives what it kept after each step."""
    mesh = Mesh(**axes)
    plain_options = {key: value for key, value in options.items() if key not in ("workers", "text_bytes")}
    with_texts, plain = loader(mesh, notes, source, **options), loader(mesh, None, source, **plain_options)
    if state is not None:
        with_texts.load_state_dict(state)
        plain.load_state_dict(state)
    kept = []
    try:
        for step, wanted in zip(with_texts, plain, strict=True):
            assert told(step, with_texts) == told(wanted, plain)
            kept.append(with_texts._texts.num_bytes)
    finally:
        with_texts.close()
    return kept


def on_ranks(axes: dict[str, int], *args: Any) -> list[list[int]]:
    size = prod(axes.values())
    return ranks.run(compared, size, axes, *args) if size > 1 else [compared(axes, *args)]


def tokenized(notes: Path) -> Counter[int]:
    """How often each record was."""
    return Counter(map(int, notes.read_text().split())) if notes.exists() else Counter()


def texts(source: list[dict[str, Any]]) -> Iterator[int]:
    return (one["id"] for one in source if one["fate"] in ("", "late"))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_text_is_tokenized_once_by_all_ranks_together(axes: dict[str, int], tmp_path: Path) -> None:
    source = records(80, FATES)
    for kept in on_ranks(axes, tmp_path / "one", source, {}):
        assert kept[0] > 0 == kept[-1]
    found = tokenized(tmp_path / "one")
    assert all(found[one] == 1 for one in texts(source))
    of_a_row = prod(axes.values()) // axes.get("dp_shard", 1)
    assert all(found[one] == 1 + of_a_row for one in (17, 20, 30, 31))

    on_ranks(axes, tmp_path / "three", source, {"epochs": 3, "prefetch_steps": 0})
    found = tokenized(tmp_path / "three")
    assert all(found[one] == 1 + 2 * of_a_row for one in texts(source)), "later epochs are not kept"


def test_a_text_is_tokenized_once_by_workers(tmp_path: Path) -> None:
    source = records(80, FATES)
    on_ranks({}, tmp_path / "notes", source, {"workers": 2})
    assert all(tokenized(tmp_path / "notes")[one] == 1 for one in texts(source))


def test_a_text_that_is_kept_holds_no_memory_but_its_own() -> None:
    """Those that a worker sends lie side by side: one of them would hold all."""
    sent = np.zeros((4, 2, 100), np.int32)
    kept = Texts(Mesh(), ROW)
    kept.keep(0, sent[1])
    kept.is_kept(0, 0, 100)
    text = kept.deliver([[Draw(5, 0, 100)]])[5, 0]
    assert text.untyped_storage().nbytes() == text.nbytes == 800
    assert text.data_ptr() != sent[1].ctypes.data


@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2, "ring": 2}], ids=str)
def test_what_is_cut_or_dropped_is_so_as_before(axes: dict[str, int], tmp_path: Path) -> None:
    """Of a text longer than a row the part that a row holds is kept, unless it is to be dropped."""
    source = records(60, {5: "late", 6: "late", **FATES}, longest=60)
    source[5]["n"], source[6]["n"], source[7]["n"] = ROW + 9, ROW, 5 * ROW
    long = {one["id"] for one in source if one["n"] > ROW}
    assert 10 < len(long) < 50
    for over_long in ("truncate", "drop"):
        notes = tmp_path / over_long
        on_ranks(axes, notes, source, {"over_long": over_long})
        assert all(tokenized(notes)[one] == 1 for one in texts(source))
    limits = records(2, longest=1)
    limits[0]["n"] = 5 * ROW
    tasks = {
        over_long: Tasks(ListSource(limits), partial(TextToy, tmp_path / "cut"), ROW, over_long=over_long)
        for over_long in ("truncate", "drop")
    }
    cut, short = tasks["truncate"].measure(Unmeasured([0, 1], 1 << 20))
    assert cut.length == 5 * ROW and cut.text is not None and cut.text.shape == (2, ROW)
    dropped, kept = tasks["drop"].measure(Unmeasured([0, 1], 1 << 20))
    assert dropped.length == 5 * ROW and dropped.text is None
    assert kept.text is not None and short.text is not None and kept.text.shape == (2, 1)


@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2}], ids=str)
def test_no_rank_keeps_more_than_it_may(axes: dict[str, int], tmp_path: Path) -> None:
    """What goes beyond is tokenized a second time, and the steps are the same."""
    source = records(300)
    most = max(map(max, on_ranks(axes, tmp_path / "all", source, {"buffer_size": 100})))
    for limit in (0, 8 * ROW, most // 2):
        notes = tmp_path / str(limit)
        found = on_ranks(axes, notes, source, {"buffer_size": 100, "text_bytes": limit})
        assert max(map(max, found)) <= limit
        times = Counter(tokenized(notes).values())
        assert set(times) == ({2} if limit == 0 else {1, 2}), times


def test_a_task_gives_as_much_text_as_it_may(tmp_path: Path) -> None:
    tasks = Tasks(ListSource(records(40)), partial(TextToy, tmp_path / "notes"), ROW)
    given = [measured.text for measured in tasks.measure(Unmeasured(range(40), 800))]
    sizes = [text.nbytes for text in given if text is not None]
    assert 700 < sum(sizes) <= 800 and len(sizes) < 40
    assert all(text.dtype == np.int32 for text in given if text is not None)
    with pytest.raises(ValueError, match=r"text_bytes=-1 must not be negative"):
        loader(Mesh(), tmp_path / "notes", records(4), text_bytes=-1)


@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2}], ids=str)
def test_a_run_that_goes_on_has_the_texts_of_what_it_measures(axes: dict[str, int], tmp_path: Path) -> None:
    """It tokenizes each text as often as it draws it: those at hand for the packer were measured before."""
    source = records(80, FATES)
    options = {"over_long": "truncate", "epochs": 2}
    first = loader(Mesh(), None, source, **options)
    steps = [(Counter(i for row in ids(step.rows) for i in row), first.state_dict()) for step in first]
    for after in (0, 4, 9):
        state = json.loads(json.dumps(steps[after][1]))
        drawn = sum((of_step for of_step, _ in steps[after + 1 :]), Counter[int]())
        notes = tmp_path / str(after)
        on_ranks(axes, notes, source, options, state)
        found = tokenized(notes)
        assert {one: found[one] for one in texts(source)} == {one: drawn[one] for one in texts(source)}


def test_a_text_that_is_another_than_before_is_refused(tmp_path: Path) -> None:
    """As it was: a draw of the run before tells how long the sample was."""
    source = records(60)  # all of the second epoch is measured before the rest of the first has been drawn
    options = {"epochs": 2, "buffer_size": 16, "prefetch_steps": 0}
    first = loader(Mesh(), None, source, **options)
    next(first)
    state = first.state_dict()
    at_hand = {draw[1] for row in state["planner"]["packer"]["planned"] for draw in [s["item"] for s in row]}
    changed = min(at_hand)
    source[changed] = {**source[changed], "n": source[changed]["n"] + 1}
    compared({}, tmp_path / "notes", source, options, state)


# --- with the encoders of models


def said(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": "what? " * number}
    return {"messages": [question, {"role": "assistant", "content": str(number)}]}


@pytest.mark.parametrize("family", [*MEDIA_FAMILIES, "llama"])
def test_a_text_is_all_of_the_sample_of_a_conversation_without_media(family: str) -> None:
    encoder = encoder_for(family, Path())
    text, sample = encoder.encode_text(said(7)), encoder.encode(said(7))
    assert text is not None and list(sample) == ["input_ids", "labels"]
    for found, wanted in zip(text, sample.values(), strict=True):
        assert wanted.dtype == torch.int64 and found.tolist() == wanted.tolist()
    if family in MEDIA_FAMILIES:
        assert encoder.encode_text(record("some.png")) is None


def counted_on_a_rank(axes: dict[str, int], family: str) -> tuple[int, list[list[list[int]]]]:
    """How often this rank called the tokenizer, and the ids of its rows."""
    encoder = encoder_for(family, Path())
    calls: list[int] = []

    class Noted(type(encoder.tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            calls.append(1)
            return super().__call__(*args, **options)

    encoder.tokenizer = copy.copy(encoder.tokenizer)
    encoder.tokenizer.__class__ = Noted
    source = ListSource([{**said(number), "fate": ""} for number in range(40)])
    mine = make_loader(source, lambda: encoder, Mesh(**axes), row_tokens=200, rows_per_step=2, epochs=1)
    rows = [[sample["input_ids"].tolist() for sample in row] for step in mine for row in step.rows]
    return len(calls), rows


@pytest.mark.parametrize("family", ["qwen3_vl", "llama"])
def test_the_tokenizer_of_a_model_is_called_once_for_each_conversation(family: str) -> None:
    found = ranks.run(counted_on_a_rank, 4, {"dp_shard": 2, "ring": 2}, family)
    assert sum(calls for calls, _ in found) == 40
    assert found[0][1] == found[1][1] and found[2][1] == found[3][1]
    assert sum(len(row) for _, rows in found[::2] for row in rows) == 40
