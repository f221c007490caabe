"""The door for dense batches: a padded `[B, S]` batch with a mask becomes lengths and a row, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


def lengths_from_mask(mask: Tensor) -> tuple[int, ...]:
    """The real tokens of each row of a `[B, S]` mask whose ones stand together.

    >>> lengths_from_mask(torch.tensor([[1, 1, 0], [0, 0, 1]]))
    (2, 1)
    """
    return tuple(int(n) for n in _checked_mask(mask).sum(1))


def dense_to_row(x: Tensor, mask: Tensor) -> Tensor:
    """Join the real tokens of a `[B, S, ...]` tensor into a row `[T, ...]`."""
    mask = _checked_mask(mask)
    if x.shape[:2] != mask.shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, its mask {tuple(mask.shape)}: the first two dims must agree"
        )
    return x[mask]


def row_to_dense(
    row: Tensor,
    lengths: Sequence[int],
    fill: float | int | bool = 0,
    width: int | None = None,
    side: str = "right",
) -> Tensor:
    """Lay a row `[T, ...]` out as `[B, S, ...]`, padded with `fill` on the `right` or the `left`."""
    if side not in ("right", "left"):
        raise ValueError(f"side={side!r} is unknown; use 'right' or 'left'")
    if sum(lengths) != len(row):
        raise ValueError(f"lengths add up to {sum(lengths)}, the row has {len(row)} tokens")
    longest = max(lengths)
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width={width} is too small for a sequence of {longest} tokens")
    import torch  # late: a layout is shown without it

    slot = torch.arange(width, device=row.device)
    count = torch.tensor(list(lengths), device=row.device)[:, None]
    mask = slot < count if side == "right" else slot >= width - count
    dense = row.new_full((len(lengths), width, *row.shape[1:]), fill)
    dense[mask] = row
    return dense


def samples_from_dense(
    input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
) -> list[dict[str, Tensor]]:
    """The samples of a padded batch, as `seqbraid.pack` takes them."""
    import torch

    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    lengths = list(lengths_from_mask(mask))
    columns = {"input_ids": input_ids} if labels is None else {"input_ids": input_ids, "labels": labels}
    rows = {name: dense_to_row(x, mask).split(lengths) for name, x in columns.items()}
    return [{name: parts[i] for name, parts in rows.items()} for i in range(len(lengths))]


class Truncation(NamedTuple):
    """The lengths that are left and, by name, what was cut: `(sequence, tokens kept, tokens removed)`."""

    lengths: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]


def truncate_lengths(lengths: Sequence[int], limit: int) -> Truncation:
    """Cut a row down to `limit` tokens from its end, saying what is cut; sequences left empty are gone.

    >>> truncate_lengths([5, 4, 2], 7)
    Truncation(lengths=(5, 2), cuts=((1, 2, 2), (2, 0, 2)))
    """
    if limit < 1:
        raise ValueError(f"limit={limit} leaves no token; use at least 1")
    kept: list[int] = []
    cuts: list[tuple[int, int, int]] = []
    room = limit
    for sequence, length in enumerate(lengths):
        keep = min(length, room)
        if keep:
            kept.append(keep)
        if keep < length:
            cuts.append((sequence, keep, length - keep))
        room -= keep
    return Truncation(tuple(kept), tuple(cuts))


def _checked_mask(mask: Tensor) -> Tensor:
    if mask.ndim != 2:
        raise ValueError(f"a padded batch has a mask of shape [B, S], not {tuple(mask.shape)}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            "a mask has only zeros and ones (not an additive or 4-D mask, which does not say where "
            "tokens are)"
        )
    mask = mask.bool()
    edges = mask.int().diff(dim=1).ne(0).sum(1) + mask[:, 0].int() + mask[:, -1].int()
    for i, (count, changes) in enumerate(zip(mask.sum(1).tolist(), edges.tolist(), strict=True)):
        if count == 0:
            raise ValueError(f"row {i} of the mask has no token; leave empty samples out")
        if changes != 2:
            raise ValueError(
                f"row {i} of the mask has padding between tokens; pad on one side only (describe a packed "
                "row by its lengths)"
            )
    return mask
