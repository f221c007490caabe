"""How packed segments are cut into chunks, and which chunks are computed together.

Letters: N segments, B chunks of a tile, C tokens of a chunk, S segments of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

TILE_STEPS = 8
"""Steps that a tile takes of a chain that has them; one state in so many, or fewer, is kept for backward."""


@dataclass(frozen=True)
class Tile:
    """Chunks that are computed together: some steps of the chains of some segments, step by step."""

    first_segment: int
    """Place of its first segment in the plan's order."""
    starts_chain: bool
    """Whether its first step is the first one of its segments."""
    steps: tuple[slice, ...]
    """The chunks of each step; its n chunks are those of the first n segments, as long chains come first."""
    rows: Tensor
    """Input rows of its tokens."""
    places: Tensor | None
    """Places of its tokens among the B·C; None when they fill it."""

    @property
    def segments(self) -> slice:
        """Its segments, as places in the plan's order."""
        return slice(self.first_segment, self.first_segment + self.steps[0].stop)


@dataclass(frozen=True)
class ChunkPlan:
    """How segments are cut into chunks, and which chunks share a tile."""

    order_N: Tensor
    """Segments from the longest chain of chunks to the shortest."""
    tiles: tuple[Tile, ...]
    """In an order in which each chunk comes after the one before it in its segment."""

    @staticmethod
    @lru_cache(maxsize=16)
    def of(
        segments: tuple[tuple[int, int], ...], chunk_size: int, tile_chunks: int, device: torch.device
    ) -> ChunkPlan:
        """The plan for these (start, stop) rows with about `tile_chunks` chunks a tile, shared by all layers.

        The segments need not lie side by side.
        """
        start_N, stop_N = torch.tensor(segments, dtype=torch.long).view(-1, 2).unbind(1)
        chunks_N = (stop_N - start_N + chunk_size - 1) // chunk_size
        chain_N, order_N = chunks_N.sort(descending=True, stable=True)
        start_N, stop_N = start_N[order_N], stop_N[order_N]
        chains = chain_N.tolist()
        tiles, first = [], 0
        while first < len(chains) and chains[first] > 0:
            longest = chains[first]
            width = tile_chunks // min(longest, TILE_STEPS)
            chain_S, step = chain_N[first : first + width], 0
            while step < longest:
                num_steps = max(1, tile_chunks // int((chain_S > step).sum()))
                steps = torch.arange(step, min(step + num_steps, longest))
                has_chunk = steps[:, None] < chain_S
                step_B, segment_B = has_chunk.nonzero().unbind(1)
                first_row_B = start_N[first + segment_B] + steps[step_B] * chunk_size
                rows_BC = first_row_B[:, None] + torch.arange(chunk_size)
                used_BC = rows_BC < stop_N[first + segment_B][:, None]
                places = None if used_BC.all() else used_BC.flatten().nonzero().flatten().to(device)
                ends = accumulate(has_chunk.sum(1).tolist(), initial=0)
                tiles.append(
                    Tile(
                        first_segment=first,
                        starts_chain=step == 0,
                        steps=tuple(slice(start, stop) for start, stop in pairwise(ends)),
                        rows=rows_BC[used_BC].to(device),
                        places=places,
                    )
                )
                step += num_steps
            first += width
        return ChunkPlan(order_N.to(device), tuple(tiles))
