"""Which items of a data set are in which row of which micro-batch, and the loader of a rank's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..data.stream.order import SampleOrder
from ..layout.streaming import StreamingPacker
from ..mesh import Mesh

RowItems = tuple[int, ...]
"""The numbers of its items."""


@dataclass(frozen=True)
class RowSettings:
    """How items are dealt out; with the seed and the number of items it decides every row."""

    items: int = 1
    """Items of a row, where `row_tokens` does not fill it."""
    rows: int = 1
    """Rows of a data rank's micro-batch."""
    row_tokens: int | None = None
    """Tokens that a row may hold; None: a row has so many `items`."""
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    """Leave out the items at the end that do not fill a micro-batch of all ranks."""


class RowSampler:
    """A batch sampler: the rows of this data rank, micro-batch by micro-batch.

    All ranks have the same number of micro-batches, each of the same number of rows: at the end of an epoch
    some may be empty. No item comes twice.

    >>> mesh = Mesh(dp_shard=2, rank=1, world_size=2)
    >>> list(RowSampler(RowSettings(items=2, shuffle=False), 5, None, mesh))
    [[(2, 3)], [()]]
    """

    def __init__(
        self, settings: RowSettings, num_items: int, lengths: Sequence[int] | None, mesh: Mesh
    ) -> None:
        self.settings, self.mesh, self.num_items = settings, mesh, num_items
        self.order = SampleOrder(num_items, settings.seed, settings.shuffle)
        self.epoch = 0
        self._packed = None if settings.row_tokens is None else self._pack(settings.row_tokens, lengths or ())
        count = len(self.rows_of_epoch())
        all_rows = settings.rows * mesh.data_world_size
        self._len = count // all_rows if settings.drop_last else -(-count // all_rows)
        if not self._len:
            raise ValueError(
                f"the data set has {num_items} items, fewer than one micro-batch of {mesh.data_world_size} "
                "data ranks; use a smaller batch size, or drop_last=False"
            )

    def set_epoch(self, epoch: int) -> None:
        """Each epoch has an order of its own."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[list[RowItems]]:
        rows, count = self.rows_of_epoch(), self.settings.rows
        stride = count * self.mesh.data_world_size
        for number in range(self._len):
            start = number * stride + self.mesh.data_rank * count
            own = rows[start : start + count]
            yield own + [()] * (count - len(own))

    def rows_of_epoch(self) -> list[RowItems]:
        """The rows of all ranks."""
        if self._packed is not None:
            if not self.settings.shuffle or not self.epoch:
                return self._packed
            rng = np.random.default_rng((self.settings.seed, self.epoch, 1))
            return [self._packed[i] for i in rng.permutation(len(self._packed))]
        first, size = self.epoch * self.num_items, self.settings.items
        items = self.order.indices(first, first + self.num_items)
        if self.settings.drop_last:
            items = items[: len(items) // size * size]
        return [tuple(items[start : start + size]) for start in range(0, len(items), size)]

    def _pack(self, row_tokens: int, lengths: Sequence[int]) -> list[RowItems]:
        """In the first epoch the rows are those of `seqbraid train`; later ones have them in another order,
        so that all have as many.
        """
        for item, length in enumerate(lengths):
            if length > row_tokens:
                raise ValueError(
                    f"item {item} of the data set has {length} tokens, but a row holds {row_tokens}; cut it "
                    f"or leave it out, or use rows of at least {length} tokens"
                )
        packer = StreamingPacker[int](row_tokens, lambda item: lengths[item], seed=self.settings.seed)
        return [tuple(row) for row in packer.pack(self.order.indices(0, self.num_items))]


class Numbers(Dataset[Any]):
    """Gives the rows that a sampler asks for as they are: `RowMaker` looks their items up."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, row: RowItems) -> RowItems:
        return row


class Dealt(IterableDataset[Any]):
    """A stream that every rank reads in full, of which each takes the rows of its data rank."""

    def __init__(self, stream: Any, items: int, mesh: Mesh) -> None:
        self.stream, self.items, self.mesh = stream, items, mesh

    def set_epoch(self, epoch: int) -> None:
        """For streams that shuffle."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[list[Any]]]:
        stream = iter(self.stream)
        first = self.mesh.data_rank * self.items
        while True:
            try:
                found = list(islice(stream, self.items * self.mesh.data_world_size))
            except Exception as error:  # other ranks may not meet it, and would wait
                yield [[error]]
                return
            if not found:
                return
            yield [found[first : first + self.items]]


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell the sampler or the stream of a loader which epoch it is."""
    of = loader.dataset if isinstance(loader.dataset, Dealt) else loader.batch_sampler
    of.set_epoch(epoch)  # type: ignore[union-attr]


def lengths_of(dataset: Any, length_column: str) -> list[int]:
    """The tokens of each item of a data set that is tokenized already."""
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        found = [dataset[i] for i in range(len(dataset))]
        if all(isinstance(item, dict) and "input_ids" in item for item in found):
            return [len(item["input_ids"]) for item in found]
    elif length_column in columns:
        return [int(length) for length in dataset[length_column]]
    elif "input_ids" in columns:
        from pyarrow.compute import list_value_length

        tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
        return [n for table in tables for n in list_value_length(table["input_ids"]).to_pylist()]
    raise ValueError(
        "packing needs the lengths of all items ahead, but the data set has neither input_ids nor a column "
        f"{length_column!r}; tokenize it, add the column, or leave packing out: then each batch is one row"
    )
