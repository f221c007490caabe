"""The trainings of the demo: packed rows split over ranks, and the stock model on each sample alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...comm.rendezvous import join_on_cpu
from ...data.pack import pack
from ...distributed.api import parallelize
from ...layout.labels import IGNORE
from ...mesh import Mesh
from ...models.braided import BraidedModel
from ...models.step import forward_backward
from ...models.stock import in_torch
from .digits import (
    Digits,
    Sample,
    held_out_rows,
    load_digits,
    predicted_digits,
    tiny_reader,
    train_and_held_out,
    training_rows,
)

ROW_TOKENS = 512
# At twice this rate training amplifies the last digit of a sum to the size of the loss within 150 steps, in
# one process too; at this one the digits are learned as well, and rounding stays rounding.
LEARNING_RATE = 2e-4
WARM_UP_STEPS = 20
MAX_NORM = 1.0
# Some gradients are zero but for rounding (that of a key's bias, which softmax cancels). Adam would scale
# them up to full steps; beside this epsilon they stay nothing.
EPSILON = 1e-6
EVALUATIONS = 10


@dataclass(frozen=True)
class Settings:
    """What all trainings of one demo share."""

    steps: int
    seed: int
    processes: int
    out: Path

    @property
    def ulysses(self) -> int:
        """2 where that leaves a ring as well."""
        return 2 if self.processes % 4 == 0 else 1

    @property
    def ring(self) -> int:
        """The ranks that Ulysses leaves."""
        return self.processes // self.ulysses

    @property
    def checkpoint(self) -> Path:
        """Where the split training leaves its model."""
        return self.out / "model"

    def digits(self) -> tuple[Digits, Digits]:
        """Digits to train on, and digits held out."""
        return train_and_held_out(load_digits(), self.seed)

    def rows(self) -> Iterator[list[Sample]]:
        """The rows of the training, step by step."""
        return training_rows(self.digits()[0], ROW_TOKENS, self.seed)


@dataclass(frozen=True)
class Outcome:
    """What one training gives."""

    losses: list[float]
    """Mean loss per digit, before the update of each step."""
    seconds: float
    accuracy: list[tuple[int, float]]
    """Steps done and the share of held-out digits read right then."""
    predictions: list[int]
    """What the trained model reads in the held-out digits; empty where it was not asked."""


def train_split(settings: Settings) -> Outcome:
    """On every rank: train on packed rows, split over `ring × ulysses` ranks."""
    prepare()
    held_out = settings.digits()[1]
    mesh = Mesh(ring=settings.ring, ulysses=settings.ulysses)
    if mesh.world_size > 1:
        join_on_cpu("demo")
    model = tiny_reader(settings.seed)
    braided = parallelize(model, mesh)

    def backward(samples: list[Sample]) -> float:
        return float(forward_backward(braided, [pack(samples, model.config, mesh)]).mean_loss)

    accuracy: list[tuple[int, float]] = []
    predictions = torch.empty(0, dtype=torch.long)

    def evaluate(done: int) -> None:
        nonlocal predictions
        if done % max(1, settings.steps // EVALUATIONS) == 0 or done == settings.steps:
            predictions = read_packed(braided, held_out)
            accuracy.append((done, (predictions == held_out.labels).double().mean().item()))

    name = f"{mesh.world_size} ranks, ring {mesh.ring} × ulysses {mesh.ulysses}"
    losses, seconds = _train(settings, braided, backward, evaluate, name if mesh.rank == 0 else None)
    braided.save_pretrained(settings.checkpoint)
    if dist.is_initialized():
        dist.destroy_process_group()
    return Outcome(losses, seconds, accuracy, predictions.tolist())


def train_alone(settings: Settings, backwards: bool) -> Outcome:
    """In one process: the stock model on each sample by itself, gradients summed over the row.

    With `backwards` the samples of a row are visited in reverse, which changes the order of the sums and
    nothing else: how far the two orders part is what rounding does to this training.
    """
    prepare()
    model = tiny_reader(settings.seed)

    def backward(samples: list[Sample]) -> float:
        return stock_backward(model, samples[::-1] if backwards else samples)

    name = None if backwards else "one process, each sample alone"
    losses, seconds = _train(settings, model, backward, lambda done: None, name)
    return Outcome(losses, seconds, [], [])


def stock_backward(model: PreTrainedModel, samples: Sequence[Sample]) -> float:
    """The gradient of the mean loss per digit, sample after sample; gives that loss."""
    targets = [F.pad(sample["labels"][1:], (0, 1), value=IGNORE) for sample in samples]
    count = sum(int((target != IGNORE).sum()) for target in targets)
    total = 0.0
    for sample, target in zip(samples, targets, strict=True):
        loss = F.cross_entropy(stock_logits(model, sample), target, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def stock_logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    """`[T, V]` of the stock model on one sample."""
    per_token = {key: sample[key][None] for key in ("input_ids", "mm_token_type_ids")}
    media = {key: sample[key] for key in ("pixel_values", "image_grid_thw")}
    with in_torch(model):
        logits: Tensor = model(**per_token, **media, use_cache=False).logits[0]
    return logits


def read_packed(model: BraidedModel, digits: Digits) -> Tensor:
    """What the model reads in the digits, packed; the same on every rank."""
    rows = held_out_rows(digits, ROW_TOKENS)
    config, mesh = model.model.config, model.mesh
    return torch.cat([predicted_digits(model.logits(pack(row, config, mesh)), row) for row in rows])


@torch.no_grad()
def read_alone(model: PreTrainedModel, digits: Digits) -> Tensor:
    """What the stock model reads in the digits, each sample by itself."""
    samples = [sample for row in held_out_rows(digits, ROW_TOKENS) for sample in row]
    return predicted_digits([stock_logits(model, sample) for sample in samples], samples)


def _train(
    settings: Settings,
    model: nn.Module,
    backward: Callable[[list[Sample]], float],
    after: Callable[[int], None],
    name: str | None,
) -> tuple[list[float], float]:
    """The loop that all trainings share; gives the losses and the seconds. Shown as `name`, if any."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.steps))
    losses: list[float] = []
    begin = time.perf_counter()
    rows: Iterable[tuple[int, list[Sample]]] = zip(range(settings.steps), settings.rows(), strict=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=Console(quiet=name is None)) as progress:
        task = progress.add_task(name or "", total=settings.steps, loss="")
        after(0)
        for step, samples in rows:
            losses.append(backward(samples))
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            after(step + 1)
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")
    return losses, time.perf_counter() - begin


def _rate(step: int, steps: int) -> float:
    """Warm-up, then half a cosine, as a share of the full rate."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def prepare() -> None:
    """Set this process up: one thread, and nothing on the screen but our own."""
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    transformers_logging.set_verbosity_error()  # which kernels stock code falls back to is no news here
    transformers_logging.disable_progress_bar()
