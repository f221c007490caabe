"""Parity: loss, logits and every parameter gradient of a packed step against stock, sample by sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from ..comm.consensus import gather_floats, gather_objects
from ..comm.group import Group
from ..data.pack import pack
from ..distributed.api import parallelize
from ..mesh import Mesh
from ..models.mtp_module import MtpOptions
from ..models.output import StepOutput
from ..models.step import forward_backward
from ..models.tensor_parts import whole_tensor
from ..plan.pipeline import PipelineOptions
from .mtp_reference import mtp_options
from .objective import Objective
from .reference import Measurement, fresh_gradients, one_rounding_away, stock_step
from .verdict import Parity, Quantity, compare
from .wide import float32_is_float64, in_float64


def check_parity(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    mesh: Mesh | None = None,
    case: str = "",
    policy: str = "balanced",
    micro_batches: int = 1,
    gated_delta: str = "auto",
    references: Sequence[Measurement] | None = None,
    objective: Objective | None = None,
    pipeline: PipelineOptions | None = None,
    **layout: Any,
) -> Parity:
    """Compare a packed step with the stock model on each sample alone; the model comes back as it was.

    Where a floor is too large for float32 to decide, everything is computed again in float64. On several
    ranks every rank calls it with the same model and samples, and comes to the same verdict; data ranks share
    the samples out. The `references` of a model and samples may be given where they are used more than once.
    An `objective` takes the place of cross entropy.
    """
    mesh = Mesh() if mesh is None else mesh
    rows = rows_of(len(samples), mesh.data_world_size, micro_batches)
    own = range(mesh.data_rank, len(samples), mesh.data_world_size)

    def measured(model: PreTrainedModel, references: Sequence[Measurement] | None) -> Parity:
        reference, *others = (
            replace(m, logits=[m.logits[i] for i in own])
            for m in (stock_references(model, samples, rows, objective) if references is None else references)
        )
        ours = model if mesh.world_size == 1 else copy.deepcopy(model)
        layout["policy"], layout["pipeline"] = policy, pipeline
        mine = [samples[i] for i in own]
        got = packed_step(ours, mine, mesh, micro_batches, gated_delta, objective, **layout)
        return of_all_ranks(compare(case, got, reference, others), mesh)

    parity = measured(model, references)
    if parity.is_decided or parity.dtype != "float32":
        return parity
    wide = in_float64(model)
    with float32_is_float64(wide):
        decided = measured(wide, None)
    return replace(decided, undecided=max(parity.lines, key=lambda line: line.severity))


def of_all_ranks(parity: Parity, mesh: Mesh) -> Parity:
    """Of every quantity the worst rank's figures, so that all ranks come to one verdict.

    Logits are those of a rank's own samples, and stock sums may differ between machines in the last bit.
    """
    found = gather_floats(mesh.cpu_group, [x for line in parity.lines for x in (line.error, line.floor)])
    lines = (
        max(
            (Quantity(line.name, *of_rank[2 * i : 2 * i + 2]) for of_rank in found),
            key=lambda line: line.severity,
        )
        for i, line in enumerate(parity.lines)
    )
    return replace(parity, lines=tuple(lines))


def rows_of(num_samples: int, data_world_size: int = 1, micro_batches: int = 1) -> list[list[int]]:
    """Which samples share a row when data ranks take turns and each packs its own into micro-batches: so many
    on every data rank, where it has the samples.

    >>> rows_of(5, data_world_size=2, micro_batches=2)
    [[0, 2], [4], [1], [3]]
    >>> [len(row) for row in rows_of(9, micro_batches=7)]
    [2, 1, 1, 2, 1, 1, 1]
    """
    rows = []
    for data_rank in range(data_world_size):
        own = list(range(data_rank, num_samples, data_world_size))
        count = min(micro_batches, len(own))
        ends = [-(-i * len(own) // max(1, count)) for i in range(count + 1)]
        rows += [own[a:b] for a, b in pairwise(ends)]
    return rows


def stock_references(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    rows: Sequence[Sequence[int]] | None = None,
    objective: Objective | None = None,
) -> list[Measurement]:
    """The reference, and then what is as right as it is, for the floor; see `stock_step` for `rows`.

    Two other orders of its sums, and one rounding of its weights: how well the problem is conditioned.
    """
    found = [
        stock_step(model, samples, 0, False, rows, objective),
        stock_step(model, samples, 3, True, rows, objective),
        stock_step(model, samples, 37, False, rows, objective),
    ]
    with one_rounding_away(model):
        found.append(stock_step(model, samples, 0, False, rows, objective))
    return found


def packed_step(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    mesh: Mesh,
    micro_batches: int = 1,
    gated_delta: str = "auto",
    objective: Objective | None = None,
    pipeline: PipelineOptions | None = None,
    **layout: Any,
) -> Measurement:
    """The same step through the public surface, of this data rank's samples."""
    mtp = mtp_options(model)
    with fresh_gradients(model):
        braided = parallelize(model, mesh, gated_delta, pipeline=pipeline)
        try:
            parts = [[samples[i] for i in row] for row in rows_of(len(samples), 1, micro_batches)]
            depth = 0 if mtp is None else mtp.depth
            batches = [pack(part, model.config, mesh, mtp_depth=depth, **layout) for part in parts]
            logits = [x for batch in batches for x in braided.logits(batch)]
            loss = None if objective is None else objective.of_tokens
            output = forward_backward(braided, batches, loss)
            mean_loss = _whole_loss(output, model, mtp)
            gradients = _whole(
                {
                    braided.copies.get(name, name): torch.zeros_like(p) if p.grad is None else p.grad
                    for name, p in model.named_parameters()
                    if p.requires_grad
                }
            )
            gradients = _of_all_stages(gradients, mesh)
        finally:
            braided.release()
    return Measurement(mean_loss.detach(), logits, gradients)


def _whole_loss(output: StepOutput, model: PreTrainedModel, mtp: MtpOptions | None) -> Tensor:
    loss = output.mean_loss
    if mtp is not None and output.mtp_loss is not None:
        loss = loss + mtp.loss_factor * output.mtp_loss
    if output.aux_loss is None:
        return loss
    return loss + model.config.get_text_config().router_aux_loss_coef * output.aux_loss


def _of_all_stages(gradients: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Those of all pipeline stages, whose parameters have names of their own. A tied weight is on two, which
    must have the same: else it is not a number.
    """
    if mesh.pp == 1:
        return gradients
    found: dict[str, Tensor] = {}
    first_of_stage = mesh.rank % (mesh.world_size // mesh.pp) == 0
    for of_rank in gather_objects(mesh.cpu_group, gradients if first_of_stage else {}):
        for name, gradient in of_rank.items():
            is_same = torch.equal(found.setdefault(name, gradient), gradient)
            found[name] = gradient if is_same else torch.full_like(gradient, torch.nan)
    return found


def _whole(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients in full; sharded ones of a mesh take one exchange together, as one each costs more than
    the step.
    """
    found = {name: g.clone() for name, g in gradients.items() if not isinstance(g, DTensor)}
    by_mesh: dict[Any, dict[str, DTensor]] = {}
    for name, g in gradients.items():
        if not isinstance(g, DTensor):
            continue
        if g.placements[-1] == Shard(0) and all(p.is_replicate() for p in g.placements[:-1]):
            by_mesh.setdefault(g.device_mesh, {})[name] = g
        else:  # cut over two axes
            found[name] = whole_tensor(g)
    for mesh, sharded in by_mesh.items():
        found |= _whole_of_mesh(sharded, Group.of(mesh.get_group(mesh.ndim - 1)))
    return {name: found[name] for name in gradients}


def _whole_of_mesh(sharded: dict[str, DTensor], group: Group) -> dict[str, Tensor]:
    """FSDP cuts rows into equal pieces, of which the last ones may be short or empty: padded to the size of
    the first and put one after another, they are the tensor and some padding behind it.
    """
    sizes = [-(-g.shape[0] // group.size) * g.shape[1:].numel() for g in sharded.values()]
    own = [g.to_local().flatten() for g in sharded.values()]
    row = torch.cat([F.pad(x, (0, size - len(x))) for x, size in zip(own, sizes, strict=True)])
    parts = torch.stack(group.all_gather(row)).split(sizes, dim=1)
    return {
        name: part.flatten()[: g.numel()].view(g.shape)
        for (name, g), part in zip(sharded.items(), parts, strict=True)
    }
