import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.layout.streaming import StreamingPacker

THOROUGH = settings(max_examples=200, deadline=None)

Item = list[int]  # [index in the source, length]: a list, so that it survives JSON


def make_packer(case: dict[str, Any]) -> StreamingPacker[Item]:
    return StreamingPacker(
        case["row_tokens"],
        length=lambda item: item[1],
        buffer_size=case["buffer_size"],
        seed=case["seed"],
        epoch=lambda item: item[0] // case.get("per_epoch", 1 << 30),
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Streams with many equal lengths, so that ties are drawn."""
    row_tokens = draw(st.integers(1, 20))
    lengths = draw(st.lists(st.integers(1, row_tokens), max_size=25))
    return {
        "items": [[index, length] for index, length in enumerate(lengths)],
        "row_tokens": row_tokens,
        "buffer_size": draw(st.integers(1, 12)),
        "per_epoch": draw(st.integers(1, 30)),
        "seed": draw(st.integers(0, 3)),
    }


@THOROUGH
@given(cases())
def test_every_sample_is_in_one_row_and_no_row_is_over_full(case: dict[str, Any]) -> None:
    packer = make_packer(case)
    rows = list(packer.pack(case["items"]))
    assert sorted(item for row in rows for item in row) == case["items"]
    assert all(row and sum(length for _, length in row) <= case["row_tokens"] for row in rows)
    assert packer.num_drawn == len(case["items"])


@THOROUGH
@given(cases())
def test_every_sample_of_an_epoch_is_in_a_row_before_any_of_the_next(case: dict[str, Any]) -> None:
    rows = [{index // case["per_epoch"] for index, _ in row} for row in make_packer(case).pack(case["items"])]
    assert all(len(epochs) == 1 for epochs in rows), "a row of two epochs"
    in_order = [epoch for (epoch,) in rows]
    assert in_order == sorted(in_order)


@THOROUGH
@given(cases())
def test_a_row_is_the_oldest_sample_and_the_longest_that_fit(case: dict[str, Any]) -> None:
    """Of an epoch that is at hand whole: its rows are those of one plan."""
    case = {**case, "buffer_size": 30, "per_epoch": 30}
    waiting = list(case["items"])
    rows = list(make_packer(case).pack(case["items"]))
    while waiting:
        row = next(row for row in rows if waiting[0] in row)
        space = case["row_tokens"] - waiting[0][1]
        lengths = [length for _, length in waiting[1:]]
        greedy = [waiting[0][1]]
        while fitting := [length for length in lengths if length <= space]:
            greedy.append(max(fitting))
            lengths.remove(max(fitting))
            space -= max(fitting)
        assert Counter(length for _, length in row) == Counter(greedy)
        rows.remove(row)
        waiting = [item for item in waiting if item not in row]
    assert not rows


@THOROUGH
@given(cases())
def test_the_buffer_keeps_its_bound_and_no_sample_starves(case: dict[str, Any]) -> None:
    num_rows = 0
    num_out = 0
    rows_before_draw: list[int] = []

    def source() -> Iterator[Item]:
        for item in case["items"]:
            # This sample and those drawn that are in no row: all that the packer holds.
            assert len(rows_before_draw) + 1 - num_out <= case["buffer_size"]
            rows_before_draw.append(num_rows)
            yield item

    packer = make_packer(case)
    for row in packer.pack(source()):
        assert len(packer.at_hand()) <= case["buffer_size"]
        for index, _ in row:
            assert num_rows <= rows_before_draw[index] + 18 * case["buffer_size"]
        num_rows += 1
        num_out += len(row)
    assert packer.at_hand() == []


@pytest.mark.parametrize(("per_epoch", "num_epochs", "least_fill"), [(300, 60, 0.98), (20_000, 1, 0.998)])
def test_rows_are_full_and_long_samples_come_no_earlier_than_short_ones(
    per_epoch: int, num_epochs: int, least_fill: float
) -> None:
    """Neither in the course of a large set nor in each pass over a small one."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, per_epoch), 1, 4096).astype(int).tolist()
    items = [[index, lengths[index % per_epoch]] for index in range(per_epoch * num_epochs)]
    case = {"items": items, "row_tokens": 4096, "seed": 0, "buffer_size": 1024}
    rows = list(make_packer({**case, "per_epoch": per_epoch}).pack(items))
    assert sum(lengths) * num_epochs / (4096 * len(rows)) > least_fill
    found: dict[int, list[list[Item]]] = {}
    for row in rows:
        found.setdefault(row[0][0] // per_epoch, []).append(row)
    per_row = [0.0, 0.0, 0.0]
    for of_epoch in found.values():
        for third in range(3):
            part = of_epoch[third * len(of_epoch) // 3 : (third + 1) * len(of_epoch) // 3]
            per_row[third] += sum(map(len, part)) / len(part) / num_epochs
    assert max(per_row) < 1.1 * min(per_row)


def test_plans_of_few_rows_leave_little_room_too() -> None:
    """Samples so short that the buffer holds three to four rows of them."""
    lengths = np.random.default_rng(0).integers(5, 25, 20_000).tolist()
    case = {"row_tokens": 4096, "seed": 0, "buffer_size": 1024}
    rows = list(make_packer(case).pack([[index, length] for index, length in enumerate(lengths)]))
    assert sum(lengths) / (4096 * len(rows)) > 0.98


@THOROUGH
@given(cases())
def test_a_state_taken_after_any_row_continues_with_the_next(case: dict[str, Any]) -> None:
    packer = make_packer(case)
    states = [json.dumps(packer.state_dict())]
    rows = []
    for row in packer.pack(iter(case["items"])):
        rows.append(row)
        states.append(json.dumps(packer.state_dict()))
    states.append(json.dumps(packer.state_dict()))  # after the end

    for num_done, state in enumerate(states):
        resumed = make_packer(case)
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        assert list(resumed.pack(iter(case["items"]))) == rows[num_done:]
        assert resumed.num_drawn == packer.num_drawn


class Cursor:
    """A source that knows where it is, hands out its live state, and counts the draws."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.state = {"position": 0}
        self.num_drawn = 0

    def __iter__(self) -> Iterator[Item]:
        while self.state["position"] < len(self.items):
            self.state["position"] += 1
            self.num_drawn += 1
            yield self.items[self.state["position"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


@THOROUGH
@given(cases())
def test_a_source_with_a_state_is_set_to_it_and_not_drawn_again(case: dict[str, Any]) -> None:
    packer = make_packer(case)
    rows = []
    states = []
    for row in packer.pack(Cursor(case["items"])):
        rows.append(row)
        states.append(json.dumps(packer.state_dict()))
    for num_done, state in enumerate(states, start=1):
        resumed, source = make_packer(case), Cursor(case["items"])
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        remaining = resumed.pack(source)
        assert json.dumps(resumed.state_dict()) == state
        assert list(remaining) == rows[num_done:]
        assert source.num_drawn == len(case["items"]) - json.loads(state)["drawn"]

        stateless = make_packer(case)
        stateless.load_state_dict(json.loads(state))
        assert list(stateless.pack(iter(case["items"]))) == rows[num_done:]


def test_a_state_does_not_change_when_packing_goes_on() -> None:
    case = {"row_tokens": 4, "buffer_size": 6, "seed": 0}
    source = Cursor([[index, 1 + index % 4] for index in range(40)])
    packer = make_packer(case)
    rows = packer.pack(source)
    next(rows)
    state = packer.state_dict()
    before = json.dumps(state)
    list(rows)
    assert json.dumps(state) == before


def test_ties_and_the_order_in_a_row_follow_the_seed() -> None:
    items = [[index, 1] for index in range(200)]
    case = {"row_tokens": 10, "buffer_size": 100}
    rows = {seed: list(make_packer({**case, "seed": seed}).pack(items)) for seed in (0, 1)}
    assert rows[0] == list(make_packer({**case, "seed": 0}).pack(items)) != rows[1]
    assert {tuple(map(tuple, sorted(row))) for row in rows[0]} != {
        tuple(map(tuple, sorted(row))) for row in rows[1]
    }
    assert any(row != sorted(row) for row in rows[0]) and any(row[0] != min(row) for row in rows[0])


def test_an_over_long_sample_is_refused() -> None:
    packer = StreamingPacker(8, length=len)
    rows = packer.pack(["a" * n for n in (3, 8, 11, 12)])
    with pytest.raises(ValueError, match=r"sample 2 has 11 tokens .* holds 8; .*row_tokens >= 11"):
        next(rows)
    with pytest.raises(RuntimeError, match="within a row"):
        packer.state_dict()


def test_bad_samples_are_named() -> None:
    with pytest.raises(ValueError, match="sample 1 has length 0"):
        next(StreamingPacker(8, length=len).pack(["a", ""]))
    with pytest.raises(TypeError):
        next(StreamingPacker(8, length=lambda _: 1.5).pack(["a"]))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_tokens": 0}, "row_tokens=0"),
        ({"buffer_size": 0}, "buffer_size=0"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingPacker(**{"row_tokens": 8, "length": len, **arguments})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"row_tokens": 9}, "row_tokens=8 but this packer has row_tokens=9"),
        ({"buffer_size": 5}, "buffer_size=1024 but this packer has buffer_size=5"),
        ({"seed": 1}, "seed=0 but this packer has seed=1"),
    ],
)
def test_a_state_of_other_settings_is_refused(changed: dict[str, Any], message: str) -> None:
    state = StreamingPacker(8, length=len).state_dict()
    with pytest.raises(ValueError, match=message):
        StreamingPacker(**{"row_tokens": 8, "length": len, **changed}).load_state_dict(state)


def test_a_state_of_another_version_is_refused() -> None:
    state = StreamingPacker(8, length=len).state_dict()
    old = {key: value for key, value in state.items() if key != "drawn"} | {"report": {"drawn": 0}}
    with pytest.raises(ValueError, match="a version of seqbraid with another state format"):
        StreamingPacker(8, length=len).load_state_dict(old)


def test_a_packer_makes_one_pass() -> None:
    packer = StreamingPacker(2, length=len, buffer_size=2)
    rows = packer.pack(["a"] * 6)
    next(rows)
    state = packer.state_dict()
    with pytest.raises(RuntimeError, match="new StreamingPacker"):
        packer.pack(["a"])
    with pytest.raises(RuntimeError, match="new StreamingPacker"):
        packer.load_state_dict(state)
    resumed = StreamingPacker(2, length=len, buffer_size=2)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="ends after 1 samples but the state was taken after 2"):
        resumed.pack(["a"])
