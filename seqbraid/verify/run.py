"""What `seqbraid verify` runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..mesh import Mesh
from ..models.families import family_of
from ..models.mtp import attach_mtp
from ..models.mtp_module import MtpOptions
from ..models.stock import read_config, stock_class, trained_config, weight_files
from ..models.tiny.decoders import tiny_model
from ..models.tiny.media import MEDIA_FAMILIES, TEXT_MODELS, mixed_samples, tiny_media_model
from ..models.tiny.mtp import with_mtp
from ..models.tiny.samples import LENGTHS, random_samples
from .blocks import check_blocks
from .media_mutants import MEDIA_MUTANTS
from .mutants import MUTANTS, Mutant
from .parity import check_parity
from .verdict import Parity

PADDED = 64
"""Rows are padded to a multiple of this, so that padding has a chance to be counted."""


def load_model(name: str, seed: int = 0, mtp_depth: int = 0) -> PreTrainedModel:
    """A tiny model of a known family, or a checkpoint from a folder, in float32 and in training mode; with
    multi-token prediction where a depth is given.
    """
    if name in MEDIA_FAMILIES or name in TEXT_MODELS:
        tiny = tiny_media_model(name, seed) if name in MEDIA_FAMILIES else tiny_model(TEXT_MODELS[name], seed)
        return with_mtp(tiny, mtp_depth, seed=seed) if mtp_depth else tiny
    if not Path(name).is_dir():
        known = ", ".join([*MEDIA_FAMILIES, *TEXT_MODELS])
        raise ValueError(f"--model {name!r} is neither a tiny model ({known}) nor a folder with a checkpoint")
    folder = Path(name)
    config = read_config(folder)
    weight_files(folder)
    model: PreTrainedModel = stock_class(config).from_pretrained(
        folder,
        config=trained_config(config),
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
    )
    if mtp_depth:
        attach_mtp(model, MtpOptions(mtp_depth, source=name))
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
    if family_of(model.config) is None:
        samples = random_samples(lengths or LENGTHS, model.config.get_text_config().vocab_size, seed)
    elif lengths:
        raise ValueError(
            "--lengths is for text models; samples with images, videos and audio are drawn from --seed"
        )
    else:
        samples = mixed_samples(model.config, seed)
    mesh = Mesh() if mesh is None else mesh
    return check_parity(
        model,
        samples,
        mesh,
        case=case,
        policy=policy,
        # A micro-batch for each stage, where there are as many samples.
        micro_batches=min(mesh.pp, max(1, len(samples) // mesh.data_world_size)),
        gated_delta=gated_delta,
        multiple_of=PADDED,
    )


def verify_mutants(seed: int = 0) -> dict[str, Parity]:
    """The verdict on every mutant that one process can have; one that holds was not caught."""
    verdicts = {}
    for mutant in (*MUTANTS, *(m for m in MEDIA_MUTANTS if m.ring * m.ulysses == 1)):
        with mutant.switched_on():
            verdicts[mutant.name] = _check(mutant, seed)
    return verdicts


def _check(mutant: Mutant, seed: int) -> Parity:
    if mutant.check == "blocks":
        return check_blocks(seed)
    is_media = any(mutant is other for other in MEDIA_MUTANTS)
    model = tiny_media_model(mutant.check, seed) if is_media else tiny_model(mutant.check, seed)
    return verify_model(model, mutant.name, seed=seed)
