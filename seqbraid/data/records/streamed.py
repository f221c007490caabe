"""Datasets of the Hub that are streamed: read once, from their beginning, into the cache of records."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .cache import Lines, RecordCache
from .jsonl import JsonlSource

BATCH = 256
"""Records of a stream that are at hand at once."""


class StreamedSource(JsonlSource):
    """The first records of a stream, or all of them, as JSON lines.

    A stream itself has no order but its own and no number of records; what was read of it is read at random,
    so that an epoch is a permutation, and a run goes on bit for bit.

    Args:
        builder: of `datasets.load_dataset_builder`.
        split: of its streaming datasets.
        path: names the dataset, as a configuration does.
        take: how many records are read; all when left out.
        cache: where they are kept.
    """

    def __init__(self, builder: Any, split: str, path: str, take: int | None, cache: RecordCache) -> None:
        def blocks() -> Iterable[bytes]:
            dataset = builder.as_streaming_dataset(split)
            return _blocks(dataset if take is None else dataset.take(take))

        # The hash is of the files that the dataset consists of, and of the commit that they are from.
        seen = ["streamed", path, split, builder.config_id, str(builder.hash), str(take)]
        instead = "read less of it: give the source `take`, the number of records"
        super().__init__(cache.lines(Lines(path, seen, blocks, instead)), path)

    def where(self, index: int) -> str:
        """The number of the record in the stream, counted from zero."""
        return f"{self.name}[{index}]"


def _blocks(dataset: Any) -> Iterator[bytes]:
    """The records of a stream, undecoded: pictures are opened where limits are kept."""
    for table in dataset.with_format("arrow").iter(BATCH):
        rows = (json.dumps(inline(row), ensure_ascii=False, default=str) for row in table.to_pylist())
        yield "".join(f"{row}\n" for row in rows).encode()


def inline(value: Any) -> Any:
    """A value in which files of media that `datasets` has within its tables are `data:` URIs.

    >>> inline({"image": {"bytes": b"abc", "path": "a.png"}})
    {'image': {'url': 'data:;base64,YWJj'}}
    """
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
            return {"url": f"data:;base64,{b64encode(value['bytes']).decode()}"}
        return {key: inline(item) for key, item in value.items()}
    return [inline(item) for item in value] if isinstance(value, list) else value
