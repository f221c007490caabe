"""`seqbraid inspect`: from a configuration to what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn

from ...mesh import Mesh
from ...plan.flops import ModelFlops
from ...printable import printable
from ..config import TrainConfig
from ..config_file import parse_config
from ..dry_run import planned_mesh
from ..setup import EncoderFactory, make_model, open_data, row_options
from .findings import Findings, findings
from .packed import PackedRow, packed_row
from .page import write_page
from .survey import Reader, Survey, survey
from .terminal import print_findings

SAMPLES = 2000


def inspect(
    arguments: Sequence[str],
    html: Path | None = None,
    samples: int = SAMPLES,
    row: int = 0,
    console: Console | None = None,
) -> Findings:
    """Show a row and the statistics of the training data of a configuration, with the options of `train`."""
    if samples < 1 or row < 0:
        raise ValueError(f"--samples={samples} must be at least 1, and --row={row} at least 0")
    config, _ = parse_config(arguments, with_defaults)
    console = Console() if console is None else console
    mesh = planned_mesh(config.mesh)
    model = make_model(config, weights=False)
    alone = Mesh(rank=0, world_size=1)
    flops = ModelFlops.if_known(model)
    reader = Reader(
        open_data(config.data.train, config.data, alone),
        EncoderFactory(config.model, config.data, model.config)(),
        row_options(config),
    )
    seen = _survey(reader, samples)
    found = findings(config, model.config, mesh, seen, flops)
    packed = packed_row(reader, row) if seen.rows else PackedRow(row, [], config.data.row_tokens, [])
    print_findings(console, config, found, packed, reader.encoder)
    if html is not None:
        write_page(html, config, found, packed, reader.encoder)
        console.print(f"wrote {printable(html)}", markup=False, highlight=False)
    return found


def with_defaults(config: TrainConfig) -> TrainConfig:
    """With what a run needs and looking at data does not: a folder, a length, and a batch size of one row."""
    steps = config.train
    if steps.steps is None and steps.epochs is None:
        steps = replace(steps, epochs=1)
    if not steps.batch_tokens:
        steps = replace(steps, batch_tokens=config.data.row_tokens)
    return replace(config, out=config.out or "out/run", train=steps)


def _survey(reader: Reader, samples: int) -> Survey:
    count = min(samples, reader.order.num_samples)
    text = TextColumn("looking at {task.completed:,.0f} of {task.total:,.0f} samples")
    console = Console(stderr=True)
    with Progress(text, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count)
        return survey(reader, samples, lambda: bar.advance(task))
