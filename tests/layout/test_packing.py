import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.layout.packing import CostModel, level_rows, pack_rows

THOROUGH = settings(max_examples=200, deadline=None)


def best_fit_decreasing(lengths: list[int], row_tokens: int) -> list[int]:
    """Tokens of every row, one sample at a time: the tightest row with room, or else a new one."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, load in enumerate(loads) if load + length <= row_tokens]
        if fitting:
            loads[max(fitting, key=lambda row: loads[row])] += length
        else:
            loads.append(length)
    return loads


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int]:
    """Many samples of few lengths (ranges of equal rows), few of many, and sizes beyond 16 and 32 bits."""
    row_tokens = draw(st.sampled_from([1, 2, 7, 12, 30, 64, 100, 1 << 16, 100_000, 1 << 33]))
    length = st.integers(1, row_tokens)
    if draw(st.booleans()):
        few = draw(st.lists(length | st.integers(1, max(1, row_tokens // 4)), min_size=1, max_size=5))
        length = st.sampled_from(few)
    return draw(st.lists(length, max_size=80)), row_tokens


@THOROUGH
@given(packings())
def test_rows_are_those_of_one_at_a_time_best_fit_decreasing(packing: tuple[list[int], int]) -> None:
    lengths, row_tokens = packing
    rows = pack_rows(lengths, row_tokens)
    loads = [sum(lengths[sample] for sample in row) for row in rows]
    assert sorted(loads) == sorted(best_fit_decreasing(lengths, row_tokens))
    assert rows.fill == (sum(loads) / (len(loads) * row_tokens) if loads else 1.0)


@THOROUGH
@given(packings())
def test_every_sample_is_in_one_row_and_no_row_is_over_full(packing: tuple[list[int], int]) -> None:
    lengths, row_tokens = packing
    rows = pack_rows(lengths, row_tokens)
    assert rows.row_of_sample.shape == (len(lengths),) and rows.row_of_sample.dtype == np.int64
    assert len(rows) == rows.num_rows and rows.row_tokens == row_tokens
    assert sorted(sample for row in rows for sample in row.tolist()) == list(range(len(lengths)))
    for number, row in enumerate(rows):
        assert row.tolist() == sorted(row.tolist())
        assert (rows.row_of_sample[row] == number).all()
        assert 0 < sum(lengths[sample] for sample in row) <= row_tokens


def test_rows_read_like_a_sequence() -> None:
    rows = pack_rows(np.array([6, 3, 5, 2], np.int32), 8)
    assert [row.tolist() for row in rows] == [[0, 3], [1, 2]]
    assert rows[-1].tolist() == [1, 2]
    assert rows.order.tolist() == [0, 3, 1, 2] and rows.offsets.tolist() == [0, 2, 4]
    with pytest.raises(IndexError):
        rows[2]


def test_a_long_tailed_corpus_fills_its_rows() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(1000), 1.3, 50_000), 1, 32768).astype(np.int64)
    rows = pack_rows(lengths, 32768)
    loads = np.bincount(rows.row_of_sample, lengths)
    assert loads.max() <= 32768 and len(loads) == rows.num_rows
    assert rows.fill == pytest.approx(lengths.sum() / (rows.num_rows * 32768)) and rows.fill > 0.999
    assert np.array_equal(rows.row_of_sample, pack_rows(lengths, 32768).row_of_sample)


def test_nothing_to_pack_gives_no_rows() -> None:
    rows = pack_rows([], 8)
    assert len(rows) == 0 and list(rows) == [] and rows.offsets.tolist() == [0] and rows.fill == 1.0
    assert level_rows([], 4) == [[], [], [], []]


@pytest.mark.parametrize(
    ("lengths", "row_tokens", "message"),
    [
        (
            [3, 9, 5, 12],
            8,
            r"sample 1 has length 9 but a row holds 8 tokens.*>= 12, or drop or truncate over-long",
        ),
        ([3, 0, 2], 8, "sample 1 has length 0"),
        ([3, 4, -1], 8, "sample 2 has length -1"),
        ([1.0, 2.0], 8, "dtype float64"),
        ([True, True], 8, "dtype bool"),
        ([[1, 2]], 8, r"shape \(1, 2\)"),
        ([1, 2], 0, "row_tokens=0"),
        ([], -1, "row_tokens=-1"),
    ],
)
def test_pack_rows_refuses(lengths: list[int], row_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_rows(lengths, row_tokens)


def test_row_cost_is_linear_plus_quadratic_in_its_samples() -> None:
    assert CostModel(10.0, 1.0).of_lengths([6, 2]) == 80.0 + 36 + 4
    assert CostModel(10.0, 1.0).of_lengths([3, 5]) == 80.0 + 9 + 25
    with pytest.raises(ValueError, match="quadratic=-1"):
        CostModel(1.0, -1.0)


def test_decoder_cost_counts_its_products() -> None:
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab = 4096, 12288, 36, 32, 8, 128, 151936
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    num_params = layers * (attention + 3 * hidden * intermediate) + hidden * vocab
    model = CostModel(6.0 * num_params, 7.0 * layers * heads * head_dim)

    length = 10_000
    visible = length * (length + 1) / 2
    products = {"scores": 1, "output": 1, "scores again": 1, "dv": 1, "dp": 1, "dq": 1, "dk": 1}
    flops = 3 * 2 * num_params * length + sum(products.values()) * 2 * head_dim * heads * layers * visible
    assert model.of_lengths([length]) == pytest.approx(flops, rel=1e-4)
    default = CostModel()
    assert default.quadratic / default.linear == pytest.approx(model.quadratic / model.linear, rel=0.02)


@THOROUGH
@given(st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 5.0, 7.0]), max_size=60), st.integers(1, 9))
def test_rows_of_a_step_are_level_over_ranks_and_in_each_micro_batch(
    costs: list[float], num_ranks: int
) -> None:
    rows_of = level_rows(costs, num_ranks)
    assert sorted(row for rows in rows_of for row in rows) == list(range(len(costs)))
    counts = [len(rows) for rows in rows_of]
    assert len(rows_of) == num_ranks and max(counts) - min(counts) <= 1

    batches = [[costs[rows[place]] for rows in rows_of if place < len(rows)] for place in range(max(counts))]
    assert [cost for batch in batches for cost in sorted(batch, reverse=True)] == sorted(costs, reverse=True)
    totals = [sum(costs[row] for row in rows) for rows in rows_of]
    spread = [max(batch) - (min(batch) if len(batch) == num_ranks else 0) for batch in batches]
    assert max(totals) - min(totals) <= max(spread, default=0) + 1e-9 * max(totals)


def test_ranks_wait_less_for_each_other_than_with_rows_as_they_come() -> None:
    """Steps of 32 full rows of a long-tailed corpus over 8 ranks, which differ in their longest samples."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(1000), 1.3, 40_000), 1, 32768).astype(int)
    rows = [CostModel().of_lengths(lengths[row].tolist()) for row in pack_rows(lengths, 32768)]
    costs = np.random.default_rng(1).permutation(rows)
    waits = {"level": 0.0, "as they come": 0.0}
    for first in range(0, len(costs) - 31, 32):
        step = costs[first : first + 32]
        for name, rows_of in (
            ("level", level_rows(step, 8)),
            ("as they come", [range(rank, 32, 8) for rank in range(8)]),
        ):
            totals = [step[list(rows)].sum() for rows in rows_of]
            waits[name] += max(totals) / np.mean(totals) - 1
    assert waits["level"] < 0.3 * waits["as they come"]


@pytest.mark.parametrize(
    ("costs", "num_ranks", "message"),
    [
        ([1.0, -2.0], 2, "row 1 has cost -2"),
        ([1.0, 2.0, float("nan")], 2, "row 2 has cost nan"),
        ([float("inf")], 2, "row 0 has cost inf"),
        ([[1.0]], 2, "shape"),
        ([1.0], 0, "num_ranks=0"),
    ],
)
def test_level_rows_refuses(costs: list[float], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        level_rows(costs, num_ranks)
