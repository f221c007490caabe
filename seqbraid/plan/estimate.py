"""What a training step will take of a device's memory, before it is tried."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from ..mesh import Mesh
from ..models.parts import LayerParts, ModelParts
from ..models.stage import keep_stages, without_weights
from ..models.tensor import TensorPlan
from ..ops.linear_cross_entropy import default_chunk
from .activations import FLOAT32, layer_activations
from .anatomy import parts_of
from .memory import MemoryOptions
from .pipeline import PipelineOptions, cut_into_stages
from .shares import Shares
from .units import Units

if TYPE_CHECKING:
    from rich.table import Table

Precision = Literal["float32", "mixed", "bfloat16"]

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}
"""Float32 numbers per trained parameter that an optimizer keeps."""


@dataclass(frozen=True)
class MemoryUse:
    """One use of memory."""

    name: str
    bytes: int
    how: Literal["count", "model"]
    """Counted from shapes that are known, or a model of what frameworks keep."""
    note: str = ""
    phase: Literal["whole step", "loss", "backward"] = "whole step"
    """When it is held: what the loss takes is gone when the backward of a layer begins."""


@dataclass(frozen=True)
class Estimate:
    """What one device holds at the height of a step, and what it puts into its host's memory."""

    lines: tuple[MemoryUse, ...]
    host_bytes: int = 0
    num_parameters: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, at the height of the loss or of the backward."""
        of = {"whole step": 0, "loss": 0, "backward": 0}
        for line in self.lines:
            of[line.phase] += line.bytes
        return of["whole step"] + max(of["loss"], of["backward"])

    def __getitem__(self, name: str) -> int:
        return next(line.bytes for line in self.lines if line.name == name)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"total": self.total, "host": self.host_bytes, "lines": [asdict(line) for line in self.lines]}

    def table(self) -> Table:
        """For the console."""
        from rich.table import Table

        table = Table(title="Memory of one device", title_justify="left")
        for name, justify in (("what", "left"), ("GiB", "right"), ("known by", "left"), ("", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for line in self.lines:
            table.add_row(line.name, f"{line.bytes / 2**30:.2f}", line.how, line.note)
        table.add_section()
        table.caption = "not at once: loss and logits, and a layer's backward"
        table.add_row(
            "all", f"{self.total / 2**30:.2f}", "", "media towers' activations and fragmentation come on top"
        )
        if self.host_bytes:
            table.add_row(
                "in host memory", f"{self.host_bytes / 2**30:.2f}", "model", "offloaded activations"
            )
        return table


def memory_estimate(
    model: nn.Module,
    mesh: Mesh,
    memory: MemoryOptions | None = None,
    precision: Precision = "mixed",
    optimizer: str | float = "adamw",
    row_tokens: int = 8192,
    fused: bool = False,
    pipeline: PipelineOptions | None = None,
) -> Estimate:
    """Estimate what a step takes of each device; with pipeline stages, of the one that needs most.

    Args:
        model: stock, or wrapped by `parallelize` or peft; its weights may be on the meta device.
        mesh: how the job's processes are shared out.
        memory: what is given for memory; nothing when left out.
        precision: as `train` has it.
        optimizer: `adamw`, `sgd`, or how many float32 numbers another keeps for each that is trained.
        row_tokens: tokens of a packed row, all of them with labels.
        fused: norms, rotations and gates are computed by our kernels, which keep less.
        pipeline: how `parallelize` would cut the model where `mesh.pp` is more than 1.
    """
    if precision not in get_args(Precision):
        *others, last = (repr(choice) for choice in get_args(Precision))
        raise ValueError(f"precision={precision!r} is unknown; use {', '.join(others)} or {last}")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZER_STATES:
        known = ", ".join(OPTIMIZER_STATES)
        raise ValueError(f"optimizer={optimizer!r} is unknown; use one of {known}, or a number")
    if row_tokens < 1:
        raise ValueError(f"row_tokens={row_tokens} must be at least 1")
    parts, memory = parts_of(model), MemoryOptions() if memory is None else memory
    if memory.checkpointing == "auto":
        raise ValueError("checkpointing='auto' takes what it chooses: see seqbraid.plan.auto")
    tokens = ceil(row_tokens / mesh.sequence_size)
    compute = FLOAT32 if precision == "float32" else 2

    def of_rank(parts: ModelParts, in_flight: float, tensor: TensorPlan | None) -> Estimate:
        shares = Shares(parts, mesh, tensor)
        lines = [
            *_state_lines(parts, shares, precision, optimizer),
            *_gathered_lines(parts, shares, precision),
        ]
        activations, host = _activation_lines(parts, memory, compute, tokens, mesh.tp, fused)
        kept, working = activations
        kept = replace(kept, bytes=int(kept.bytes * in_flight))
        if in_flight != 1:
            kept = replace(kept, note=f"{kept.note}; {in_flight:g} micro-batches at once")
        loss = (
            [] if not hasattr(parts.head, "weight") else _loss_lines(parts, memory, compute, tokens, mesh.tp)
        )
        return Estimate((*lines, kept, working, *loss), int(host * in_flight), count)

    count = sum(p.numel() for p in parts.model.parameters())
    tensor = None if mesh.tp == 1 else TensorPlan.of(parts, mesh.tp, is_tried=False)
    if mesh.pp == 1:
        return of_rank(parts, 1, tensor)
    options = PipelineOptions() if pipeline is None else pipeline
    stages = cut_into_stages(parts, mesh.pp, options)
    found = []
    for rank in range(mesh.pp):
        whole = ModelParts.of(without_weights(parts.model))
        tensor = None if mesh.tp == 1 else TensorPlan.of(whole, mesh.tp, is_tried=False)
        own = keep_stages(whole, stages[rank :: mesh.pp])
        tensor = None if tensor is None else tensor.kept(own)
        found.append(of_rank(own, options.in_flight(mesh.pp, rank), tensor))
    return max(found, key=lambda estimate: estimate.total)


def _state_lines(
    parts: ModelParts, shares: Shares, precision: Precision, optimizer: str | float
) -> list[MemoryUse]:
    """What stays from step to step, one shard of it."""
    kept = OPTIMIZER_STATES[optimizer] if isinstance(optimizer, str) else optimizer
    named = optimizer if isinstance(optimizer, str) else f"{kept:.3g} numbers for each"
    shards = shares.fsdp * shares.tp
    held, trained = (
        sum(shares.held(p) for p in parts.model.parameters() if p.requires_grad or not only_trained)
        for only_trained in (False, True)
    )
    width = 2 if precision == "bfloat16" else FLOAT32
    master = FLOAT32 if precision == "bfloat16" else 0
    of = f"1/{shards} of each" if shards > 1 else ""
    states = round(trained * (FLOAT32 * kept + master))
    return [
        MemoryUse("parameters", held * width, "count", of),
        # Sums of accumulated micro-batches are in float32 whatever the parameters are.
        MemoryUse("gradients", trained * FLOAT32, "count", of),
        MemoryUse("optimizer", states, "count", f"{named}, with float32 master weights" if master else named),
    ]


def _gathered_lines(parts: ModelParts, shares: Shares, precision: Precision) -> list[MemoryUse]:
    """Whole parameters and gradients of the units that FSDP has at work."""
    if not shares.is_sharded and precision != "mixed":
        return []  # nothing is sharded or cast
    width = FLOAT32 if precision == "float32" else 2
    units = Units.of(parts, shares.ep, shares.tensor)
    own = {id(unit): units.own(unit) for unit in units.units}
    sizes = {key: shares.gathered(parameters) for key, parameters in own.items()}
    forward = [sizes[id(unit)] for unit in units.units]
    backward = [sizes[id(unit)] for unit in units.backward if unit.backward_reads]
    # Experts that lie over ranks are beside their layer, and the next layer beside both; matrices that are
    # cut over tp are beside theirs, and those of the next layer.
    count = 3 if shares.ep > 1 else 2
    most = max(sum(order[i : i + count]) for order in (forward, backward) for i in range(len(order)))
    if shares.tensor is not None:
        whole = [0]
        for unit in units.units:
            whole += [] if unit.in_layer else [0]
            whole[-1] += sizes[id(unit)]
        most = max(a + b for a, b in pairwise(whole))
    # Gradients are summed in float32, from the copy that the backward made.
    trained = max(shares.gathered(p for p in unit if p.requires_grad) for unit in own.values())
    reduced = trained * (width + (0 if width == FLOAT32 else FLOAT32))
    rest = shares.gathered(units.rest)
    rest_trained = shares.gathered(p for p in units.rest if p.requires_grad)
    return [
        MemoryUse("gathered units", most * width, "count", "the one at work and the next"),
        MemoryUse("gathered rest", rest * width, "count", "what belongs to no unit, kept through the step"),
        MemoryUse(
            "gradients in flight", reduced + rest_trained * width, "model", "of a unit and of the rest"
        ),
    ]


def _activation_lines(
    parts: ModelParts, memory: MemoryOptions, e: int, row: int, tp: int, fused: bool
) -> tuple[list[MemoryUse], int]:
    """What is kept for the backward, and what the backward of one layer takes; bytes in host memory.

    A rank has all heads and channels of its own tokens, or its own of all tokens, which is as much; but
    projections keep what they are given, the gathered tokens. Tiles of an MLP are gathered one by one.
    """
    tokens = ceil(row / tp)
    tiled, again = memory.mlp_tile is not None, memory.checkpointing != "none"
    depths = () if parts.mtp is None else parts.mtp.of_depths
    layers = [layer_activations(parts, layer, e, fused) for layer in (*parts.layers, *depths)]
    hidden = int(parts.config.hidden_size)
    gathered = (1 if tiled else 2) * (row - tokens) * hidden * e  # for a mixer and an MLP
    kept = [tokens * x.kept(memory.checkpointing, tiled) + (0 if again else gathered) for x in layers]
    # Of what is offloaded, one layer is on its way out or back, and one is in use.
    on_device = sum(sorted(kept)[-2:]) if memory.offload else sum(kept)
    on_device += tokens * hidden * (FLOAT32 + e)  # the last norm
    # Of each depth: embeddings, both sides normed and joined, three norms.
    on_device += len(depths) * tokens * hidden * (6 * e + 3 * FLOAT32)
    # Gradients of the hidden states, and as wide as the widest part of a layer.
    working = row * hidden * 2 * e + (gathered if again else 0)
    if again:
        working += tokens * max(
            layer.whole(tiled) - layer.kept(memory.checkpointing, tiled) for layer in layers
        )
    if tiled:
        # A tile's activations and their gradients, and float32 sums of the MLP's.
        working += 2 * min(tokens, memory.mlp_tile or tokens) * max(layer.mlp for layer in layers)
        working += max(_tiled_parameters(layer) for layer in parts.every_layer) * FLOAT32 // tp
    else:
        working += tokens * max(layer.mlp + layer.experts for layer in layers)
    note = {
        "none": "everything the backward needs",
        "selective": "inputs of layers and what mixers keep",
        "full": "inputs of layers",
    }[memory.checkpointing]
    note += f", MLPs in tiles of {memory.mlp_tile:,}" if tiled else ""
    note += ", in host memory" if memory.offload else ""
    lines = [
        MemoryUse("activations", on_device, "model", f"{tokens:,} tokens: {note}"),
        MemoryUse(
            "a layer's backward",
            working,
            "model",
            "computed again; gradients" if again else "gradients",
            "backward",
        ),
    ]
    return lines, sum(kept) if memory.offload else 0


def _tiled_parameters(layer: LayerParts) -> int:
    return sum(p.numel() for module in layer.dense for p in module.parameters())


def _loss_lines(parts: ModelParts, memory: MemoryOptions, e: int, tokens: int, tp: int) -> list[MemoryUse]:
    """The gradients of head and hidden states are made in the forward, chunk by chunk."""
    weight: Any = parts.head.weight
    vocabulary, hidden = ceil(weight.shape[0] / tp), int(weight.shape[1])
    chunk = min(tokens, memory.loss_chunk or default_chunk(vocabulary, hidden))
    depths = 0 if parts.mtp is None else parts.mtp.module.options.depth
    # With further depths there are their hidden states too, behind each other.
    streams = 1 if not depths else 2 * (1 + depths)
    gradients = streams * tokens * hidden * e
    gradients += vocabulary * hidden * FLOAT32 if weight.requires_grad else 0
    return [
        MemoryUse(
            "loss", gradients, "count", "gradients of the head, in float32, and of hidden states", "loss"
        ),
        MemoryUse("logits", chunk * vocabulary * e, "count", f"{chunk:,} tokens × {vocabulary:,}", "loss"),
    ]
