"""The optimizer of a run: its class, and which parameters it steps with which settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..comm.consensus import raised_by_all
from ..models.braided import BraidedModel
from ..models.parts import plain_name, tensors_by_name
from .optimizers.groups import ParameterGroup, grouped, parse_groups
from .optimizers.kinds import OptimizerKind
from .optimizers.muon import layer_matrices, sharded_muon
from .optimizers.partwise import MASTER, PartwiseOptimizer
from .step_config import ADAMW, StepConfig


def make_optimizer(model: nn.Module, config: StepConfig) -> PartwiseOptimizer:
    """The optimizer over what is trained; all ranks call it."""
    mesh = model.mesh if isinstance(model, BraidedModel) else None
    with raised_by_all(None if mesh is None else mesh.cpu_group):
        kind = OptimizerKind.of(config)
        kind.check_ranks(1 if mesh is None else mesh.world_size)
        groups = make_groups(model, config, kind)
    names = {p: name for name, p in trained(model).items()}
    # What is no matrix of a layer.
    beside = (
        OptimizerKind.of(replace(config, optimizer=ADAMW, optimizer_options={})) if kind.is_muon else kind
    )

    def make_inner(inner: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        of_muon = [number for number, group in enumerate(groups) if group.is_muon]
        others = [inner[number] for number, group in enumerate(groups) if not group.is_muon]
        if not kind.is_muon:
            return [kind.make(others, lr=config.lr, **kind.options)]  # type: ignore[call-arg]
        named = {
            names[p]: (p, own)
            for number in of_muon
            for p, own in zip(groups[number].parameters, inner[number]["params"], strict=True)
        }
        found: list[torch.optim.Optimizer] = [
            sharded_muon([inner[number] for number in of_muon], named, mesh, kind.options)
        ]
        if others:
            found.append(beside.make(others, lr=config.lr, **beside.options))  # type: ignore[call-arg]
        return found

    given = [_param_group(group, config, kind) for group in groups]
    entries = [kind.entries if group.is_muon or not kind.is_muon else beside.entries for group in groups]
    return PartwiseOptimizer(given, make_inner, entries)


def make_groups(model: nn.Module, config: StepConfig, kind: OptimizerKind) -> list[ParameterGroup]:
    """What is trained, in groups that are stepped alike."""
    named = trained(model)
    if not named:
        where = " of this pipeline stage" if trained_elsewhere(model) else ""
        raise ValueError(f"nothing is trained: every parameter{where} is frozen")
    if kind.is_muon and trained_elsewhere(model):
        raise ValueError(f"train.optimizer={kind.name!r} is not supported with pipeline stages; use {ADAMW}")
    matrices = layer_matrices(model) if kind.is_muon else frozenset[int]()
    if kind.is_muon and not any(id(p) in matrices for p in named.values()):
        raise ValueError(f"train.optimizer={kind.name!r}: no matrix of a layer is trained; use another")
    others = trained_elsewhere(model)
    groups = grouped(named, parse_groups(config.groups), config.lr, config.weight_decay, matrices, others)
    if not kind.decays and any(group.weight_decay for group in groups):
        raise ValueError(f"train.groups has a weight_decay, which {kind.name} does not take")
    return groups


def kept_numbers(model: nn.Module, config: StepConfig) -> float:
    """Float32 numbers that the optimizer keeps for each that is trained, on average."""
    kind, named = OptimizerKind.of(config), trained(model)
    if not kind.is_muon:
        return kind.copies
    matrices = layer_matrices(model)
    of_muon = sum(p.numel() for p in named.values() if id(p) in matrices)
    every = sum(p.numel() for p in named.values())
    adamw = OptimizerKind.of(replace(config, optimizer=ADAMW, optimizer_options={}))
    return (kind.copies * of_muon + adamw.copies * (every - of_muon)) / max(every, 1)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by the names of the stock model."""
    stock = model.model if isinstance(model, BraidedModel) else model
    copies = model.copies if isinstance(model, BraidedModel) else {}
    named = ((plain_name(name), p) for name, p in stock.named_parameters() if p.requires_grad)
    return {copies.get(name, name): p for name, p in named}


def trained_elsewhere(model: nn.Module) -> set[str]:
    """What other pipeline stages train."""
    if not isinstance(model, BraidedModel) or model.pipeline is None:
        return set()
    whole = tensors_by_name(model.structure)
    return {name for name, p in whole.items() if p.requires_grad} - trained(model).keys()


def _param_group(group: ParameterGroup, config: StepConfig, kind: OptimizerKind) -> dict[str, Any]:
    found: dict[str, Any] = {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
    if not kind.decays:
        del found["weight_decay"]
    return found if group.lr == config.lr else {**found, "peak_lr": group.lr, "spec": group.spec}


def check_entries(optimizer: PartwiseOptimizer) -> None:
    """Refuse a state that was read from a checkpoint and that this optimizer cannot go on from."""
    for group, entries in zip(optimizer.param_groups, optimizer.entries, strict=True):
        for p in group["params"]:
            found = set(optimizer.state.get(p, {})) - {MASTER}
            if found and found != entries:
                raise ValueError(
                    f"the checkpoint's optimizer keeps {', '.join(sorted(found))} for a parameter, this one "
                    f"{', '.join(sorted(entries)) or 'nothing'}; use the train.optimizer and the "
                    "train.optimizer_options of the run so far, or give another out"
                )
