"""Small models with an optimizer, trained a little and saved."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from seqbraid import BraidedModel, Mesh, pack, parallelize
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.checkpoint.checkpoints import Checkpoints, Published

STATE = {"schedule": {"step": 2}, "loader": {"buffer": [[3, 17], [4, 9]], "epoch": 1}, "best": None}


class MasterAdam(torch.optim.Optimizer):
    """bf16 parameters beside float32 master weights, with a step that is a plain number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["master"] = p.detach().float()
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad.float(), 0.1)
                state["master"].sub_(group["lr"] * state["exp_avg"])
                p.copy_(state["master"])


def build(mesh: Mesh, family: str, seed: int, **changes: Any) -> tuple[BraidedModel, torch.optim.Optimizer]:
    """A model with a frozen parameter and its optimizer; 97 rows of vocabulary, so that shards are uneven."""
    dtype = changes.pop("dtype", torch.float32)
    model = parallelize(tiny_model(family, seed=seed, dtype=dtype, **changes), mesh)
    next(p for name, p in model.named_parameters() if "layers.1" in name).requires_grad_(False)
    if dtype == torch.bfloat16:
        return model, MasterAdam(model.parameters(), lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(mesh: Mesh, model: BraidedModel, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        samples = random_samples([9, 40, 5], 97, seed=step + 10 * mesh.data_rank, ignored="none")
        model(pack(samples, model.model.config, mesh)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: BraidedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every number of model and optimizer, gathered and cloned, without the code under test."""

    def full(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()

    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{entry}"] = full(value)
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())
        return type(x) is type(y) and x == y

    return sorted(a.keys() ^ b.keys()) + [name for name in a.keys() & b.keys() if not same(a[name], b[name])]


def prepare(folder: Path, steps: int = 2, **options: Any) -> tuple[Any, ...]:
    mesh = Mesh()
    model, optimizer = build(mesh, "llama", 0)
    train(mesh, model, optimizer, steps)
    return Checkpoints(folder, mesh, **options), model, optimizer


def published(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-????????"))


def save(checkpoints: Checkpoints, model: BraidedModel, optimizer: torch.optim.Optimizer) -> None:
    with no_pickle():
        checkpoints.save(2, model, optimizer, STATE)
        events: list[Any] = []
        while not events:
            events = checkpoints.poll()
    assert [type(event) for event in events] == [Published]


@contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[bool]:
    """A small file system where mounting is permitted; gives whether it is one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def no_pickle() -> Iterator[None]:
    """Nothing is pickled or unpickled inside, neither to a file nor on the way between ranks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was pickled or unpickled")

    with ExitStack() as stack:
        for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
            stack.enter_context(mock.patch.object(pickle, name, refuse))
        for name in ("_pickler", "_unpickler"):
            stack.enter_context(mock.patch.object(distributed_c10d, name, refuse))
        for name in ("save", "load"):
            stack.enter_context(mock.patch.object(torch, name, refuse))
        yield
