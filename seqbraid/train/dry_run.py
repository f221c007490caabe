"""`seqbraid train --dry-run`: everything that can be refused is refused, and the first batch is shown."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from ..distributed.api import check_model
from ..layout import SequenceLayout
from ..layout.labels import num_targets
from ..layout.render import layout_table
from ..mesh import AXES, Mesh, launched
from ..models.media_adapter import make_adapter
from ..plan.pipeline import cut_into_stages
from ..printable import printable
from .config import MeshConfig, TrainConfig, as_dict
from .log import check_sinks
from .optimizer import make_groups
from .optimizers.kinds import OptimizerKind
from .recompute import choose_here, fit_here, planned_step
from .run_folder import check_out
from .setup import TINY, make_device, make_loader, make_model
from .summary import lost_reasoning
from .weights import checkpoint_folder, read_headers


def dry_run(config: TrainConfig, console: Console | None = None) -> None:
    """Check model, mesh, data and memory in one process, and print the plan of one batch."""
    check_sinks(config.log.sinks)
    check_out(Path(config.out))
    mesh = planned_mesh(config.mesh)
    if mesh.rank > 0:
        return
    if not config.model.startswith(TINY):
        read_headers(checkpoint_folder(config.model))
    model = make_model(config, weights=False)
    check_model(model)
    adapter = make_adapter(model)
    adapter.check_mesh(mesh, config.gated_delta)
    console = console or Console()
    table = _model_table(model, mesh, config)
    if mesh.pp > 1:
        stages = cut_into_stages(adapter.parts, mesh.pp, config.pipeline)
        layers = ", ".join(str(len(stage.layers)) for stage in stages)
        rows = -(-config.train.batch_tokens // config.data.row_tokens // mesh.data_world_size)
        waiting = config.pipeline.waiting(mesh.pp, max(1, rows))
        alike = f"ranks wait {waiting:.0%} of a step, if all stages are alike"
        table.add_row("stages", f"{config.pipeline.schedule}, of {layers} layers; {alike}")
    console.print(table)
    console.print(*_batch(config, model, mesh))
    memory, device = config.memory, make_device()
    console.print(_optimizer_table(model, config, mesh))
    if memory.checkpointing == "auto":  # for devices like the one here
        choice = choose_here(config, model, mesh, device)
        memory = replace(memory, checkpointing=choice.checkpointing)
        console.print(str(choice))
    console.print(planned_step(config, model, mesh, device).estimate(memory).table())
    found = fit_here(replace(config, memory=memory), model, mesh, device)
    like = "a GPU like the one here" if device.type == "cuda" else "the memory of this host, without a GPU"
    console.print(escape(f"Compared with {like}: {found}"), soft_wrap=True)


def planned_mesh(axes: MeshConfig) -> Mesh:
    """The mesh as the job would have it: of torchrun's processes, or of as many as the axes name."""
    sizes = as_dict(axes)
    rank, world_size = launched()
    if world_size == 1:
        world_size = prod(max(sizes[axis], 1) for axis in AXES)
    return Mesh(**sizes, rank=rank, world_size=world_size)


def _model_table(model: PreTrainedModel, mesh: Mesh, config: TrainConfig) -> Table:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    table = Table(title="Plan", title_justify="left", show_header=False)
    table.add_row("model", escape(printable(f"{config.model} ({type(model).__name__})")))
    trained = sum(n for n, learns in counts if learns)
    table.add_row("parameters", f"{sum(n for n, _ in counts):,}, of which {trained:,} are trained")
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1)
    table.add_row("mesh", f"{axes}: {mesh.world_size} processes" if axes else "one process")
    rows = config.train.batch_tokens // config.data.row_tokens
    per_rank = -(-rows // mesh.data_world_size)
    table.add_row(
        "step",
        f"{config.train.batch_tokens:,} tokens: {rows} rows of {config.data.row_tokens:,}, {per_rank} for "
        "each of "
        f"{mesh.data_world_size} data ranks",
    )
    idle = per_rank * mesh.data_world_size - rows
    if idle:
        table.add_row("", f"[yellow]{idle} of {rows + idle} rows of every step stay empty[/]; use a multiple")
    table.add_row("precision", config.precision)
    if config.mtp.depth:
        start = "random weights" if config.mtp.fresh else "the checkpoint's weights"
        alone = ", all else frozen" if config.mtp.only else ""
        table.add_row("mtp", f"depth {config.mtp.depth}, from {start}{alone}")
    return table


def _optimizer_table(model: PreTrainedModel, config: TrainConfig, mesh: Mesh) -> RenderableType:
    """What is stepped how; what the configuration adds for its groups and its end."""
    train = config.train
    kind = OptimizerKind.of(train)
    kind.check_ranks(mesh.world_size)
    options = ", ".join(f"{name}={value}" for name, value in kind.options.items())
    table = Table(title=escape(f"Optimizer: {kind.name}({options})"), title_justify="left")
    for name in ("parameters", "numbers", "peak lr", "weight decay"):
        table.add_column(name, justify="right" if name != "parameters" else "left")
    for group in make_groups(model, train, kind):
        sizes = [p.numel() for p in group.parameters]
        what = "matrices" if group.parameters[0].ndim >= 2 else "vectors"
        name = f"{len(sizes)} {what}" + (f" that match {group.match!r}" if group.match else "")
        name += ", by AdamW" if kind.is_muon and not group.is_muon else ""
        table.add_row(escape(printable(name)), f"{sum(sizes):,}", f"{group.lr:g}", f"{group.weight_decay:g}")
    chosen = [f"best checkpoint by {train.best_metric}"] if config.data.eval else []
    if train.patience is not None:
        chosen.append(f"stops after {train.patience} evaluations without a better one")
    if train.skip_spikes is not None:
        chosen.append(f"skips steps whose gradient norm is above {train.skip_spikes:g} × the median of 64")
    if train.profile is not None:
        chosen.append(f"profiles steps {train.profile}")
    table.caption = "; ".join(chosen) or None
    return table


def _batch(config: TrainConfig, model: PreTrainedModel, mesh: Mesh) -> list[RenderableType]:
    """The first step's rows; they are the same on any mesh, so one process can find them."""
    loader = make_loader(config, model.config, Mesh(rank=0, world_size=1), lists_bad=False)
    try:
        data = next(loader, None)
        if data is None:
            raise ValueError("the training data fills no row")
        shown: list[RenderableType] = []
        for number, row in enumerate(data.rows):
            lengths = [len(sample["input_ids"]) for sample in row]
            if not number:
                shown.append(_row_table(row))
                shown.append(
                    layout_table(SequenceLayout(lengths, mesh.ring, mesh.ulysses, config.data.policy))
                )
        bad = loader.bad
        if bad.count:
            first = escape(printable(f"{bad.first[0].where}: {bad.first[0].reason}"))
            shown.append(f"[yellow]{bad.count} samples cannot be used[/], the first: {first}")
        if loader.without_reasoning:
            shown.append(f"[yellow]{escape(lost_reasoning(loader.without_reasoning))}[/]")
        return shown
    finally:
        loader.close()


def _row_table(row: list[dict[str, Any]]) -> RenderableType:
    table = Table(title="First row", title_justify="left")
    for name in ("sample", "tokens", "labels", "images", "videos", "clips"):
        table.add_column(name, justify="right")
    for number, sample in enumerate(row):
        labels = sample.get("labels")
        covered = num_targets(sample["input_ids"] if labels is None else labels)
        media = [sample.get(key) for key in ("image_grid_thw", "video_grid_thw", "feature_attention_mask")]
        counts = [str(0 if item is None else len(item)) for item in media]
        table.add_row(str(number), str(len(sample["input_ids"])), str(covered), *counts)
    return table
