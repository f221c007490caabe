"""Dense batches enter by the same door."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.layout import (
    dense_to_row,
    lengths_from_mask,
    row_to_dense,
    samples_from_dense,
    truncate_lengths,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.sampled_from(["left", "right"]),
    st.integers(0, 4),
)
def test_dense_and_row_are_inverse(lengths: list[int], side: str, extra: int) -> None:
    row = torch.arange(1, sum(lengths) + 1)
    dense = row_to_dense(row, lengths, fill=0, width=max(lengths) + extra, side=side)
    mask = (dense != 0).int()
    assert lengths_from_mask(mask) == tuple(lengths)
    assert torch.equal(dense_to_row(dense, mask), row)
    assert [s["input_ids"].tolist() for s in samples_from_dense(dense, mask)] == [
        part.tolist() for part in row.split(lengths)
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 60))
def test_truncation_names_every_token_it_cuts(lengths: list[int], limit: int) -> None:
    kept, cuts = truncate_lengths(lengths, limit)
    assert sum(kept) == min(limit, sum(lengths))
    assert sum(removed for _, _, removed in cuts) == sum(lengths) - sum(kept)
    rest = {sequence: keep for sequence, keep, _ in cuts}
    assert [n for n in (rest.get(i, length) for i, length in enumerate(lengths)) if n] == list(kept)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1]], "row 0 of the mask has padding between"),
        ([[1, 1], [0, 0]], "row 1 of the mask has no token"),
        ([[2, 1]], "zeros and ones"),
        ([1, 1], r"\[B, S\]"),
    ],
)
def test_masks_that_say_nothing_clear_are_refused(mask: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lengths_from_mask(torch.tensor(mask))
