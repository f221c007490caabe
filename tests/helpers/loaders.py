"""Loaders of toy records, their steps in one process, and those of all ranks joined."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

from seqbraid import Mesh
from seqbraid.data.stream.loader import Loader, StepData
from tests.helpers.toy import ListSource, ToyEncoder, ids, make_loader, records

MESHES = [{"dp_shard": 2}, {"ring": 2}, {"dp_shard": 2, "ring": 2}]


FATES = {3: "bad", 11: "not json", 17: "body", 20: "lie", 30: "media"}


def loader(mesh: Mesh | None = None, source: list[dict[str, Any]] | None = None, **options: Any) -> Loader:
    settings: dict[str, Any] = {"row_tokens": 32, "rows_per_step": 3, "buffer_size": 8, "epochs": 2}
    return make_loader(ListSource(source or records(37)), ToyEncoder, mesh, **{**settings, **options})


def told(step: StepData) -> tuple[Any, ...]:
    """What must be the same on every mesh, and this rank's rows."""
    return (step.step, step.epoch, step.tokens, step.samples), ids(step.rows)


def alone(**options: Any) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The steps of one process, and its state after each."""
    one = loader(**options)
    found = [(told(step), one.state_dict()) for step in one]
    return [step for step, _ in found], [state for _, state in found]


def on_a_rank(axes: dict[str, int], options: dict[str, Any], state: Any = None) -> list[Any]:
    mesh = Mesh(**axes)
    mine = loader(mesh, **options)
    if state is not None:
        mine.load_state_dict(state)
    return [(mesh.data_rank, told(step), mine.state_dict(), mine.bad) for step in mine]


def joined(of_ranks: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The whole job's steps from those of all ranks, after a look whether the ranks agree."""
    found = []
    for at_step in zip(*of_ranks, strict=True):
        rows: dict[int, Any] = {}
        for data_rank, (_, mine), _, _ in at_step:
            assert rows.setdefault(data_rank, mine) == mine, "ranks of a sequence group differ"
        assert all(rank[1][0] == at_step[0][1][0] for rank in at_step)
        assert all(rank[2:] == at_step[0][2:] for rank in at_step), "states or reports differ"
        assert len({len(mine) for mine in rows.values()}) == 1, "micro-batches differ"
        found.append((at_step[0][1][0], sorted(row for mine in rows.values() for row in mine)))
    return found


def padded(steps: list[tuple[Any, ...]], data_world_size: int) -> list[tuple[Any, ...]]:
    """One process's steps with the empty rows that several data ranks have, rows in an order of their own."""
    return [(head, sorted(rows + [[]] * (-len(rows) % data_world_size))) for head, rows in steps]


def data_workers() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("data worker")]
