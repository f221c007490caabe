"""Multi-token prediction for tiny models, with weights large enough that a mistake shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..mtp import attach_mtp
from ..mtp_module import MtpOptions
from .decoders import shake


def with_mtp(model: PreTrainedModel, depth: int = 1, **options: Any) -> PreTrainedModel:
    """The model with a module of random weights attached, the same for the same options."""
    module = attach_mtp(model, MtpOptions(depth=depth, fresh=True, **options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(module.options.seed)
        shake(module)
    return model
