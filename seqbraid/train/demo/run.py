"""`seqbraid demo`: a tiny Qwen3.5 learns to read digits over ranks, beside the stock model in one process."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import Qwen3_5ForConditionalGeneration

from .page import demo_report
from .result import ALLOWANCE, LEAST_ACCURACY, DemoResult
from .training import Outcome, Settings, prepare, read_alone, train_alone, train_split

TABLE_ROWS = 9


def run_demo(steps: int, out: Path, seed: int, processes: int) -> int:
    """Train both ways, compare, write `report.html`; 0 if the curves agree and the digits are read."""
    if steps < 1:
        raise ValueError(f"--steps {steps} trains nothing; use at least 1")
    if processes < 1:
        raise ValueError(
            f"--processes {processes} starts no process; use at least 1 (4 means ring 2 × ulysses 2)"
        )
    settings = Settings(steps, seed, processes, out)
    settings.digits()  # where they are missing, that is said before any process is started
    out.mkdir(parents=True, exist_ok=True)
    result = train_both_ways(settings)
    report = out / "report.html"
    report.write_text(demo_report(result), encoding="utf-8")
    _print_result(result, Console())
    print(f"wrote {report}")
    return 0 if result.holds else 1


def train_both_ways(settings: Settings) -> DemoResult:
    """First the ranks; then one process, and beside it another that sums in reverse: each has a core."""
    begin = time.perf_counter()
    prepare()
    split = launch_ranks(settings)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        trainings = [pool.submit(train_alone, settings, backwards) for backwards in (False, True)]
        alone, backwards = (training.result() for training in trainings)
    stock = Qwen3_5ForConditionalGeneration.from_pretrained(settings.checkpoint)
    held_out = settings.digits()[1]
    return DemoResult(
        settings,
        split,
        alone,
        backwards,
        held_out,
        read_alone(stock, held_out).tolist(),
        sum(p.numel() for p in stock.parameters()),
        time.perf_counter() - begin,
    )


def launch_ranks(settings: Settings) -> Outcome:
    """Train over ranks on this machine, as `torchrun --standalone` would start them."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.processes,
        run_id="seqbraid-demo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    trained: Outcome = elastic_launch(config, train_split)(settings)[0]
    return trained


def _print_result(result: DemoResult, console: Console) -> None:
    table = Table(title="loss per digit", title_justify="left")
    for name in ("step", "ranks", "one process", "difference", "rounding"):
        table.add_column(name, justify="right")
    split, alone = result.split.losses, result.alone.losses
    for step in sorted({*torch.linspace(0, len(split) - 1, TABLE_ROWS).long().tolist()}):
        numbers = (f"{split[step]:.6f}", f"{alone[step]:.6f}")
        table.add_row(str(step + 1), *numbers, f"{result.differences[step]:.1e}", f"{result.floor[step]:.1e}")
    console.print(table)
    agree = "[green]agree[/]" if result.curves_agree else "[red]do not agree[/]"
    good = "green" if result.accuracy >= LEAST_ACCURACY else "red"
    console.print(
        f"The two loss curves {agree}: largest relative difference {max(result.differences):.1e}, within "
        f"{ALLOWANCE:.0f} × the effect of rounding on this training ({max(result.floor):.1e}).\nHeld-out "
        f"digits read right: [{good}]{result.accuracy:.1%}[/] packed over ranks, "
        f"{result.stock_accuracy:.1%} by stock transformers with the saved checkpoint. "
        f"{result.seconds:.0f} s in all."
    )
