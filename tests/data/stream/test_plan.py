"""The plan holds every sample once per epoch, and depends on the data and the seed alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.data.stream.order import SampleOrder
from seqbraid.data.stream.plan import BAD, Measured, PlannedStep, RowOptions, StepPlanner
from tests.helpers.toy import records

LENGTHS = [record["n"] for record in records(37)]


def measured(
    order: SampleOrder, lengths: Sequence[int], window: int = 1
) -> Callable[[int], Sequence[Measured]]:
    def measure(position: int) -> list[Measured]:
        found = order.indices(position, position + window)
        assert found, "measured beyond the end of the stream"
        return [Measured(sample, lengths[sample], f"reason {sample}") for sample in found]

    return measure


def planner(
    lengths: Sequence[int] = LENGTHS,
    *,
    epochs: int | None = 3,
    window: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> StepPlanner:
    order = SampleOrder(len(lengths), seed, shuffle, epochs)
    settings = {"row_tokens": 32, "rows_per_step": 3, "buffer_size": 8, "seed": seed, **options}
    return StepPlanner(order, measured(order, lengths, window), RowOptions(**settings))


def steps(of: StepPlanner) -> Iterator[PlannedStep]:
    return iter(of.next_step, None)


def test_every_sample_is_drawn_once_per_epoch_and_rows_hold_no_more_than_they_may() -> None:
    plan = list(steps(planner()))
    draws = [draw for step in plan for row in step.rows for draw in row]
    assert sorted(draw.position for draw in draws) == list(range(3 * 37))
    for epoch in range(3):
        mine = [draw.sample for draw in draws if epoch * 37 <= draw.position < (epoch + 1) * 37]
        assert sorted(mine) == list(range(37))
    assert all(draw.length == LENGTHS[draw.sample] for draw in draws)
    assert all(sum(draw.length for draw in row) <= 32 for step in plan for row in step.rows)
    assert [step.step for step in plan] == list(range(len(plan)))
    assert all(len(step.rows) == 3 for step in plan[:-1])
    assert 1 <= len(plan[-1].rows) <= 3
    drawn = 0
    for step in plan:
        drawn += sum(map(len, step.rows))
        assert (step.done, step.epoch) == (drawn, drawn / 37)
    assert plan[-1].epoch == 3.0


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Sets smaller and larger than the buffer, some of whose samples are bad or too long."""
    lengths = draw(st.lists(st.sampled_from([BAD, 1, 2, 3, 5, 8, 13, 16, 17, 40]), min_size=1, max_size=40))
    return {
        "lengths": [*lengths, draw(st.integers(1, 16))],  # one at least is usable
        "row_tokens": 16,
        "rows_per_step": draw(st.integers(1, 5)),
        "buffer_size": draw(st.integers(1, 30) | st.just(1024)),
        "over_long": draw(st.sampled_from(["drop", "truncate"])),
        "on_bad_sample": "skip",
        "epochs": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
    }


@settings(max_examples=300, deadline=None)
@given(runs(), st.integers(1, 50), st.integers(0, 200))
def test_an_epoch_is_a_permutation_in_every_run_and_after_any_resume(
    run: dict[str, Any], window: int, stop: int
) -> None:
    plan = list(steps(planner(**run)))
    lengths, longest = run["lengths"], 16 if run["over_long"] == "drop" else 99
    usable = [sample for sample, length in enumerate(lengths) if 0 < length <= longest]
    drawn = [draw.sample for step in plan for row in step.rows for draw in row]
    of_epochs = [drawn[first : first + len(usable)] for first in range(0, len(drawn), len(usable))]
    assert [sorted(samples) for samples in of_epochs] == [usable] * run["epochs"]

    drawn_so_far, seen = 0, 0.0
    for step in plan:
        drawn_so_far += sum(map(len, step.rows))
        assert step.epoch == step.done / len(lengths) > seen
        # What is left out counts with the sample that follows it, so no epoch ends before all are drawn.
        assert step.epoch // 1 <= drawn_so_far // len(usable) and drawn_so_far <= step.done
        seen = step.epoch

    done = plan[stop % len(plan)]
    resumed = planner(**run, window=window)
    resumed.load_state_dict(json.loads(json.dumps(done.state)))
    rest = [replace(step, bad=[]) for step in steps(resumed)]  # those found before are reported again
    assert rest == [replace(step, bad=[]) for step in plan[done.step + 1 :]]


def test_a_set_smaller_than_the_buffer_is_not_drawn_from_many_epochs_at_once() -> None:
    """96 samples once had 30 of them seen after 99 draws, and one 12 times."""
    lengths = np.random.default_rng(0).integers(20, 400, 96).tolist()
    endless = steps(planner(lengths, row_tokens=512, rows_per_step=2, buffer_size=1024, epochs=None))
    drawn = [draw.sample for step in islice(endless, 150) for row in step.rows for draw in row]
    for first in range(0, 288, 96):
        assert len(set(drawn[first : first + 96])) == 96
    assert drawn[:96] != drawn[96:192], "the order is another in each epoch"


def test_the_plan_does_not_depend_on_how_the_samples_are_measured() -> None:
    plans = [[step.rows for step in steps(planner(window=window))] for window in (1, 7, 256)]
    assert plans[0] == plans[1] == plans[2]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    first, other = SampleOrder(50, seed=1), SampleOrder(50, seed=2)
    assert first.indices(0, 50) != first.indices(50, 100)
    assert first.indices(0, 50) != other.indices(0, 50)
    assert first.indices(30, 170) == [first.indices(p, p + 1)[0] for p in range(30, 170)]
    assert SampleOrder(50, shuffle=False).indices(48, 52) == [48, 49, 0, 1]


@pytest.mark.parametrize("epochs", [2, None])
def test_a_planner_goes_on_from_the_state_of_any_step(epochs: int | None) -> None:
    whole = list(islice(steps(planner(epochs=epochs)), 30))
    for done in whole:
        resumed = planner(epochs=epochs, window=5)
        resumed.load_state_dict(json.loads(json.dumps(done.state)))
        rest = list(islice(steps(resumed), len(whole) - done.step - 1))
        assert rest == whole[done.step + 1 :], f"after step {done.step}"


def test_a_finished_run_goes_on_with_more_epochs() -> None:
    last = list(steps(planner(epochs=1)))[-1]
    longer = planner(epochs=2)
    longer.load_state_dict(json.loads(json.dumps(last.state)))
    draws = [draw for step in steps(longer) for row in step.rows for draw in row]
    assert sorted(draw.position for draw in draws) == list(range(37, 74))
    same = planner(epochs=1)
    same.load_state_dict(json.loads(json.dumps(last.state)))
    assert same.next_step() is None


def test_the_state_does_not_grow() -> None:
    endless = planner(epochs=None)
    sizes = [len(json.dumps(step.state)) for step in islice(steps(endless), 300)]
    assert max(sizes[150:]) < 1.1 * max(sizes[:30])


def test_an_over_long_sample_is_named_dropped_or_cut() -> None:
    lengths = [5, 40, 6, 7]
    with pytest.raises(ValueError, match=r"sample 1: 40 tokens, but a row holds 32; use over_long='trunc"):
        list(steps(planner(lengths)))
    for over_long, times in (("drop", 0), ("truncate", 2)):
        plan = list(steps(planner(lengths, epochs=2, over_long=over_long)))
        assert Counter(draw.sample for step in plan for row in step.rows for draw in row)[1] == times
        assert [draw.sample for step in plan for draw in step.over_long] == [1, 1]
        assert all(sum(min(32, draw.length) for draw in row) <= 32 for step in plan for row in step.rows)


def test_a_bad_sample_stops_the_plan_or_is_left_out_and_reported_once() -> None:
    lengths = [5, BAD, 6, 7]
    with pytest.raises(ValueError, match=r"^sample 1: reason 1$"):
        list(steps(planner(lengths)))
    plan = list(steps(planner(lengths, epochs=3, on_bad_sample="skip")))
    drawn = Counter(draw.sample for step in plan for row in step.rows for draw in row)
    assert drawn == {0: 3, 2: 3, 3: 3}
    assert [tuple(bad) for step in plan for bad in step.bad] == [(1, "sample 1", "reason 1")]


def test_an_epoch_without_a_usable_sample_is_an_error_and_not_a_loop() -> None:
    for epochs in (None, 1):
        with pytest.raises(ValueError, match=r"none of the 3 samples can be used: 2 are bad, the others lon"):
            planner([BAD, 99, BAD], epochs=epochs, on_bad_sample="skip", over_long="drop").next_step()
    with pytest.raises(ValueError, match="the source is empty"):
        planner([])


def test_resume_in_the_middle_of_an_epoch_knows_that_it_had_usable_samples() -> None:
    lengths = [20] * 6 + [BAD] * 6
    options: dict[str, Any] = {
        "shuffle": False,
        "epochs": None,
        "on_bad_sample": "skip",
        "buffer_size": 2,
        "rows_per_step": 1,
    }
    whole = list(islice(steps(planner(lengths, **options)), 20))
    for done in whole[:12]:
        resumed = planner(lengths, **options)
        resumed.load_state_dict(done.state)
        assert next(steps(resumed)).rows == whole[done.step + 1].rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows_per_step": 0}, "rows_per_step=0"),
        ({"row_tokens": 0}, "row_tokens=0"),
        ({"over_long": "cut"}, "over_long='cut' must be one of"),
        ({"on_bad_sample": "ignore"}, "on_bad_sample='ignore' must be one of"),
        ({"epochs": 0}, "epochs=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner(**options)
