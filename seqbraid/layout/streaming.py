"""Packing of a stream of samples into rows, with a bounded buffer and a state to resume from."""

import copy
import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

T = TypeVar("T")

FULL = 0.99  # rows that are filled less may wait for the samples to come,
HELD_BACK = 1 / 8  # but one, or so many of the rows planned at a time,
TIMES_HELD_BACK = 16  # and no sample more than so many times


@runtime_checkable
class Stateful(Protocol):
    """A source that can be set to where it was, so that a resumed packer need not draw and skip samples."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> None: ...


class _Buffered(NamedTuple, Generic[T]):
    source_index: int
    length: int
    item: T
    times_held_back: int = 0


class StreamingPacker(Generic[T]):
    """Packs one pass over a source into rows of up to `row_tokens` tokens, `buffer_size` samples at hand.

    The samples at hand are planned together: a row starts with the oldest and takes the longest one that
    still fits until none does. The rows come out in random order, so that lengths do not drift, and while
    they do, samples come in for the next plan. The emptiest few of a plan's rows are held back for that one:
    one, or an eighth, and no sample more than 16 times. So no sample starves: at most `18 * buffer_size`
    rows come between its draw and its own.

    Samples for which `epoch(item)` differs never share a row, and all rows of an epoch come before those of
    the next, nothing held back, so that each of its samples is seen before any of the next.

    Samples of equal length are drawn, and rows and the order in a row are shuffled, by a generator seeded
    with `seed`.

    `length(item)` is the expanded length; a sample longer than a row is refused, so cut it or leave it out
    first. `num_drawn` counts the samples taken from the source.

    >>> packer = StreamingPacker(row_tokens=8, length=len, buffer_size=4)
    >>> sorted(sorted(map(len, row)) for row in packer.pack(["a" * n for n in (6, 3, 5, 2)]))
    [[2, 6], [3, 5]]
    """

    def __init__(
        self,
        row_tokens: int,
        length: Callable[[T], int],
        buffer_size: int = 1024,
        seed: int = 0,
        epoch: Callable[[T], int] | None = None,
    ) -> None:
        if row_tokens < 1:
            raise ValueError(f"row_tokens={row_tokens} holds no sample; use at least 1")
        if buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size} holds no sample; use at least 1")
        self.row_tokens = row_tokens
        self.buffer_size = buffer_size
        self.seed = seed
        self._length = length
        self._epoch = epoch or (lambda item: 0)
        self._rng = np.random.default_rng(seed)
        self.num_drawn = 0

        self._waiting: list[_Buffered[T]] = []  # for the next plan, oldest first
        self._planned: deque[list[_Buffered[T]]] = deque()  # rows, in the order in which they go out

        self._source: Iterable[T] | None = None
        self._source_state: Any = None
        self._exhausted = False
        self._between_rows = True

    def pack(self, source: Iterable[T]) -> Iterator[list[T]]:
        """Rows of the samples of `source`; give it from its beginning, also after `load_state_dict`."""
        if self._source is not None:
            raise RuntimeError("this packer already has a source; use a new StreamingPacker for another pass")
        self._source = source
        if self._exhausted:
            return self._rows(iter(()))
        if self._source_state is not None and isinstance(source, Stateful):
            source.load_state_dict(self._source_state)
            return self._rows(iter(source))
        samples = iter(source)
        skipped = sum(1 for _ in islice(samples, self.num_drawn))
        if skipped < self.num_drawn:
            raise ValueError(
                f"the source ends after {skipped} samples but the state was taken after "
                f"{self.num_drawn}; resume with the same source, from its beginning"
            )
        return self._rows(samples)

    def _rows(self, samples: Iterator[T]) -> Iterator[list[T]]:
        # All progress is in `self` before a row is yielded: the suspended generator holds nothing of its own.
        while True:
            self._between_rows = False
            self._fill_buffer(samples)
            row = self._next_row()
            self._between_rows = True
            if not row:
                return
            yield row

    def _fill_buffer(self, samples: Iterator[T]) -> None:
        space = self.buffer_size - len(self._waiting) - sum(map(len, self._planned))
        # No more than the first of a new epoch: what is left out would be reported long before its turn.
        while space > 0 and not self._exhausted and len(self._first_epoch()) == len(self._waiting):
            try:
                item = next(samples)
            except StopIteration:
                self._exhausted = True
                return
            self._waiting.append(self._fitted(self.num_drawn, item))
            self.num_drawn += 1
            space -= 1

    def _first_epoch(self) -> list[_Buffered[T]]:
        """The waiting samples of the oldest one's epoch: but for the latest, all that wait."""
        waiting = self._waiting
        if waiting and self._epoch(waiting[-1].item) != self._epoch(waiting[0].item):
            return waiting[:-1]
        return waiting

    def _fitted(self, index: int, item: T) -> _Buffered[T]:
        length = operator.index(self._length(item))
        if length < 1:
            raise ValueError(f"sample {index} has length {length}; every sample has at least 1 token")
        if length > self.row_tokens:
            raise ValueError(
                f"sample {index} has {length} tokens but a row holds {self.row_tokens}; cut it or leave it "
                f"out, or use row_tokens >= {length}"
            )
        return _Buffered(index, length, item)

    def _next_row(self) -> list[T]:
        if not self._planned and self._waiting:
            self._plan()
        if not self._planned:
            return []
        row = self._planned.popleft()
        return [row[place].item for place in self._rng.permutation(len(row))]

    def _plan(self) -> None:
        samples = self._first_epoch()
        rest = self._waiting[len(samples) :]
        rows = plan_rows(samples, self.row_tokens, self._rng)
        held_back = [] if self._exhausted or rest else self._worth_holding_back(rows)
        back = {sample.source_index for row in held_back for sample in row}
        self._waiting = [
            sample._replace(times_held_back=sample.times_held_back + 1)
            for sample in samples
            if sample.source_index in back
        ] + rest
        kept = [row for row in rows if row[0].source_index not in back]
        self._planned.extend(kept[place] for place in self._rng.permutation(len(kept)))

    def _worth_holding_back(self, rows: list[list[_Buffered[T]]]) -> list[list[_Buffered[T]]]:
        """The emptiest rows, that samples to come may fill better."""
        tokens = [sum(sample.length for sample in row) for row in rows]
        emptiest_first = sorted(range(len(rows)), key=tokens.__getitem__)
        found = [
            rows[place]
            for place in emptiest_first
            if tokens[place] < FULL * self.row_tokens
            and all(sample.times_held_back < TIMES_HELD_BACK for sample in rows[place])
        ]
        # One in any case where others go out: a plan of few rows has one that is not full at its end.
        return found[: max(int(HELD_BACK * len(rows)), min(1, len(rows) - 1))]

    def at_hand(self) -> list[T]:
        """The samples that were drawn and are in no row yet."""
        rows = (self._waiting, *self._planned)
        return [sample.item for row in rows for sample in row]

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("row_tokens", "buffer_size", "seed")}

    def state_dict(self) -> dict[str, Any]:
        """What a new packer needs to go on after the last row yielded; JSON-able but for items and source."""
        if not self._between_rows:
            raise RuntimeError("packing stopped within a row; the state can be saved only between two rows")
        source_state = self._source_state
        if self._source is not None:
            resumable = isinstance(self._source, Stateful) and not self._exhausted
            source_state = copy.deepcopy(cast(Stateful, self._source).state_dict()) if resumable else None
        return {
            "settings": self._settings(),
            "drawn": self.num_drawn,
            "waiting": [sample._asdict() for sample in self._waiting],
            "planned": [[sample._asdict() for sample in row] for row in self._planned],
            "rng": self._rng.bit_generator.state,
            "exhausted": self._exhausted,
            "source": source_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; for a new packer with the same settings, before `pack`."""
        if self._source is not None or self.num_drawn:
            raise RuntimeError(
                "this packer has already yielded rows; load the state into a new StreamingPacker"
            )
        if "drawn" not in state:
            raise ValueError(
                "the state is from a version of seqbraid with another state format; start from the beginning"
            )
        for name, value in self._settings().items():
            saved = state["settings"][name]
            if saved != value:
                raise ValueError(
                    f"the state was saved with {name}={saved!r} but this packer has {name}={value!r}"
                )
        self.num_drawn = state["drawn"]
        self._waiting = [_Buffered(**sample) for sample in state["waiting"]]
        self._planned = deque([_Buffered(**sample) for sample in row] for row in state["planned"])
        self._rng.bit_generator.state = state["rng"]
        self._exhausted = state["exhausted"]
        self._source_state = state["source"]


def plan_rows(
    samples: Sequence[_Buffered[T]], row_tokens: int, rng: np.random.Generator
) -> list[list[_Buffered[T]]]:
    """Rows of samples, each the oldest that is left and the longest ones that still fit."""
    places_of = defaultdict[int, list[int]](list)  # length -> places of the samples left, oldest first
    for place, sample in enumerate(samples):
        places_of[sample.length].append(place)
    lengths = sorted(places_of)

    def take(length: int, number: int) -> _Buffered[T]:
        places = places_of[length]
        place = places.pop(number)
        left.discard(place)
        if not places:
            del lengths[bisect_left(lengths, length)]
        return samples[place]

    left = set(range(len(samples)))
    rows: list[list[_Buffered[T]]] = []
    for place, oldest in enumerate(samples):
        if place not in left:
            continue
        row = [take(oldest.length, 0)]
        space = row_tokens - oldest.length
        while num_fitting := bisect_right(lengths, space):
            length = lengths[num_fitting - 1]
            row.append(take(length, int(rng.integers(len(places_of[length])))))
            space -= length
        rows.append(row)
    return rows
