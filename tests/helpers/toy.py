"""A source in memory and an encoder whose samples say which record they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from seqbraid import Mesh
from seqbraid.comm.whereabouts import Whereabouts
from seqbraid.data.stream.loader import Loader, Reading
from seqbraid.data.stream.plan import RowOptions
from seqbraid.data.stream.workers import WorkerOptions


@dataclass(frozen=True)
class ListSource:
    """Records in a list."""

    records: Sequence[dict[str, Any]]
    fingerprint: str = "toy"

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        if record["fate"] == "not json":
            raise ValueError("not JSON")
        return record

    def where(self, index: int) -> str:
        return f"toy.jsonl:{index + 1}"


def make_loader(
    source: Any,
    make_encoder: Callable[[], Any],
    mesh: Mesh | None = None,
    *,
    prepare: Any = None,
    where: Whereabouts | None = None,
    **options: Any,
) -> Loader:
    """A loader, its options without the dataclasses that they are fields of."""
    of: dict[type, dict[str, Any]] = {Reading: {}, RowOptions: {}, WorkerOptions: {}}
    for name, value in options.items():
        kind = next(kind for kind in of if name in {field.name for field in fields(kind)})
        of[kind][name] = value
    reading = Reading(source, make_encoder, **of[Reading])
    workers = WorkerOptions(**of[WorkerOptions])
    return Loader(reading, mesh or Mesh(), RowOptions(**of[RowOptions]), workers, prepare, where)


class ToyEncoder:
    """Encodes `{"n": tokens, "id": what the tokens are, "fate": what goes wrong}`."""

    def length(self, record: dict[str, Any]) -> int:
        if record["fate"] == "bad":
            raise ValueError("no such image")
        if record["fate"] == "bug":
            raise KeyError("oops")
        return record["n"] + (record["fate"] == "lie")

    def encode(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["fate"] == "body":
            raise ValueError("image file is truncated")
        if record["fate"] == "crash":
            raise KeyError("pixels")
        ids = torch.full((record["n"],), record["id"])
        sample = {"input_ids": ids, "labels": torch.arange(record["n"])}
        if record["fate"] == "late":
            sample["labels"][:-1] = -100
        if record["fate"] == "media":
            sample["pixel_values"] = torch.full((record["n"], 1024), float(record["id"]))
        return sample


def records(count: int, fates: dict[int, str] | None = None, longest: int = 20) -> list[dict[str, Any]]:
    """Records of many lengths, all different in what their tokens are."""
    lengths = np.random.default_rng(7).integers(1, longest + 1, count).tolist()
    return [{"id": i, "n": n, "fate": (fates or {}).get(i, "")} for i, n in enumerate(lengths)]


def ids(rows: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Which records are in the rows."""
    return [[int(sample["input_ids"][0]) for sample in row] for row in rows]
