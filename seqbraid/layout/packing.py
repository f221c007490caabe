"""Which samples share a row, and which data rank computes which row of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """The row of every sample; `rows[i]` is the ascending array of the samples in row i.

    >>> rows = pack_rows([6, 3, 5, 2], row_tokens=8)
    >>> [row.tolist() for row in rows], rows.fill
    ([[0, 3], [1, 2]], 1.0)
    """

    row_of_sample: IntArray
    num_rows: int
    row_tokens: int
    num_tokens: int

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens; 1 where there is no row, as nothing is wasted."""
        return self.num_tokens / (self.num_rows * self.row_tokens) if self.num_rows else 1.0

    @cached_property
    def order(self) -> IntArray:
        """Samples grouped by row: row i holds `order[offsets[i]:offsets[i + 1]]`."""
        return _stable_argsort(self.row_of_sample)

    @cached_property
    def offsets(self) -> IntArray:
        """Where each row begins in `order`, and the end of the last; one more than there are rows."""
        offsets = np.zeros(self.num_rows + 1, np.int64)
        np.cumsum(np.bincount(self.row_of_sample, minlength=self.num_rows), out=offsets[1:])
        return offsets

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> IntArray:
        row = range(self.num_rows)[row]
        return self.order[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[row] for row in range(self.num_rows))


def pack_rows(lengths: ArrayLike, row_tokens: int) -> Rows:
    """Best-fit-decreasing packing: each sample, longest first, goes to the fullest row that still has room.

    Equal to placing one sample after the other (ties between equally full rows are free), but the work is
    done once per distinct length and range of equally full rows.
    """
    if row_tokens < 1:
        raise ValueError(f"row_tokens={row_tokens} holds no sample; use at least 1")
    checked = _checked_lengths(lengths, row_tokens)

    longest_first = _stable_argsort(row_tokens - checked)
    descending = checked[longest_first]
    starts = np.flatnonzero(np.diff(descending, prepend=row_tokens + 1))
    counts = np.diff(starts, append=len(descending))
    placements, num_rows = _place(descending[starts].tolist(), counts.tolist(), row_tokens)

    # Each placement (first row, rows, samples per row) takes the next rows × samples of the sorted samples.
    first, width, per_row = np.array(placements, np.int64).reshape(-1, 3).T
    touched = np.repeat(first - (np.cumsum(width) - width), width) + np.arange(width.sum())
    row_of_sample = np.empty(len(checked), np.int64)
    row_of_sample[longest_first] = np.repeat(touched, np.repeat(per_row, width))
    return Rows(row_of_sample, num_rows, row_tokens, int(checked.sum()))


def _place(lengths: list[int], counts: list[int], row_tokens: int) -> tuple[list[int], int]:
    """Placements of the sorted samples, as flat triples (first row, rows, samples per row), and row count.

    Best fit puts equal samples into the tightest row until it has no room for another, for the row just used
    stays the tightest. That leaves less space than the sample is long, so the row is out of play until the
    length has shrunk to its space. Two piles are therefore enough: `ready`, the spaces >= length, a stack
    with the tightest on top; and `waiting`, the spaces < length, a max-heap that feeds the stack as the
    length shrinks.
    """
    placements: list[int] = []
    num_rows = 0
    rows_with: dict[int, list[tuple[int, int]]] = {}  # space -> ranges (first row, rows) that have it left
    ready: list[int] = []
    waiting: list[int] = []  # negated: heapq is a min-heap
    for length, count in zip(lengths, counts, strict=True):
        while waiting and -waiting[0] >= length:
            ready.append(-heappop(waiting))
        while count:
            if ready:
                space = ready[-1]
                first, width = rows_with[space].pop()
                if not rows_with[space]:
                    del rows_with[ready.pop()]
            else:
                space, first, width = row_tokens, num_rows, -(-count // (row_tokens // length))
                num_rows += width

            per_row = space // length
            num_full = min(width, count // per_row)
            if num_full:
                placements += (first, num_full, per_row)
                count -= num_full * per_row
                left = space - per_row * length
                if left in rows_with:
                    rows_with[left].append((first, num_full))
                elif left:
                    rows_with[left] = [(first, num_full)]
                    heappush(waiting, -left)

            # The samples ran out within the range: one row may take the last few, others stay as they are.
            if num_full < width:
                first, width, used = first + num_full, width - num_full, int(count > 0)
                if used:
                    placements += (first, 1, count)
                for left, start, num in (
                    (space, first + used, width - used),
                    (space - count * length, first, used),
                ):
                    if num and left in rows_with:
                        rows_with[left].append((start, num))
                    elif num:
                        rows_with[left] = [(start, num)]
                        ready.append(left)
                count = 0
    return placements, num_rows


def _checked_lengths(lengths: ArrayLike, row_tokens: int) -> IntArray:
    array: NDArray[Any] = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths has shape {array.shape}; give one length per sample, shape [num_samples]")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"lengths has dtype {array.dtype}; lengths are numbers of tokens; give integers")
    if array.min() < 1:
        sample = int(np.argmax(array < 1))
        raise ValueError(f"sample {sample} has length {array[sample]}; every sample has at least 1 token")
    if array.max() > row_tokens:
        sample = int(np.argmax(array > row_tokens))
        raise ValueError(
            f"sample {sample} has length {array[sample]} but a row holds {row_tokens} tokens; use "
            f"row_tokens >= {array.max()}, or drop or truncate over-long samples first"
        )
    return array.astype(np.int64)


def _stable_argsort(keys: IntArray) -> IntArray:
    """Stable argsort of non-negative keys, by 16 bits at a time, which numpy does with a radix sort."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, int(keys.max(initial=0)).bit_length(), 16):
        digits = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


@dataclass(frozen=True)
class CostModel:
    """Cost of a row, `linear · Σ l + quadratic · Σ l²` over the expanded lengths l of its samples.

    The defaults are a dense 8 B decoder's (36 layers of 32 heads × 128) in units of its cost per token:
    softmax attention costs as much as all the rest for a sample of 44 K tokens. Those of a model at hand are
    those of its FLOPs (`plan.flops.ModelFlops.cost_model`).
    """

    linear: float = 1.0
    quadratic: float = 2.3e-5

    def __post_init__(self) -> None:
        if not (0 <= self.linear < np.inf and 0 <= self.quadratic < np.inf):
            raise ValueError(
                f"{self} has a negative or infinite coefficient; costs must grow with the length"
            )

    def of_lengths(self, lengths: Sequence[int]) -> float:
        """Cost of one row of samples of these lengths."""
        return float(sum((self.linear + self.quadratic * length) * length for length in lengths))


def level_rows(costs: ArrayLike, num_ranks: int) -> list[list[int]]:
    """The rows of one step that each of `num_ranks` data ranks computes, most expensive first.

    Row counts differ by one at most. Ranks wait for each other in every micro-batch, so rows of neighbouring
    cost share one: the most expensive of them goes to the rank with the least so far. The totals of two ranks
    differ by no more than the rows of some one micro-batch do (a rank without a row there has one of cost 0).

    >>> level_rows([3, 9, 5, 7, 1], num_ranks=2)
    [[1, 0, 4], [3, 2]]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1")
    cost = np.asarray(costs, np.float64)
    if cost.ndim != 1:
        raise ValueError(f"costs has shape {cost.shape}; give one cost per row, shape [num_rows]")
    if not (np.isfinite(cost) & (cost >= 0)).all():
        row = int(np.argmin(np.isfinite(cost) & (cost >= 0)))
        raise ValueError(f"row {row} has cost {cost[row]}; costs are finite and not negative")

    rows_of: list[list[int]] = [[] for _ in range(num_ranks)]
    total = [0.0] * num_ranks
    descending = np.argsort(-cost, kind="stable").tolist()
    for first in range(0, len(descending), num_ranks):
        least_first = sorted(range(num_ranks), key=total.__getitem__)
        for row, rank in zip(descending[first : first + num_ranks], least_first, strict=False):
            rows_of[rank].append(row)
            total[rank] += cost[row]
    return rows_of
