"""Which rank holds which tokens: alignment, `SequenceLayout`, balance and packing.

Pure index arithmetic: no process group, no model, and no torch until a tensor is asked for.
"""

from .dense import (
    Truncation,
    dense_to_row,
    lengths_from_mask,
    row_to_dense,
    samples_from_dense,
    truncate_lengths,
)
from .layout import PADDING, Segment, SequenceLayout

__all__ = [
    "PADDING",
    "Segment",
    "SequenceLayout",
    "Truncation",
    "dense_to_row",
    "lengths_from_mask",
    "row_to_dense",
    "samples_from_dense",
    "truncate_lengths",
]
