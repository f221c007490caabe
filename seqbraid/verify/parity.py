"""Parity: errors of loss, logits and every parameter gradient against stock, beside the noise floor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from ..comm.consensus import gather_ints
from ..comm.group import Group
from ..data.pack import pack
from ..mesh import Mesh
from ..models.batch import PackedBatch
from ..models.braided import StepOutput
from ..parallelize.api import parallelize
from .reference import Measurement, fresh_gradients, stock_step

ALLOWANCE = 10.0
"""A case holds when every error is within this many times its floor."""

SMALLEST_FLOOR = 5e-7
"""No floor is taken to be lower than a few roundings of float32, even where two orders agree to the bit."""

LARGEST_FLOOR = 1e-3
"""A floor above this would let anything pass: the orders compared were not equally valid."""

NEGLIGIBLE = 1e-5
"""A gradient that is zero in exact arithmetic is all noise: it is measured against this share of the whole.
"""


@dataclass(frozen=True)
class Line:
    """One quantity: its error, its floor, and whether it holds."""

    name: str
    error: float
    floor: float

    @property
    def ratio(self) -> float:
        """Error in floors."""
        return self.error / self.floor

    @property
    def holds(self) -> bool:
        """Whether the error is within the allowance of a credible floor; not a number never is."""
        return self.floor <= LARGEST_FLOOR and self.ratio <= ALLOWANCE


@dataclass(frozen=True)
class Parity:
    """The verdict on one case."""

    case: str
    lines: tuple[Line, ...]

    @property
    def holds(self) -> bool:
        """Whether every quantity holds."""
        return all(line.holds for line in self.lines)

    @property
    def worst(self) -> Line:
        """The quantity furthest from its floor."""
        return max(self.lines, key=lambda line: (line.ratio != line.ratio, line.ratio))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        lines = [asdict(line) | {"ratio": line.ratio, "holds": line.holds} for line in self.lines]
        return {"case": self.case, "holds": self.holds, "allowance": ALLOWANCE, "lines": lines}


def check_parity(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    mesh: Mesh | None = None,
    case: str = "",
    policy: str = "balanced",
    micro_batches: int = 1,
    gated_delta: str = "auto",
    references: Sequence[Measurement] | None = None,
    **layout: Any,
) -> Parity:
    """Compare a packed step with the stock model on each sample alone; the model comes back as it was.

    On several ranks every rank calls it with the same model and samples; data ranks share the samples out.
    The `references` of a model and samples may be given where they are used more than once.
    """
    mesh = Mesh() if mesh is None else mesh
    own = range(mesh.data_rank, len(samples), mesh.data_world_size)
    if references is None:
        rows = rows_of(len(samples), mesh.data_world_size, micro_batches)
        references = stock_references(model, samples, rows)
    reference, *others = (replace(m, logits=[m.logits[i] for i in own]) for m in references)
    ours = model if mesh.world_size == 1 else copy.deepcopy(model)
    got = packed_step(
        ours, [samples[i] for i in own], mesh, micro_batches, gated_delta, policy=policy, **layout
    )
    return compare(case, got, reference, others)


def rows_of(num_samples: int, data_world_size: int = 1, micro_batches: int = 1) -> list[list[int]]:
    """Which samples share a row when data ranks take turns and each packs its own into micro-batches.

    >>> rows_of(5, data_world_size=2, micro_batches=2)
    [[0, 2], [4], [1], [3]]
    """
    rows = []
    for data_rank in range(data_world_size):
        own = list(range(data_rank, num_samples, data_world_size))
        size = -(-len(own) // micro_batches)
        rows += [own[i : i + size] for i in range(0, len(own), max(1, size))]
    return rows


def stock_references(
    model: PreTrainedModel, samples: Sequence[dict[str, Any]], rows: Sequence[Sequence[int]] | None = None
) -> list[Measurement]:
    """The reference, and then equally valid orders of it for the floor; see `stock_step` for `rows`."""
    return [
        stock_step(model, samples, rows=rows),
        stock_step(model, samples, left_padding=3, backwards=True, rows=rows),
        stock_step(model, samples, left_padding=37, rows=rows),
    ]


def packed_step(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    mesh: Mesh,
    micro_batches: int = 1,
    gated_delta: str = "auto",
    **layout: Any,
) -> Measurement:
    """The same step through the public surface, of this data rank's samples."""
    with fresh_gradients(model):
        braided = parallelize(model, mesh, gated_delta)
        try:
            parts = [[samples[i] for i in row] for row in rows_of(len(samples), 1, micro_batches)]
            batches = [pack(part, model.config, mesh, **layout) for part in parts]
            logits = [x for batch in batches for x in braided.logits(batch)]
            loss = torch.zeros(())
            total = None if micro_batches == 1 else _label_tokens(batches, mesh)
            for batch in batches:
                output = braided(batch, label_tokens=total)
                output.loss.backward()
                loss = loss + _whole_loss(output, model)
            gradients = _whole(
                {
                    name: torch.zeros_like(p) if p.grad is None else p.grad
                    for name, p in model.named_parameters()
                    if p.requires_grad
                }
            )
        finally:
            braided.release()
    return Measurement(loss.detach(), logits, gradients)


def _label_tokens(batches: Sequence[PackedBatch], mesh: Mesh) -> int:
    """Labels of all batches of the step on all data ranks, known before the first forward."""
    own = sum(batch.label_tokens for batch in batches)
    return mesh.sum_over_data(gather_ints(mesh.cpu_group, [own]))[0]


def _whole_loss(output: StepOutput, model: PreTrainedModel) -> Tensor:
    if output.aux_loss is None:
        return output.mean_loss
    return output.mean_loss + model.config.get_text_config().router_aux_loss_coef * output.aux_loss


def _whole(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients in full; sharded ones take one exchange together, as one each costs more than the step.

    FSDP cuts rows into equal pieces, of which the last ones may be short or empty: padded to the size of the
    first and put one after another, they are the tensor and some padding behind it.
    """
    sharded = [g for g in gradients.values() if isinstance(g, DTensor)]
    if not sharded:
        return {name: g.clone() for name, g in gradients.items()}
    mesh = sharded[0].device_mesh
    assert len(sharded) == len(gradients) and all(g.device_mesh == mesh for g in sharded)
    assert all(
        g.placements[-1] == Shard(0) and not any(p.is_shard() for p in g.placements[:-1]) for g in sharded
    )
    group = Group.of(mesh.get_group(mesh.ndim - 1))
    sizes = [-(-g.shape[0] // group.size) * g.shape[1:].numel() for g in sharded]
    own = [g.to_local().flatten() for g in sharded]
    row = torch.cat([F.pad(x, (0, size - len(x))) for x, size in zip(own, sizes, strict=True)])
    parts = torch.stack(group.all_gather(row)).split(sizes, dim=1)
    return {
        name: part.flatten()[: g.numel()].view(g.shape)
        for (name, g), part in zip(gradients.items(), parts, strict=True)
    }


def compare(case: str, got: Measurement, reference: Measurement, others: Sequence[Measurement]) -> Parity:
    """Errors against the reference; the floor is how far its other, equally valid orders are from it."""
    errors = _errors(got, reference)
    floors = [_errors(other, reference) for other in others]
    return Parity(
        case,
        tuple(
            Line(name, error, max(SMALLEST_FLOOR, *(floor[name] for floor in floors)))
            for name, error in errors.items()
        ),
    )


def _errors(got: Measurement, reference: Measurement) -> dict[str, float]:
    whole = sum(float(g.double().norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    errors = {"loss": _relative(got.loss, reference.loss)}
    errors["logits"] = max(_relative(a, b) for a, b in zip(got.logits, reference.logits, strict=True))
    for name, gradient in reference.gradients.items():
        errors[name] = _relative(got.gradients[name], gradient, at_least=NEGLIGIBLE * whole)
    return errors


def _relative(a: Tensor, b: Tensor, at_least: float = 0.0) -> float:
    if a.shape != b.shape:
        return float("nan")
    difference = float((a.double() - b.double()).norm())
    size = max(float(b.double().norm()), at_least)
    return difference / size if size else difference
