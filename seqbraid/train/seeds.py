"""Seeds drawn from several numbers, so that nothing random has to be remembered."""

from __future__ import annotations

import random

import numpy as np
import torch


def drawn_seed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def seed_everything(*numbers: int) -> None:
    """Seed all generators from these numbers together."""
    seed = drawn_seed(*numbers)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
