"""Several sources, each with its own format and options, joined or mixed by weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from .cache import RecordCache
from .formats import FormatName, check_format, check_ignored
from .jsonl import digest
from .plain_json import show
from .source import JoinedSource, Source, expand, open_source, open_stream

__all__ = ["Described", "MixedSource", "RecordOptions", "SourceSpec", "open_mix", "parse_specs"]

Specs = str | Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True)
class RecordOptions:
    """How the records of one source are read, where that is not as the run has it for all."""

    format: FormatName | None = None
    system: str | None = None
    """The system prompt of conversations that have none; an empty one is none."""
    ignore_keys: frozenset[str] = frozenset()
    """Beside those of the run."""


@dataclass(frozen=True)
class Described:
    """A record and how it is read."""

    record: Any
    options: RecordOptions


@dataclass(frozen=True)
class SourceSpec:
    """An entry of `data.train`."""

    path: str | tuple[str, ...]
    """Or several, which are joined."""
    weight: float | None = None
    """The source's share of the samples, relative to the others' weights."""
    options: RecordOptions = field(default_factory=RecordOptions)
    streaming: bool = False
    """Read a dataset of the Hub without downloading more of it than is read."""
    take: int | None = None
    """So many records of a stream; all when left out."""


class DescribedSource:
    """A source whose records say how they are read."""

    def __init__(self, source: Source, options: RecordOptions) -> None:
        self.source, self.options = source, options

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Described:
        return Described(self.source[index], self.options)

    def where(self, index: int) -> str:
        """The record's name in its source."""
        return self.source.where(index)

    @property
    def fingerprint(self) -> str:
        """Of the records and of the options, which make other samples of them."""
        options = self.options
        said = json.dumps([options.format, options.system, sorted(options.ignore_keys)])
        return digest([self.source.fingerprint, said])


class MixedSource(JoinedSource):
    """Several sources that are drawn from by weights."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        super().__init__(sources)
        self.sizes = [len(source) for source in sources]
        self.weights = list(weights)

    @property
    def fingerprint(self) -> str:
        """Of the sources and their weights."""
        return digest([super().fingerprint, *map(str, self.weights)])


def open_mix(specs: Specs, cache: RecordCache | None = None) -> Source:
    """Open the sources that a configuration names: joined, or mixed where they have weights."""
    found = parse_specs(specs)
    cache = RecordCache() if cache is None else cache
    named = [[name for path in _paths(spec) for name in expand(path)] for spec in found]
    sources: list[Source] = []
    for number, spec in enumerate(found):
        others = [name for other in (*named[:number], *named[number + 1 :]) for name in other]
        if spec.streaming:
            source = open_stream(_paths(spec)[0], spec.take, cache)
        else:
            source = open_source(_paths(spec), cache, beside=others)
        sources.append(source if spec.options == RecordOptions() else DescribedSource(source, spec.options))
    if found and found[0].weight is not None:
        return MixedSource(sources, [spec.weight or 0.0 for spec in found])
    return sources[0] if len(sources) == 1 else JoinedSource(sources)


def parse_specs(specs: Specs, option: str = "data.train") -> list[SourceSpec]:
    """The entries of `data.train` or `data.eval`, checked; plain paths become one that joins them.

    >>> [spec.weight for spec in parse_specs([{"path": "a.jsonl", "weight": 3}, {"path": "b", "weight": 1}])]
    [3.0, 1.0]
    """
    entries = [specs] if isinstance(specs, str) else list(specs)
    if all(isinstance(entry, str) for entry in entries):
        return [SourceSpec(tuple(str(entry) for entry in entries))]
    found = [_spec(entry, f"{option}[{number}]") for number, entry in enumerate(entries)]
    without = [number for number, spec in enumerate(found) if spec.weight is None]
    if 0 < len(without) < len(found):
        raise ValueError(
            f"{option}[{without[0]}] has no weight, but others have; give each source a `weight`, or none"
        )
    return found


def _paths(spec: SourceSpec) -> list[str]:
    return [spec.path] if isinstance(spec.path, str) else list(spec.path)


def _spec(entry: Any, where: str) -> SourceSpec:
    if isinstance(entry, str):
        return SourceSpec(entry)
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"{where} is a path or an entry such as {{path: a.jsonl, weight: 0.5}}, not {show(entry)}"
        )
    known = ["path", "weight", "streaming", "take", *(field.name for field in fields(RecordOptions))]
    for key in entry:
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} has the unknown key {show(key)}; known are {', '.join(known)}{hint}")
    path = entry.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError(f"{where}.path is a file, pattern, folder or hf:NAME, not {show(path)}")
    weight = entry.get("weight")
    if weight is not None and (
        isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf
    ):
        raise ValueError(f"{where}.weight is a number above 0, not {show(weight)}")
    if not isinstance(entry.get("system") or "", str):
        raise ValueError(f"{where}.system is a string, not {show(entry['system'])}")
    if entry.get("format") is not None:
        check_format(entry["format"], f"{where}.format")
    options = RecordOptions(
        entry.get("format"), entry.get("system"), check_ignored(entry.get("ignore_keys") or (), where)
    )
    streaming, take = _stream(entry, path, where)
    return SourceSpec(path, None if weight is None else float(weight), options, streaming, take)


def _stream(entry: Mapping[str, Any], path: str, where: str) -> tuple[bool, int | None]:
    """Whether a source is streamed, and how many records are read of it."""
    streaming, take = entry.get("streaming") or False, entry.get("take")
    if not isinstance(streaming, bool):
        raise ValueError(f"{where}.streaming is true or false, not {show(streaming)}")
    if streaming and not path.startswith("hf:"):
        raise ValueError(
            f"{where}.streaming is true, but {path} is no dataset of the Hub (hf:owner/name); files are read "
            "at random as they are: leave `streaming` out"
        )
    if take is not None and (isinstance(take, bool) or not isinstance(take, int) or take < 1):
        raise ValueError(f"{where}.take is a number of records, not {show(take)}")
    if take is not None and not streaming:
        raise ValueError(
            f"{where}.take is {take}, but only what is streamed is read in part; set `streaming: true`"
        )
    return streaming, take
