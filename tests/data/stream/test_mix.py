"""Sources are mixed by their weights, the same on any mesh, and a run goes on with the same mix."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid import Mesh
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.mix import MixedSource, open_mix, parse_specs
from seqbraid.data.stream.loader import Loader
from seqbraid.data.stream.order import MixedOrder, SampleOrder, shares
from seqbraid.data.stream.plan import Measured, RowOptions, StepPlanner
from seqbraid.data.tiny import tiny_training_model
from tests.helpers import ranks
from tests.helpers.toy import make_loader

SIZES, WEIGHTS = [20_000, 700, 3_000], [0.5, 0.3, 0.2]
NAMES = ("a", "b", "c")


def sources_of(samples: list[int]) -> list[float]:
    """The part of each source in some samples."""
    found = np.bincount(np.searchsorted(np.cumsum(SIZES), samples, side="right"), minlength=3)
    return [count / len(samples) for count in found]


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_ten_thousand_samples_are_mixed_as_wanted(shuffle: bool) -> None:
    order = MixedOrder(SIZES, WEIGHTS, 3, shuffle)
    for start in (0, 1, 9_999, 23_700 - 5_000, 10**6):
        drawn = order.indices(start, start + 10_000)
        assert sources_of(drawn) == pytest.approx(WEIGHTS, abs=0.001)
        assert sources_of(drawn[:500]) == pytest.approx(WEIGHTS, abs=0.01)


def test_the_steps_of_a_run_are_mixed_as_wanted() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, sum(SIZES))
    order = MixedOrder(SIZES, WEIGHTS, 0)
    rows = RowOptions(128, rows_per_step=32)
    planner = StepPlanner(
        order, lambda at: [Measured(one, int(lengths[one])) for one in order.indices(at, at + 99)], rows
    )
    drawn: list[int] = []
    while len(drawn) < 10_000:
        step = planner.next_step()
        assert step is not None
        drawn += [draw.sample for row in step.rows for draw in row]
    assert sources_of(drawn) == pytest.approx(WEIGHTS, abs=0.01)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_sources_are_drawn_through_in_turn_wherever_the_stream_is_read(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    weights = data.draw(st.lists(st.floats(1, 3), min_size=len(sizes), max_size=len(sizes)))
    if sum(sizes) < 4 * len(sizes):  # so few that a source might give none
        sizes = [size + 4 for size in sizes]
    order = MixedOrder(sizes, weights, 1, data.draw(st.booleans()), epochs=5)
    whole = order.indices(0, 10**6)
    assert len(whole) == order.total == 5 * sum(sizes)
    place = data.draw(st.integers(0, len(whole)))
    again = MixedOrder(sizes, weights, 1, order.shuffle, epochs=5)
    assert again.indices(place, place + 7) == whole[place : place + 7]
    first = 0
    for size, share in zip(sizes, order.shares, strict=True):
        own = [sample for sample in whole if first <= sample < first + size]
        assert len(own) == 5 * share
        for start in range(0, len(own), size):  # each sample once before any comes again
            passed = own[start : start + size]
            assert len(set(passed)) == len(passed)
        first += size


def test_shares_are_whole_and_never_none() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3] and shares([2.0], 7) == [7]
    with pytest.raises(
        ValueError, match=r"weight 0.01 of source 1 gives it no sample of an epoch, which has 10"
    ):
        shares([1, 0.01], 10)
    assert SampleOrder(5, seed=3).indices(0, 5) == np.random.default_rng((3, 0)).permutation(5).tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, questions and a table of pairs, told apart by what they say."""
    folder = tmp_path_factory.mktemp("mix")
    talk = {"query": "What is it?", "response": "It is b."}
    rows = {"a": [{"text": f"a {n}"} for n in range(40)], "b": [{**talk, "id": n} for n in range(9)]}
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "c.csv").write_text("instruction,output,text\n" + "".join(f"say,c {n},\n" for n in range(11)))
    return folder


def specs(folder: Path) -> list[dict[str, Any]]:
    return [
        {"path": f"{folder}/a.jsonl", "weight": 5, "format": "text"},
        {"path": f"{folder}/b.jsonl", "weight": 3, "ignore_keys": ["id"], "system": "Be brief."},
        {"path": f"{folder}/c.csv", "weight": 2, "format": "alpaca"},
    ]


def mixed_loader(folder: Path, mesh: Mesh, **options: Any) -> Loader:
    model, tokenizer = tiny_training_model("llama")
    encoder = SampleEncoder(tokenizer, model.config, MediaFiles(folder), system="Be kind.")
    rows = {"row_tokens": 128, "rows_per_step": 4, "buffer_size": 20, "epochs": 2, **options}
    return make_loader(open_mix(specs(folder)), lambda: encoder, mesh, **rows)


def seen(loader: Loader, count: int | None = None) -> list[list[list[str]]]:
    """What the rows of each step say."""
    tokenizer = tiny_training_model("llama")[1]
    found: list[list[list[str]]] = []
    while count is None or len(found) < count:
        step = next(loader, None)
        if step is None:
            break
        found.append([[tokenizer.decode(sample["input_ids"]) for sample in row] for row in step.rows])
    return found


def kind(text: str) -> str:
    return "a" if text.startswith("a ") else "b" if "It is b." in text else "c" if "c " in text else "?"


def test_each_source_has_its_own_format_and_options(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = seen(mixed_loader(files, Mesh()))
    texts = [text for step in whole for row in step for text in row]
    assert Counter(map(kind, texts)) == {"a": 60, "b": 36, "c": 24}
    assert all(("Be brief." in text) == (kind(text) == "b") for text in texts)
    assert all(("Be kind." in text) == (kind(text) == "c") for text in texts)
    assert len({text for text in texts if kind(text) == "a"}) == 40  # 1.5 times through in two epochs
    for at in (1, len(whole) // 2, len(whole) - 1):
        first = mixed_loader(files, Mesh())
        seen(first, at)
        state = json.loads(json.dumps(first.state_dict()))
        second = mixed_loader(files, Mesh())
        second.load_state_dict(state)
        assert seen(second) == whole[at:]


def on_ranks(folder: Path) -> list[list[list[str]]]:
    return seen(mixed_loader(folder, Mesh(dp_shard=2)))


def test_the_mix_is_the_same_on_two_ranks(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = [sorted(row for row in step if row) for step in seen(mixed_loader(files, Mesh()))]
    parts = ranks.run(on_ranks, 2, files)
    assert [sorted(row for part in step for row in part if row) for step in zip(*parts, strict=True)] == whole


def test_other_weights_or_options_are_other_data(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entries = specs(files)
    prints = {open_mix(entries).fingerprint}
    for change in ({"weight": 6}, {"system": "x"}, {"ignore_keys": ["n"]}, {"format": "auto"}):
        prints.add(open_mix([{**entries[0], **change}, *entries[1:]]).fingerprint)
    assert len(prints) == 5
    joined = open_mix([{key: value for key, value in entry.items() if key != "weight"} for entry in entries])
    assert not isinstance(joined, MixedSource) and len(joined) == 60
    same = [f"{files}/a.jsonl", {"path": f"{files}/a.jsonl", "format": "text"}]
    assert open_mix(same).where(0).endswith("a.jsonl:1") and open_mix(same).where(0) != "a.jsonl:1"
    assert open_mix(f"{files}/a.jsonl").fingerprint == open_mix([f"{files}/a.jsonl"]).fingerprint


def test_what_is_otherwise_at_a_resume_is_named(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entries = specs(files)
    begun = make_loader(open_mix(entries), lambda: None, Mesh(), row_tokens=128, rows_per_step=4, epochs=2)
    state = json.loads(json.dumps(begun.state_dict()))
    grown = tmp_path / "a.jsonl"
    grown.write_text((files / "a.jsonl").read_text() + '{"text": "more"}\n')
    plain = [{key: x for key, x in entry.items() if key != "weight"} for entry in entries]
    for other, what in (
        ([{**entries[0], "path": str(grown)}, *entries[1:]], "a.jsonl changed"),
        ([{**entries[0], "format": "auto"}, *entries[1:]], "a.jsonl changed"),
        ([*entries[:2]], "c.csv is missing; the weights are [5.0, 3.0], were [5.0, 3.0, 2.0]"),
        ([entries[1], entries[0], entries[2]], "the files are in another order; the weights are [3.0, 5.0, "),
        (
            [{**entries[0], "weight": 6}, *entries[1:]],
            "the weights are [6.0, 3.0, 2.0], were [5.0, 3.0, 2.0]",
        ),
        (plain, "the weights are none, were [5.0, 3.0, 2.0]"),
    ):
        resumed = make_loader(
            open_mix(other), lambda: None, Mesh(), row_tokens=128, rows_per_step=4, epochs=2
        )
        with pytest.raises(ValueError) as error:
            resumed.load_state_dict(state)
        assert f"not those that the run began with: {what}" in str(error.value)
        assert "restore them, or give another out" in str(error.value)
    del state["files"]  # of an earlier version
    with pytest.raises(ValueError, match="the state was saved with source="):
        resumed.load_state_dict(state)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([{"path": "a", "weight": 1}, "b"], r"data.train\[1\] has no weight, but others have"),
        ([{"path": "a", "wieght": 1}], "unknown key 'wieght'.*did you mean 'weight'"),
        ([{"path": "a", "weight": 0}], r"data.train\[0\].weight is a number above 0"),
        ([{"path": "a", "weight": float("nan")}], "above 0"),
        ([{"weight": 1}], r"data.train\[0\].path is a file"),
        ([{"path": "a", "format": "json"}], r"data.train\[0\].format='json' is no format"),
        ([{"path": "a", "system": 5}], "system is a string"),
        ([{"path": "a", "ignore_keys": ["loss"]}], r"data.train\[0\].ignore_keys has loss"),
        ([{"path": "a.jsonl", "streaming": True}], "a.jsonl is no dataset of the Hub.*leave `streaming` out"),
        ([{"path": "hf:a/b", "streaming": "yes"}], r"data.train\[0\].streaming is true or false"),
        ([{"path": "hf:a/b", "streaming": True, "take": 0}], r"data.train\[0\].take is a number of records"),
        ([{"path": "hf:a/b", "take": 5}], "only what is streamed is read in part; set `streaming: true`"),
        (["a", 5], "is a path or an entry"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_meant_are_refused(entries: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_specs(entries)
