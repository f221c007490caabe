"""Texts of samples without media: tokenized when they are measured, kept until a row takes them.

A sample is measured by one rank and drawn, later, by the ranks of some data rank, seldom by that one. So the
rank that measured it keeps its ids and labels, all ranks know who keeps what, and the texts of a step go to
the ranks of its rows when it is planned. What is not kept is encoded by the ranks that need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...comm.group import Group
from ...mesh import Mesh
from .plan import Draw, pieces

TEXT_BYTES = 256 << 20
"""What a rank keeps at most, unless told otherwise."""

Text = NDArray[np.int32]
"""Ids and labels, `[2, T]`, cut to what a row holds."""


def compact(ids_T: NDArray[np.integer], labels_T: NDArray[np.integer], row_tokens: int) -> Text:
    """As much of ids and labels as a row holds, in four bytes each."""
    return np.stack([ids_T[:row_tokens], labels_T[:row_tokens]]).astype(np.int32)


class Texts:
    """The texts that the ranks keep for each other, this one's part of them, and who keeps the others.

    Args:
        limit: the most bytes that this rank keeps, the window included that is being measured.
        splits: whether what is longer than a row is drawn in pieces, and so kept in them.
    """

    def __init__(self, mesh: Mesh, row_tokens: int, limit: int = TEXT_BYTES, splits: bool = False) -> None:
        if limit < 0:
            raise ValueError(f"text_bytes={limit} must not be negative; 0 keeps no text")
        self._group = Group.of(mesh.cpu_group)
        self._ranks_of: list[list[int]] = [[] for _ in range(mesh.data_world_size)]
        for rank in range(mesh.world_size):
            self._ranks_of[mesh.data_rank_of(rank)].append(rank)
        self._row_tokens = row_tokens
        self._limit = limit
        self._splits = splits
        self._own: dict[tuple[int, int], Tensor] = {}
        """By sample and where the piece starts."""
        self._kept: dict[tuple[int, int], tuple[int, int]] = {}
        """By which rank, and the length of the sample or piece; the same on every rank."""
        self.num_bytes = 0
        """Of the texts that this rank keeps."""

    @property
    def room(self) -> int:
        """Bytes of text that the next window may bring: it is there twice while it is taken over."""
        return (self._limit - self.num_bytes) // 2

    def keep(self, sample: int, text: Text) -> None:
        """Keep a text; a copy of it, for what a worker sends lies in one piece of memory with others."""
        for start, length in self._pieces(text.shape[1]):
            piece = torch.from_numpy(text[:, start : start + length].copy())
            self._own[sample, start] = piece
            self.num_bytes += piece.nbytes

    def is_kept(self, sample: int, rank: int, length: int) -> None:
        """A rank keeps the text of a sample; every rank is told alike."""
        for start, of_piece in self._pieces(length):
            self._kept[sample, start] = rank, of_piece

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        """Where the pieces that a text is drawn in start, and how long they are."""
        if not self._splits or length <= self._row_tokens:
            return [(0, length)]
        return [(start, stop - start) for start, stop in pieces(length, self._row_tokens)]

    def deliver(self, draws_of: Sequence[Iterable[Draw]]) -> dict[tuple[int, int], Tensor]:
        """The texts of this data rank's draws that some rank has kept, by key; they are kept no longer.

        All ranks call it together, with the draws of each data rank.
        """
        out: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        coming: list[list[Draw]] = [[] for _ in range(self._group.size)]
        travels = False
        for ranks, draws in zip(self._ranks_of, draws_of, strict=True):
            for draw in draws:
                keeper, length = self._kept.pop((draw.sample, draw.start), (-1, 0))
                text = self._own.pop((draw.sample, draw.start), None)
                if text is not None:
                    self.num_bytes -= text.nbytes
                if keeper < 0 or length != draw.length:  # drawn before a resume, as another text
                    continue
                travels |= ranks != [keeper]
                if self._group.rank in ranks:
                    coming[keeper].append(draw)
                if text is not None:
                    for rank in ranks:
                        out[rank].append(text)
        if not travels:  # as every rank sees
            return {
                draw.key: text
                for draw, text in zip(coming[self._group.rank], out[self._group.rank], strict=True)
            }
        sizes = [[2 * min(draw.length, self._row_tokens) for draw in draws] for draws in coming]
        flat = [text.flatten() for texts in out for text in texts]
        arrived = self._group.all_to_all(
            torch.cat(flat) if flat else torch.empty(0, dtype=torch.int32),
            [sum(text.numel() for text in texts) for texts in out],
            [sum(of_rank) for of_rank in sizes],
            "texts",
        )
        parts = arrived.split([size for of_rank in sizes for size in of_rank])
        all_coming = [draw for draws in coming for draw in draws]
        return {draw.key: part.view(2, -1) for draw, part in zip(all_coming, parts, strict=True)}
