"""An optimizer by its class path: tried on small tensors, so that what could not be resumed or would differ
from mesh to mesh is refused before a run begins.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..step_config import ADAMW, StepConfig

MUON = "torch.optim.Muon"
SHAPES = ((6, 4), (5,), (2, 3, 4))
"""Of the parameters that an optimizer is tried on; no two sizes of one are alike."""
TRIED_STEPS = 3


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that a run may have."""

    name: str
    """Its class path."""
    make: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    """Of its constructor, beside the groups and the learning rate."""
    decays: bool = True
    """Whether it takes a weight decay."""
    entries: frozenset[str] = frozenset()
    """Names of what it keeps for each parameter."""
    copies: float = 0.0
    """Float32 numbers that it keeps for each number of a matrix."""
    by_number: bool = True
    """Whether each number of a parameter is changed by its own gradient and state alone."""

    @staticmethod
    def of(config: StepConfig) -> OptimizerKind:
        """The optimizer of a configuration; ValueError where it cannot be used."""
        name, make = config.optimizer, _class_of(config.optimizer)
        options = _options(config, make)
        takes = set(inspect.signature(make).parameters)
        decays = "weight_decay" in takes
        if config.weight_decay and not decays:
            raise ValueError(
                f"train.weight_decay={config.weight_decay}, but {name} takes none; set it to 0, or use "
                "another train.optimizer"
            )
        if "lr" not in takes:
            raise ValueError(f"train.optimizer={name!r} takes no lr, so train.lr would do nothing")
        _check_zero_gradient(name, make, options)
        if issubclass(make, torch.optim.Muon):
            return OptimizerKind(name, make, options, True, frozenset({"momentum_buffer"}), 1.0, False)
        entries, copies, by_number = _tried(name, make, options)
        return OptimizerKind(name, make, options, decays, entries, copies, by_number)

    @property
    def is_muon(self) -> bool:
        """Whether it is for the matrices of layers alone, with AdamW for the rest."""
        return issubclass(self.make, torch.optim.Muon)

    def check_ranks(self, number: int) -> None:
        """Refuse what would depend on how parameters are cut, where they are."""
        if number > 1 and not (self.by_number or self.is_muon):
            raise ValueError(
                f"train.optimizer={self.name!r} does not work number by number, so its steps would depend on "
                f"how {number} ranks share a parameter; use it in one process, or {MUON}, or one such as "
                f"{ADAMW} or torch.optim.SGD"
            )


def _class_of(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name) if module else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"train.optimizer={path!r} cannot be imported: {error}") from None
    if found is None:
        known = [n for n in dir(torch.optim) if n.lower() == path.lower()]
        example = f"torch.optim.{known[0]}" if known else ADAMW
        raise ValueError(f"train.optimizer={path!r} is no class path; give one such as {example}")
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"train.optimizer={path!r} is no torch.optim.Optimizer")
    return found


def _options(config: StepConfig, make: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """What the constructor is given: our settings where it takes them, and the user's own."""
    takes = {name for name in inspect.signature(make).parameters if name not in ("self", "params")}
    given = dict(config.optimizer_options)
    if unknown := sorted(given.keys() - takes):
        raise ValueError(
            f"train.optimizer_options has {unknown[0]!r}, which {config.optimizer} does not take; it takes "
            f"{', '.join(sorted(takes - OURS))}"
        )
    if ours := sorted(given.keys() & OURS):
        raise ValueError(f"train.optimizer_options has {ours[0]!r}; set train.{ours[0]} instead")
    # YAML has lists alone.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if issubclass(make, torch.optim.Muon):
        return {"adjust_lr_fn": "match_rms_adamw", **options}
    if "betas" in takes:
        options = {"betas": (config.beta1, config.beta2), "eps": config.eps, **options}
        return {**FUSED, **options} if config.optimizer == ADAMW else options
    plain = StepConfig()
    for name in ("beta1", "beta2", "eps"):
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(
                f"train.{name}={getattr(config, name)} is for optimizers with betas, which "
                f"{config.optimizer} does not take; use train.optimizer_options"
            )
    return options


OURS = {"lr", "weight_decay"}
FUSED = {"fused": True}


def _tried(
    name: str, make: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> tuple[frozenset[str], float, bool]:
    """What an optimizer keeps, and whether it gives the same where parameters are cut into two parts."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(TRIED_STEPS)]
    whole, optimizer = _run(name, make, options, starts, gradients)
    entries: set[str] = set()
    for p in whole:
        for entry, value in optimizer.state.get(p, {}).items():
            _check_entry(name, entry, value, p)
            entries.add(entry)
    others = [key for key in optimizer.state if not any(key is p for p in whole)]
    if others:
        raise ValueError(
            f"train.optimizer={name!r} keeps {others[0]!r} beside what it keeps for each parameter, which a "
            "checkpoint does not hold"
        )
    copies = sum(
        value.shape == whole[0].shape
        for value in optimizer.state.get(whole[0], {}).values()
        if isinstance(value, Tensor)
    )
    return frozenset(entries), float(copies), _same_in_parts(name, make, options, starts, gradients, whole)


def _check_zero_gradient(name: str, make: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Where a gradient is 0, as that of a word that never comes, eps=0 gives 0 over 0; of Muon, where that
    of a whole matrix is.
    """
    gradient = torch.ones(SHAPES[0])
    gradient[:1] = 0
    gradients = [[gradient * (not issubclass(make, torch.optim.Muon))]] * TRIED_STEPS
    (found,), _ = _run(name, make, options, [torch.ones(SHAPES[0])], gradients)
    if not found.isfinite().all():
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(
            f"train.optimizer={name!r} with {given} makes {found.flatten()[0]:g} of a parameter whose "
            "gradient is 0; give it an eps above 0"
        )


def _check_entry(name: str, entry: str, value: Any, p: Tensor) -> None:
    if isinstance(value, Tensor):
        if value.dim() and value.shape != p.shape:
            raise ValueError(
                f"train.optimizer={name!r} keeps {entry!r} of shape {list(value.shape)} for a parameter of "
                f"shape {list(p.shape)}: a checkpoint could not share it out over another mesh, since it is "
                f"neither a single number nor of the parameter's shape; use another, such as {ADAMW}"
            )
    elif not isinstance(value, int | float):
        raise ValueError(
            f"train.optimizer={name!r} keeps {entry!r}, a {type(value).__name__}; a checkpoint holds tensors "
            "and numbers"
        )


def _same_in_parts(
    name: str,
    make: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    whole: Sequence[Tensor],
) -> bool:
    """Whether two ranks, each with some rows and an optimizer of its own, would come to the same."""
    found: list[Sequence[Tensor]] = []
    for rows in (slice(0, 1), slice(1, None)):
        cut = [[g[rows] for g in step] for step in gradients]
        found.append(_run(name, make, options, [x[rows] for x in starts], cut)[0])
    return all(
        torch.allclose(torch.cat([a, b]), x, rtol=1e-4, atol=1e-6)
        for a, b, x in zip(*found, whole, strict=True)
    )


def _run(
    name: str,
    make: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """A few steps; any error is one of the configuration."""
    parameters = [nn.Parameter(x.clone()) for x in starts]
    try:
        optimizer = make([{"params": parameters}], lr=1e-2, **options)  # type: ignore[call-arg]
        before = copy.deepcopy([_settings(group) for group in optimizer.param_groups])
        for step in gradients:
            for p, gradient in zip(parameters, step, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"train.optimizer={name!r} cannot be used: {type(error).__name__}: {error}"
        ) from None
    after = [_settings(group) for group in optimizer.param_groups]
    for was, now in zip(before, after, strict=True):
        for key in was.keys() | now.keys():
            if key not in was or key not in now or was[key] != now[key]:
                raise ValueError(
                    f"train.optimizer={name!r} changes {key!r} of its groups from step to step, which a "
                    "checkpoint does not hold"
                )
    return parameters, optimizer


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
