"""Whole matrices from their parts: each on one rank, which computes something of it and sends the parts back.

Ranks that hold parts of the same matrices share the matrices out by what they cost. In a round each rank has
at most one, so that it never holds more than one whole matrix and its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...comm.consensus import gather_objects
from ...mesh import Mesh

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where the part of a tensor begins in the whole, and its sizes."""


class Matrix(NamedTuple):
    """A parameter's matrix: all of it, or one of its experts."""

    name: str
    expert: int
    """−1 where the parameter is the matrix."""
    rows: int
    columns: int


def box_of(x: Tensor) -> Box:
    """The part that this rank has."""
    if not isinstance(x, DTensor):
        return (0,) * x.ndim, tuple(x.shape)
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offset), tuple(shape)


@dataclass(frozen=True)
class _Move:
    """A part of a matrix that lies on a rank."""

    rank: int
    rows: slice
    columns: slice

    @property
    def numel(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)


Task = tuple[Matrix, int, list[_Move]]
"""A matrix, the rank that computes it, and where its parts lie."""


class WholeMatrices:
    """Who computes which matrix, from where its parts lie; made by all ranks together."""

    def __init__(self, shapes: Mapping[str, torch.Size], boxes: Mapping[str, Box], mesh: Mesh | None) -> None:
        """
        Args:
            shapes: of the parameters, of two dims, or of three where the first counts experts.
            boxes: the parts that this rank has.
            mesh: of the job; None is one process.
        """
        alone = mesh is None or mesh.world_size == 1
        self.group = None if alone else mesh.process_group("parts")  # type: ignore[union-attr]
        everyone = gather_objects(None if alone else mesh.cpu_group, (dict(shapes), dict(boxes)))  # type: ignore[union-attr]
        members = [0] if self.group is None else dist.get_process_group_ranks(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.size, self.boxes = len(members), boxes
        self.rounds = _rounds([everyone[rank] for rank in members])

    def map(self, parts: Mapping[str, Tensor], compute: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What `compute` makes of each whole matrix, a new matrix of its shape: the parts of this rank."""
        found = {name: torch.empty_like(part) for name, part in parts.items()}
        device = next((part.device for part in parts.values()), torch.device("cpu"))
        for matrices in self.rounds:
            self._round(matrices, parts, found, compute, device)
        return found

    def _round(
        self,
        matrices: Sequence[Task],
        parts: Mapping[str, Tensor],
        found: dict[str, Tensor],
        compute: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """One matrix for each rank, or none; all ranks of the group take part."""
        there: list[list[Tensor]] = [[] for _ in range(self.size)]
        mine: tuple[Matrix, list[_Move]] | None = None
        for matrix, owner, moves in matrices:
            if owner == self.rank:
                mine = matrix, moves
            if any(move.rank == self.rank for move in moves):
                there[owner].append(self._view(parts, matrix).reshape(-1))
        receives = [0] * self.size
        for move in mine[1] if mine else ():
            receives[move.rank] = move.numel
        sends = [sum(x.numel() for x in of) for of in there]
        pieces = self._exchange(there, sends, receives, device)
        back: list[list[Tensor]] = [[] for _ in range(self.size)]
        if mine is not None:
            matrix, moves = mine
            whole = torch.empty(matrix.rows, matrix.columns, device=device)
            for move in moves:
                whole[move.rows, move.columns] = pieces[move.rank].view(
                    move.rows.stop - move.rows.start, move.columns.stop - move.columns.start
                )
            done = compute(whole)
            for move in moves:
                back[move.rank].append(done[move.rows, move.columns].reshape(-1))
        pieces = self._exchange(back, receives, sends, device)
        for matrix, owner, moves in matrices:
            if any(move.rank == self.rank for move in moves):
                own = self._view(found, matrix)
                own.copy_(pieces[owner].view(own.shape))

    def _exchange(
        self, given: list[list[Tensor]], sends: list[int], receives: list[int], device: torch.device
    ) -> list[Tensor]:
        flat = [x for of in given for x in of]
        sent = torch.cat(flat) if flat else torch.empty(0, device=device)
        if self.group is None:
            return [sent]
        got = torch.empty(sum(receives), device=device)
        dist.all_to_all_single(got, sent, receives, sends, group=self.group)
        return list(got.split(receives))

    def _view(self, parts: Mapping[str, Tensor], matrix: Matrix) -> Tensor:
        """What this rank has of a matrix."""
        part = parts[matrix.name]
        return part if matrix.expert < 0 else part[matrix.expert - self.boxes[matrix.name][0][0]]


def _rounds(tables: Sequence[tuple[Mapping[str, torch.Size], Mapping[str, Box]]]) -> list[list[Task]]:
    """From what each rank has: the most expensive first, to the rank with the least work so far."""
    matrices: dict[Matrix, list[_Move]] = {}
    for rank, (shapes, boxes) in enumerate(tables):
        for name, box in boxes.items():
            for matrix, move in _of_box(name, shapes[name], box, rank):
                matrices.setdefault(matrix, []).append(move)
    costs = {m: m.rows * m.columns * min(m.rows, m.columns) for m in matrices}
    work = [0] * len(tables)
    queues: list[list[Task]] = [[] for _ in tables]
    for matrix in sorted(matrices, key=lambda m: (-costs[m], m)):
        moves = matrices[matrix]
        owner = min((move.rank for move in moves), key=lambda rank: (work[rank], rank))
        work[owner] += costs[matrix]
        queues[owner].append((matrix, owner, moves))
    longest = max(map(len, queues), default=0)
    return [[queue[i] for queue in queues if i < len(queue)] for i in range(longest)]


def _of_box(name: str, shape: Sequence[int], box: Box, rank: int) -> list[tuple[Matrix, _Move]]:
    offsets, sizes = box
    if not prod(sizes):
        return []
    (row, column), (rows, columns) = offsets[-2:], sizes[-2:]
    move = _Move(rank, slice(row, row + rows), slice(column, column + columns))
    experts = [-1] if len(shape) == 2 else range(offsets[0], offsets[0] + sizes[0])
    return [(Matrix(name, expert, shape[-2], shape[-1]), move) for expert in experts]
