"""Documents longer than a row are drawn in pieces, each token is predicted once, on any mesh."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from seqbraid import Mesh
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.stream.loader import Loader
from seqbraid.data.stream.plan import pieces
from seqbraid.data.tiny import tiny_training_model
from tests.helpers import ranks
from tests.helpers.toy import ListSource, make_loader

ROW = 16
LENGTHS = [3, 200, 16, 17, 15, 1, 40, 31, 9, 90, 2, 5]
RECORDS: list[dict[str, Any]] = [
    {"fate": "", "input_ids": [10 + index + place % 200 for place in range(max(length, 2))]}
    for index, length in enumerate(LENGTHS)
]


class Encoder(SampleEncoder):
    def __init__(self) -> None:
        model, tokenizer = tiny_training_model("llama")
        super().__init__(tokenizer, model.config, MediaFiles(Path(".")), ignore_keys=["fate"])


def loader(mesh: Mesh, records: list[dict[str, Any]] = RECORDS, **options: Any) -> Loader:
    options = {"row_tokens": ROW, "rows_per_step": 4, "epochs": 2, "buffer_size": 9, **options}
    return make_loader(ListSource(records), Encoder, mesh, over_long="split", **options)


Steps = list[list[list[tuple[list[int], list[int]]]]]


def steps(loaded: Loader, count: int | None = None) -> Steps:
    """Rows of ids and labels."""
    found: Steps = []
    while count is None or len(found) < count:
        step = next(loaded, None)
        if step is None:
            return found
        found.append(
            [[(one["input_ids"].tolist(), one["labels"].tolist()) for one in row] for row in step.rows]
        )
    return found


def predicted(found: Steps) -> Counter[tuple[int, ...]]:
    """How often each token is predicted, by itself and the one before it."""
    return Counter(
        pair
        for step in found
        for row in step
        for ids, labels in row
        for pair in zip(ids[:-1], labels[1:], strict=True)
    )


def test_pieces_overlap_by_the_token_that_is_no_label() -> None:
    for row_tokens in (2, 3, 16):
        for length in range(1, 70):
            found = pieces(length, row_tokens)
            targets = [place for start, stop in found for place in range(start + 1, stop)]
            assert targets == list(range(1, length)) and max(b - a for a, b in found) <= row_tokens


@pytest.mark.parametrize("text_bytes", [0, 1 << 20])
def test_every_token_is_predicted_once_an_epoch(text_bytes: int) -> None:
    found = steps(loader(Mesh(), text_bytes=text_bytes))
    wanted = Counter(
        pair for record in RECORDS for pair in zip(record["input_ids"], record["input_ids"][1:], strict=False)
    )
    assert predicted(found) == Counter({pair: 2 * count for pair, count in wanted.items()})
    assert all(sum(len(ids) for ids, _ in row) <= ROW for step in found for row in step)


def test_a_run_goes_on_within_a_document() -> None:
    whole = steps(loader(Mesh()))
    for at in range(1, len(whole)):
        first = loader(Mesh())
        steps(first, at)
        state = first.state_dict()
        second = loader(Mesh())
        second.load_state_dict(state)
        assert steps(second) == whole[at:], at


def on_ranks(axes: dict[str, int]) -> tuple[Steps, float]:
    one = loader(Mesh(**axes))
    found = steps(one)
    return found, one.progress() or 0.0


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"ring": 2}], ids=str)
def test_the_rows_are_the_same_on_any_mesh(axes: dict[str, int]) -> None:
    whole = [sorted(row for row in step if row) for step in steps(loader(Mesh()))]
    of_ranks = [found for found, _ in ranks.run(on_ranks, 2, axes)]
    parts = of_ranks if "dp_shard" in axes else of_ranks[:1]
    together = [
        sorted(row for of_rank in step for row in of_rank if row) for step in zip(*parts, strict=True)
    ]
    assert together == whole


def test_progress_and_epochs_count_documents() -> None:
    one = loader(Mesh(), buffer_size=3)
    seen = [(step.epoch, one.progress()) for step in one]
    assert seen == sorted(seen) and seen[-1] == (2.0, 1.0) and seen[0][0] < 0.5


def test_only_what_is_all_labels_is_split() -> None:
    ids = list(range(10, 40))
    masked = {"fate": "", "input_ids": ids, "labels": [-100, *ids[1:]]}
    reason = "30 tokens, but a row holds 16, and over_long='split' cuts only text of which every token"
    with pytest.raises(ValueError, match=reason):
        steps(loader(Mesh(), [*RECORDS, masked]))
    one = loader(Mesh(), [*RECORDS, masked], on_bad_sample="skip")
    assert steps(one) and one.bad.count == 1
    with pytest.raises(ValueError, match="at least 2"):
        loader(Mesh(), row_tokens=1)
