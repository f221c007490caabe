"""What `memory.checkpointing=auto` is in a run: chosen at its start on every rank, kept by a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..comm.consensus import agree, raised_by_all
from ..mesh import Mesh
from ..ops.rows import NORM
from ..ops.table import make_kernels
from ..ops.triton_status import RowsNeed
from ..plan.auto import Choice, choose_checkpointing
from ..plan.memory import MemoryOptions
from .config import TrainConfig
from .setup import make_model


def settle_checkpointing(
    config: TrainConfig, mesh: Mesh, device: torch.device, before: Mapping[str, Any] | None
) -> tuple[MemoryOptions, str | None]:
    """The memory options of a run with `auto` settled, and what to say of it; all ranks call this together.

    Args:
        config: of the run.
        mesh: of the run.
        device: of this rank.
        before: the state of the checkpoint that the run goes on from. What was chosen then is kept, so that
            it goes on bit for bit, unless the mesh has changed.
    """
    if config.memory.checkpointing != "auto":
        return config.memory, None
    if before is not None and (kept := _kept(mesh, before)) is not None:
        said = f"memory.checkpointing=auto is {kept!r}, as in the run so far"
        return replace(config.memory, checkpointing=kept), said
    limit = min(row[0] for row in agree(mesh.cpu_group, None, [device_bytes(device)]))
    with raised_by_all(mesh.cpu_group):
        choice = choose_here(config, make_model(config, weights=False), mesh, device, limit)
    return replace(config.memory, checkpointing=choice.checkpointing), str(choice)


def choose_here(
    config: TrainConfig, model: nn.Module, mesh: Mesh, device: torch.device, limit: int | None = None
) -> Choice:
    """The choice for a device like this one, or for one with `limit` bytes."""
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    fused = make_kernels(config.kernels).choose(NORM, RowsNeed(device, dtype)) == "triton"
    limit = device_bytes(device) if limit is None else limit
    try:
        return choose_checkpointing(
            model, mesh, config.memory, limit, config.precision, config.data.row_tokens, fused
        )
    except ValueError as error:
        raise ValueError(
            f"memory.checkpointing=auto needs an estimate of the model's memory, which failed: {error}; set "
            "it to 'none', 'selective' or 'full'"
        ) from None


def device_bytes(device: torch.device) -> int:
    """The memory of a GPU, or this rank's share of its host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _kept(mesh: Mesh, before: Mapping[str, Any]) -> Any:
    """What the run had, if it was on the same mesh; its rows cannot change."""
    return before.get("checkpointing") if before["mesh"] == mesh.sizes else None
