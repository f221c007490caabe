"""Where records come from: JSON lines read at random by byte offset, files that are unpacked to such lines,
and Hugging Face datasets.
"""

from __future__ import annotations

import glob
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from .cache import RecordCache, UnpackedSource
from .jsonl import JsonlSource, digest, file_fingerprint
from .plain_json import show
from .streamed import StreamedSource, inline
from .unpack import COMPRESSED, KINDS, LINES, is_lines, suffixes

__all__ = ["DatasetSource", "JoinedSource", "JsonlSource", "Source", "open_source"]

ACCEPTED = (
    "a .jsonl, .ndjson, .json, .csv, .tsv (each also as .gz or .zst) or .parquet file, a pattern of such "
    "files, a folder written by `Dataset.save_to_disk`, or `hf:owner/name[:config][@split]`"
)

SAVED = ("state.json", "dataset_dict.json")
"""Files of `Dataset.save_to_disk` and of `DatasetDict.save_to_disk`."""


class Source(Protocol):
    """Records that can be read in any order; picklable, so that workers open their own."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """The record, parsed but not checked; `ValueError` if it cannot be read."""

    def where(self, index: int) -> str:
        """A name for the record that a user can look up, such as `train.jsonl:17`."""

    @property
    def fingerprint(self) -> str:
        """Changes when the records do."""


def open_source(
    paths: str | Sequence[str], cache: RecordCache | None = None, beside: Sequence[str] = ()
) -> Source:
    """Open one or several sources as one, in the order given; the files of a pattern are sorted by name.

    Files that cannot be read at random are unpacked to a folder, the `cache`. Names of records differ from
    those in other files, `beside`.
    """
    cache = RecordCache() if cache is None else cache
    paths = [paths] if isinstance(paths, str) else list(paths)
    names = [name for path in paths for name in expand(str(path))]
    if not names:
        raise ValueError(f"no data source is given; give {ACCEPTED}")
    # A file's own name is enough to find it by, unless two files share it.
    short = [Path(name).name for name in names]
    taken = [*short, *(Path(name).name for name in beside)]
    sources = [
        _open_one(name, own if taken.count(own) == 1 else name, cache)
        for name, own in zip(names, short, strict=True)
    ]
    empty = [name for name, source in zip(names, sources, strict=True) if not len(source)]
    if empty:
        raise ValueError(f"{empty[0]} holds no records")
    return sources[0] if len(sources) == 1 else JoinedSource(sources)


class DatasetSource:
    """A dataset of the library `datasets`."""

    def __init__(self, dataset: Any, name: str, fingerprint: str) -> None:
        # As Arrow, so that no feature is decoded here: pictures are opened where limits are kept.
        self.dataset = dataset.with_format("arrow")
        self.name = name
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        try:
            return inline(self.dataset[index].to_pylist()[0])
        except Exception as error:
            raise ValueError(f"the record cannot be read: {type(error).__name__}: {error}") from error

    def where(self, index: int) -> str:
        """The dataset's name and the row's number, counted from zero as the library does."""
        return f"{self.name}[{index}]"


class JoinedSource:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._starts = list(accumulate(map(len, self.sources), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        source, inner = self._find(index)
        return source[inner]

    def where(self, index: int) -> str:
        """The name that the record has in its own source."""
        source, inner = self._find(index)
        return source.where(inner)

    @property
    def fingerprint(self) -> str:
        """Of all the sources, in order."""
        return digest(source.fingerprint for source in self.sources)

    def _find(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        return self.sources[number], index - self._starts[number]


def expand(path: str) -> list[str]:
    """The files of a pattern, sorted by name; any other path as it is."""
    if path.startswith("hf:") or os.path.exists(path):
        return [path]
    if not glob.has_magic(path):
        raise ValueError(f"{path} does not exist; give {ACCEPTED}")
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise ValueError(f"no file matches {path}")
    return found


def _open_one(path: str, name: str, cache: RecordCache) -> Source:
    if path.startswith("hf:"):
        return _open_hub(path)
    if os.path.isdir(path):
        return _open_folder(path)
    kind, packed = suffixes(path)
    if kind in LINES and not packed:
        return JsonlSource(path, name)
    if kind in KINDS:
        if kind == ".json" and not packed and _call(path, is_lines, path):
            return JsonlSource(path, name)
        return UnpackedSource(path, name, cache)
    if kind == ".parquet" and not packed:
        dataset = _call(path, _datasets().Dataset.from_parquet, path)
        return DatasetSource(dataset, name, file_fingerprint(Path(path)))
    hint = "; its name does not say what is compressed: a.jsonl.gz" if packed in COMPRESSED else ""
    raise ValueError(f"{path} is not a supported data source; give {ACCEPTED}{hint}")


def _open_folder(path: str) -> Source:
    if not any(os.path.exists(os.path.join(path, name)) for name in SAVED):
        raise ValueError(
            f"{path} is a folder that `Dataset.save_to_disk` has not written; of a folder of files, give a "
            f"pattern such as {os.path.join(path, '*.jsonl')}"
        )
    dataset = _call(path, _datasets().load_from_disk, path)
    if isinstance(dataset, dict):
        raise ValueError(
            f"{path} has splits; give one of {', '.join(os.path.join(path, key) for key in dataset)}"
        )
    files = sorted({file["filename"] for file in dataset.cache_files})
    # The rows' own fingerprint tells apart two selections from the same files.
    prints = [file_fingerprint(Path(file)) for file in files]
    return DatasetSource(dataset, Path(path).name, digest([dataset._fingerprint, *prints]))


def open_stream(path: str, take: int | None, cache: RecordCache) -> Source:
    """A dataset of the Hub of which no more is downloaded than is read."""
    name, config, split = _hub_name(path)
    builder = _call(path, _datasets().load_dataset_builder, name, config)
    source = _call(path, StreamedSource, builder, split, path, take, cache)
    if not len(source):
        raise ValueError(f"{path} holds no records")
    return source  # type: ignore[no-any-return]


def _open_hub(path: str) -> Source:
    name, config, split = _hub_name(path)
    dataset = _call(path, _datasets().load_dataset, name, config, split=split)
    return DatasetSource(dataset, path, digest([dataset._fingerprint, str(len(dataset))]))


def _hub_name(path: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of `hf:owner/name[:config][@split]`."""
    found = re.fullmatch(
        r"hf:(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?", path
    )
    if found is None:
        raise ValueError(f"{show(path)} is not the name of a dataset; write hf:owner/name[:config][@split]")
    return found["name"], found["config"], found["split"] or "train"


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError:
        raise ValueError(
            "datasets is not installed; pip install 'seqbraid[datasets]', or use .jsonl"
        ) from None


def _call(path: str, open_: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the library, whose failures are of many kinds, and name the source in what it says."""
    try:
        return open_(*args, **kwargs)
    except ValueError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be opened: {type(error).__name__}: {error}") from error
