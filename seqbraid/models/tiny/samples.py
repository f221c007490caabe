"""Random text samples of given lengths, with all, some or none of their labels ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...layout.labels import IGNORE

LENGTHS = (1, 2, 63, 64, 65, 130, 257)
"""One token, two, and lengths around the chunk of the gated delta rule."""


def random_samples(
    lengths: Sequence[int], vocab_size: int, seed: int = 0, ignored: str = "some"
) -> list[dict[str, Any]]:
    """Samples whose labels are ignored nowhere (`none`), in a prefix and here and there (`some`), or in every
    other sample wholly and elsewhere partly (`whole`)."""
    if ignored not in ("none", "some", "whole"):
        raise ValueError(f"ignored={ignored!r} is unknown; use none, some or whole")
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        labels = ids.clone()
        if ignored != "none":
            labels[: length // 3] = IGNORE
            labels[torch.rand(length, generator=generator) < 0.2] = IGNORE
        labels[0] = ids[0]  # asked of no token: the one before it is another sample's
        if ignored == "whole" and number % 2:
            labels[:] = IGNORE
        samples.append({"input_ids": ids, "labels": labels})
    return samples
