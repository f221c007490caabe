"""The same steps on any mesh, with any workers, after any interruption; errors reach every rank."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections import Counter
from math import prod
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from seqbraid import Mesh
from seqbraid.layout.packing import CostModel
from tests.helpers import ranks
from tests.helpers.loaders import FATES, MESHES, alone, data_workers, joined, loader, on_a_rank, padded, told
from tests.helpers.toy import ListSource, ToyEncoder, ids, make_loader, records

# --- meshes


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_steps_states_and_reports_are_those_of_one_process_on_any_mesh(
    axes: dict[str, int], tmp_path: Path
) -> None:
    source = records(37, FATES)
    options = {"source": source, "on_bad_sample": "skip"}
    steps, states = alone(**options)
    bad_file = tmp_path / "bad.jsonl"
    found = ranks.run(on_a_rank, prod(axes.values()), axes, {**options, "bad_file": bad_file})
    assert joined(found) == padded(steps, axes.get("dp_shard", 1))
    assert [step[2] for step in found[0]] == states
    listed = [json.loads(line) for line in bad_file.read_text().splitlines()]
    assert sorted((line["index"], line["where"], line["reason"]) for line in listed) == [
        (3, "toy.jsonl:4", "no such image"),
        (11, "toy.jsonl:12", "not JSON"),
        (17, "toy.jsonl:18", "image file is truncated"),
        (20, "toy.jsonl:21", f"length() said {source[20]['n'] + 1}, encode() gave {source[20]['n']}"),
    ]
    assert found[0][-1][3].count == 4
    drawn = sorted(i for _, rows in steps for row in rows for i in row)
    assert drawn == sorted([i for i in range(37) if i not in (3, 11, 17, 20)] * 2)


def test_a_run_goes_on_on_another_mesh() -> None:
    options = {"source": records(37, FATES), "on_bad_sample": "skip"}
    steps, states = alone(**options)
    for after, axes in ((2, {"dp_shard": 2}), (5, {"dp_shard": 2, "ring": 2})):
        state = json.loads(json.dumps(states[after]))
        found = ranks.run(on_a_rank, prod(axes.values()), axes, {**options, "prefetch_steps": 4}, state)
        assert joined(found) == padded(steps[after + 1 :], 2)
        assert [step[2] for step in found[0]] == states[after + 1 :]


def test_a_run_goes_on_after_any_step_with_other_workers_and_prefetch() -> None:
    options = {"source": records(37, FATES), "on_bad_sample": "skip"}
    steps, states = alone(**options)
    assert len(steps) > 8
    for after, state in enumerate(states):
        resumed = loader(**options, prefetch_steps=after % 4, workers=2 * (after in (1, len(steps) - 2)))
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        assert [told(step) for step in resumed] == steps[after + 1 :], f"after step {after}"
        assert resumed.state_dict()["left_out"] == states[-1]["left_out"]
        resumed.close()


def test_a_bad_sample_stays_out_of_the_run_even_if_it_is_mended_before_the_run_goes_on() -> None:
    steps, states = alone(source=records(37, {3: "bad"}), on_bad_sample="skip")
    after = next(i for i, state in enumerate(states) if state["left_out"]["measured_bad"])
    resumed = loader(on_bad_sample="skip")
    resumed.load_state_dict(states[after])
    assert [told(step) for step in resumed] == steps[after + 1 :]
    assert resumed.bad.count == 1


def test_an_epoch_is_a_permutation_after_a_resume_on_another_mesh_too() -> None:
    """A set smaller than the buffer: its samples are drawn once each before any is drawn again."""
    options = {"source": records(96), "row_tokens": 64, "rows_per_step": 2, "buffer_size": 1024, "epochs": 3}
    steps, states = alone(**options)
    middle = next(i for i, (head, _) in enumerate(steps) if head[1] > 1.4)
    found = ranks.run(
        on_a_rank, 4, {"dp_shard": 2, "ring": 2}, options, json.loads(json.dumps(states[middle]))
    )
    assert joined(found) == padded(steps[middle + 1 :], 2)
    times = Counter(range(96))
    for _, rows in steps[: middle + 1] + joined(found):
        times.update(i for row in rows for i in row)
        assert max(times.values()) - min(times.values()) <= 1
    assert set(times.values()) == {4}
    seen, num_drawn = 0.0, 0
    for (_, epoch, *_), rows in steps:
        num_drawn += sum(map(len, rows))
        assert epoch == num_drawn / 96 > seen
        seen = epoch


def costs_on_a_rank(axes: dict[str, int], quadratic: float) -> list[list[int]]:
    """What the rows of each step cost on this rank."""
    cost = CostModel(1.0, quadratic)
    steps = loader(Mesh(**axes), rows_per_step=10, epochs=2, cost=cost)
    return [[int(cost.of_lengths([len(s["input_ids"]) for s in row])) for row in step.rows] for step in steps]


def test_rows_of_a_step_are_level_over_data_ranks() -> None:
    """By the given cost: rows of as many tokens may differ in their longest sample."""
    for quadratic in (0.0, 1.0):
        found = ranks.run(costs_on_a_rank, 4, {"dp_shard": 4}, quadratic)
        for of_ranks in zip(*found, strict=True):
            counts = [sum(cost > 0 for cost in costs) for costs in of_ranks]
            assert max(counts) - min(counts) <= 1
            assert all(costs == sorted(costs, reverse=True) for costs in of_ranks)
            # Sorted as one list, the rows are cut into micro-batches.
            batches = [sorted(batch, reverse=True) for batch in zip(*of_ranks, strict=True)]
            in_order = [cost for batch in batches for cost in batch]
            assert in_order == sorted((cost for costs in of_ranks for cost in costs), reverse=True)
            totals = [sum(costs) for costs in of_ranks]
            assert max(totals) - min(totals) <= max(batch[0] - batch[-1] for batch in batches)


def test_a_step_tells_how_full_its_rows_are() -> None:
    steps = list(loader(rows_per_step=2, epochs=1))
    for step in steps:
        assert step.fill == step.tokens / (32 * len(step.rows))
    assert sum(step.tokens for step in steps) == sum(record["n"] for record in records(37))


def test_a_state_of_other_data_or_settings_is_refused() -> None:
    one = loader()
    next(one)
    state = one.state_dict()
    with pytest.raises(
        ValueError,
        match="format 1, this version of seqbraid reads 3; finish the run with the version",
    ):
        loader().load_state_dict({key: value for key, value in state.items() if key != "format"})
    for options, message in [
        ({"seed": 1}, "seed=0 but this loader has seed=1"),
        ({"rows_per_step": 4}, "rows_per_step=3 but this loader has rows_per_step=4"),
        ({"source": records(36)}, "num_samples=37 but this loader has num_samples=36"),
        ({"over_long": "drop"}, "over_long='error' but this loader has over_long='drop'"),
        ({"row_tokens": 64}, "row_tokens=32 but this loader has row_tokens=64"),
        ({"buffer_size": 9}, "buffer_size=8 but this loader has buffer_size=9"),
        ({"shuffle": False}, "shuffle=True but this loader has shuffle=False"),
    ]:
        with pytest.raises(ValueError, match=message):
            loader(**options).load_state_dict(state)
    edited = ListSource(records(37), fingerprint="as many other records")
    other = make_loader(edited, ToyEncoder, Mesh(), row_tokens=32, rows_per_step=3, buffer_size=8, epochs=2)
    with pytest.raises(ValueError, match="not those that the run began with: the data changed"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="has begun already"):
        one.load_state_dict(state)


# --- bad samples


def stopped(axes: dict[str, int], fates: dict[int, str], options: dict[str, Any]) -> None:
    for _ in loader(Mesh(**axes), records(37, fates), **options):
        pass


@pytest.mark.parametrize(
    ("fates", "message"),
    [
        ({5: "bad"}, "toy.jsonl:6: no such image"),
        ({5: "body"}, "toy.jsonl:6: image file is truncated"),
        ({5: "bug"}, "toy.jsonl:6: KeyError: 'oops'"),
        ({5: "crash"}, "toy.jsonl:6: KeyError: 'pixels'"),
    ],
)
def test_what_one_rank_sees_stops_all(fates: dict[int, str], message: str) -> None:
    for raised in ranks.errors(stopped, 4, {"dp_shard": 4}, fates, {}):
        assert message in raised.message


def differing(what: str) -> None:
    rank = int(os.environ["RANK"])
    if what == "data":
        loader(Mesh(dp_shard=2), records(37 + rank))
    elif what == "epochs":
        loader(Mesh(dp_shard=2), epochs=2 + rank)
    elif what == "state":
        state = loader(Mesh(dp_shard=2)).state_dict()
        loader(Mesh(dp_shard=2)).load_state_dict({**state, "done": rank})
    elif what == "worker":
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        mine = loader(Mesh(dp_shard=2), workers=1, epochs=40)
        next(mine)
        if rank == 1:
            data_workers()[0].kill()
        for _ in mine:
            pass


def test_ranks_that_do_not_agree_stop_together() -> None:
    for raised in ranks.errors(differing, 2, "data"):
        assert "rank 1 has num_samples=38 but rank 0 has 37" in raised.message
    for raised in ranks.errors(differing, 2, "epochs"):
        assert "rank 1 has epochs=3 but rank 0 has 2" in raised.message
    for raised in ranks.errors(differing, 2, "state"):
        assert "rank 1 has state=" in raised.message
    for raised in ranks.errors(differing, 2, "worker", limit=120.0):
        assert "was ended by SIGKILL; the host may be out of memory" in raised.message


def test_bad_samples_are_logged_up_to_ten_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    source = records(60, dict.fromkeys(range(0, 28, 2), "bad") | {1: "body"})
    with caplog.at_level(logging.WARNING):
        many = loader(source=source, on_bad_sample="skip", epochs=3)
        list(many)
    assert many.bad.count == 15
    assert len(many.bad.first) == 10
    assert sum("skipped a bad sample: toy.jsonl:" in message for message in caplog.messages) == 10
    assert many.state_dict()["left_out"]["first_bad"] == [list(bad) for bad in many.bad.first]


def test_a_source_of_which_nothing_can_be_used_is_an_error() -> None:
    for fate, message in (("bad", "none of the 6 samples can be used"), ("body", "could be encoded")):
        source = records(6, dict.fromkeys(range(6), fate))
        with pytest.raises(ValueError, match=message):
            list(loader(source=source, on_bad_sample="skip", epochs=None))
    with pytest.raises(ValueError, match="the source is empty"):
        make_loader(ListSource([]), ToyEncoder, Mesh(), row_tokens=8, rows_per_step=1)


def test_a_step_says_where_its_samples_are_from_without_those_that_were_skipped() -> None:
    steps = list(loader(source=records(37, FATES), on_bad_sample="skip"))
    for step in steps:
        assert step.where == [[f"toy.jsonl:{i + 1}" for i in row] for row in ids(step.rows)]
    assert sum(len(row) for step in steps for row in step.where) == 2 * (37 - 4)


def test_a_source_that_cannot_be_encoded_is_found_out_by_a_run_that_goes_on_too() -> None:
    options: dict[str, Any] = {
        "source": records(6, dict.fromkeys(range(6), "body")), "on_bad_sample": "skip", "epochs": None,
        "rows_per_step": 1, "row_tokens": 20, "buffer_size": 1, "prefetch_steps": 0,
    }  # fmt: skip
    seen = 0
    state = None
    with pytest.raises(ValueError, match="could be encoded"):
        while True:
            mine = loader(**options)
            if state is not None:
                mine.load_state_dict(state)
            assert not next(mine).samples
            state, seen = mine.state_dict(), seen + 1
            assert seen < 6, "six samples were tried"
    assert seen


def test_over_long_text_is_cut_and_over_long_media_are_bad() -> None:
    source = records(8)
    source[2] |= {"n": 50}
    source[5] |= {"n": 40, "fate": "media"}
    cut = loader(source=source, over_long="truncate", on_bad_sample="skip", epochs=1)
    steps = list(cut)
    samples = {int(s["input_ids"][0]): s for step in steps for row in step.rows for s in row}
    assert sorted(samples) == [0, 1, 2, 3, 4, 6, 7]
    assert samples[2]["labels"].tolist() == list(range(32))
    assert cut.bad.count == 1
    assert (
        "cannot truncate a sample with the key 'pixel_values', only input_ids, labels, attention_mask, "
        "fields: a cut could take placeholders and leave their media; use over_long='drop'"
    ) in cut.bad.first[0].reason
    assert (cut.over_long.count, cut.over_long.tokens_lost) == (2, 18 + 8)
    assert sum(step.tokens for step in steps) == sum(min(32, r["n"]) for r in source if r["id"] != 5)


def test_a_flood_of_over_long_samples_is_counted_but_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    source = [record | {"n": 40} if record["id"] % 2 else record for record in records(37)]
    for over_long, said, lost in (("truncate", "cut it", 8), ("drop", "dropped it", 40)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            one = loader(source=source, over_long=over_long)
            list(one)
        assert (one.over_long.count, one.over_long.tokens_lost) == (36, 36 * lost)
        told_of = [text for text in caplog.messages if f": 40 tokens, but a row holds 32: {said}" in text]
        assert len(told_of) == 10 and told_of[-1].endswith("further ones are only counted")


def test_what_is_cut_before_its_first_label_is_left_out_and_counted_on_any_mesh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = records(37)
    for index, fate in {4: "late", 9: "late", 21: "", 30: "late"}.items():
        source[index] |= {"n": 33 + index, "fate": fate}
    options = {"source": source, "over_long": "truncate", "on_bad_sample": "error"}
    one = loader(**options)
    with caplog.at_level(logging.WARNING):
        drawn = [i for step in one for row in ids(step.rows) for i in row]
    assert sorted(drawn) == sorted([i for i in range(37) if i not in (4, 9, 30)] * 2)
    lost = 2 * (sum(source[index]["n"] for index in (4, 9, 30)) + source[21]["n"] - 32)
    assert (one.over_long.count, one.over_long.tokens_lost, one.over_long.without_labels) == (8, lost, 6)
    assert one.bad.count == 0
    assert "toy.jsonl:5: no label is among its first 32 tokens: left it out" in caplog.text
    steps, states = alone(**options)
    found = ranks.run(on_a_rank, 4, {"dp_shard": 2, "ring": 2}, options)
    assert joined(found) == padded(steps, 2)
    assert [step[2] for step in found[0]] == states
    resumed = loader(**options)
    resumed.load_state_dict(json.loads(json.dumps(states[2])))
    assert [told(step) for step in resumed] == steps[3:] and resumed.over_long == one.over_long


def test_a_source_of_which_no_label_is_left_is_an_error() -> None:
    source = [record | {"n": 40, "fate": "late"} for record in records(6)]
    for epochs in (1, None):
        with pytest.raises(
            ValueError, match="6 have no label in the part that a row holds: raise row_tokens"
        ):
            list(loader(source=source, over_long="truncate", epochs=epochs))


def test_after_an_error_the_loader_stays_stopped_and_its_state_is_that_of_the_last_step() -> None:
    source = records(37)
    broken = loader(source=source, prefetch_steps=0, shuffle=False, epochs=1)
    steps = [next(broken), next(broken)]
    state = broken.state_dict()
    source[36]["fate"] = "body"  # it is drawn near the end
    with pytest.raises(ValueError, match=r"toy.jsonl:37: image file is truncated"):
        while True:
            steps.append(next(broken))
            state = broken.state_dict()
    assert broken.state_dict() == state
    with pytest.raises(RuntimeError, match="has stopped"):
        next(broken)
    source[36]["fate"] = ""
    resumed = loader(source=source, shuffle=False, epochs=1)
    resumed.load_state_dict(state)
    found = [i for step in [*steps, *resumed] for row in ids(step.rows) for i in row]
    assert sorted(found) == list(range(37))


def test_progress_goes_from_nothing_to_all() -> None:
    one = loader()
    assert one.progress() == 0.0
    seen = 0
    for step in one:
        seen += step.samples
        assert one.progress() == seen / 74
    assert seen == 74
    assert loader(epochs=None).progress() is None


class SlowAtFirst(ToyEncoder):
    """An encoder that takes long for its first sample."""

    def __init__(self) -> None:
        self.seconds = 0.2

    def encode(self, record: dict[str, Any]) -> dict[str, Any]:
        sleep(self.seconds)
        self.seconds = 0.0
        return super().encode(record)


def test_a_step_waits_for_its_own_samples_alone() -> None:
    slow = make_loader(ListSource(records(37)), SlowAtFirst, Mesh(), row_tokens=32, rows_per_step=3, epochs=2)
    start = monotonic()
    waits = [step.wait_s for step in slow]
    assert 0.2 <= sum(waits) <= monotonic() - start
