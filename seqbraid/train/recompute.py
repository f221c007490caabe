"""What `memory.checkpointing=auto` is in a run: chosen at its start on every rank, kept by a resume.

Without it, what to say before the first step of one that may not fit the devices.
"""

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
from ..plan.auto import AutoChoice, EstimateInputs, Fit, choose_checkpointing, fit
from ..plan.memory import MemoryOptions
from .config import TrainConfig
from .optimizer import kept_numbers
from .setup import make_model


def settle_checkpointing(
    config: TrainConfig, mesh: Mesh, device: torch.device, before: Mapping[str, Any] | None
) -> tuple[MemoryOptions, str | None]:
    """The memory options of a run with `auto` settled, and what to say of its memory; all ranks call this
    together. Without `auto` there is something to say where the step may not fit.

    Args:
        config: of the run.
        mesh: of the run.
        device: of this rank.
        before: the state of the checkpoint that the run goes on from. What was chosen then is kept, so that
            it goes on bit for bit, unless the mesh has changed.
    """
    if config.memory.checkpointing != "auto":
        limit = smallest_device(mesh, device)
        return config.memory, may_not_fit(config, mesh, device, limit) if mesh.rank == 0 else None
    if before is not None and (kept := _kept(mesh, before)) is not None:
        said = f"memory.checkpointing=auto is {kept!r}, as in the run so far"
        return replace(config.memory, checkpointing=kept), said
    limit = smallest_device(mesh, device)
    with raised_by_all(mesh.cpu_group):
        choice = choose_here(config, make_model(config, weights=False), mesh, device, limit)
    return replace(config.memory, checkpointing=choice.checkpointing), str(choice)


def smallest_device(mesh: Mesh, device: torch.device) -> int:
    """Bytes of the smallest device of the job; all ranks call it."""
    return min(row[0] for row in agree(mesh.cpu_group, None, [device_bytes(device)]))


def may_not_fit(config: TrainConfig, mesh: Mesh, device: torch.device, limit: int) -> str | None:
    """What to say of a step that does not fit by the estimate; None where it fits or has no estimate."""
    try:
        found = fit_here(config, make_model(config, weights=False), mesh, device, limit)
    except ValueError:  # of a model that cannot be estimated, or used: that is said elsewhere
        return None
    return None if found.advice is None else f"memory: {found}"


def fit_here(
    config: TrainConfig, model: nn.Module, mesh: Mesh, device: torch.device, limit: int | None = None
) -> Fit:
    """How a step compares with a device like this one, or with one of `limit` bytes."""
    limit = device_bytes(device) if limit is None else limit
    return fit(planned_step(config, model, mesh, device), config.memory, limit)


def planned_step(config: TrainConfig, model: nn.Module, mesh: Mesh, device: torch.device) -> EstimateInputs:
    """A step of the run on devices like this one."""
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    fused = make_kernels(config.kernels).choose(NORM, RowsNeed(device, dtype)) == "triton"
    kept = kept_numbers(model, config.train)
    return EstimateInputs(model, mesh, config.precision, config.data.row_tokens, fused, kept, config.pipeline)


def choose_here(
    config: TrainConfig, model: nn.Module, mesh: Mesh, device: torch.device, limit: int | None = None
) -> AutoChoice:
    """The choice for a device like this one, or for one with `limit` bytes."""
    limit = device_bytes(device) if limit is None else limit
    step = planned_step(config, model, mesh, device)
    try:
        return choose_checkpointing(step, config.memory, limit)
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
