"""What `seqbraid verify` runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..mesh import Mesh
from .blocks import check_blocks
from .mutants import MUTANTS
from .parity import Parity, check_parity
from .samples import LENGTHS, random_samples
from .tiny import FAMILIES, tiny_model

PADDED = 64
"""Rows are padded to a multiple of this, so that padding has a chance to be counted."""


def load_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model of a known family, or a checkpoint from a folder, in float32 and in training mode."""
    if name in FAMILIES:
        return tiny_model(name, seed)
    if not Path(name).is_dir():
        raise ValueError(
            f"--model {name!r} is neither a tiny family ({', '.join(FAMILIES)}) nor a folder with a "
            "checkpoint"
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.train()


def verify_model(
    model: PreTrainedModel,
    case: str,
    lengths: Sequence[int] | None = None,
    policy: str = "balanced",
    seed: int = 0,
    mesh: Mesh | None = None,
    gated_delta: str = "auto",
) -> Parity:
    """Parity of one packed row of random samples with the stock model on each of them."""
    samples = random_samples(lengths or LENGTHS, model.config.get_text_config().vocab_size, seed)
    return check_parity(
        model, samples, mesh, case=case, policy=policy, gated_delta=gated_delta, multiple_of=PADDED
    )


def verify_mutants(seed: int = 0) -> dict[str, Parity]:
    """The verdict on every mutant; one that holds was not caught."""
    verdicts = {}
    for mutant in MUTANTS:
        with mutant.switched_on():
            if mutant.check == "blocks":
                verdicts[mutant.name] = check_blocks(seed)
            else:
                verdicts[mutant.name] = verify_model(tiny_model(mutant.check, seed), mutant.name, seed=seed)
    return verdicts
