"""Verdicts on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .verdict import Parity

SHOWN = 8


def print_parity(parity: Parity) -> None:
    """The verdict, and the quantities furthest from their floors."""
    table = Table(
        title=f"{parity.case}: packed against the stock model, sample by sample, in {parity.dtype}",
        title_justify="left",
    )
    table.add_column("quantity")
    for name in ("error", "floor", "error / floor"):
        table.add_column(name, justify="right")
    worst = sorted(parity.lines, key=lambda line: line.severity, reverse=True)
    picked = [*(line for line in parity.lines if line.name in ("loss", "logits")), *worst]
    for line in list(dict.fromkeys(picked))[: SHOWN + 2]:
        style = "green" if line.holds else "bold red"
        table.add_row(line.name, f"{line.error:.1e}", f"{line.floor:.1e}", f"[{style}]{line.ratio:.2f}[/]")
    console = Console()
    console.print(table)
    verdict = "[bold green]holds[/]" if parity.holds else "[bold red]fails[/]"
    console.print(f"{verdict}: loss, logits and {len(parity.lines) - 2} parameter gradients; {parity.reason}")


def print_mutants(verdicts: dict[str, Parity]) -> None:
    """Which planted defects were caught, and by what."""
    table = Table(title="planted defects", title_justify="left")
    for name in ("defect", "caught", "by", "error / floor"):
        table.add_column(name)
    for name, verdict in verdicts.items():
        caught = "[bold red]no[/]" if verdict.holds else "[green]yes[/]"
        table.add_row(name, caught, verdict.worst.name, f"{verdict.worst.ratio:.1e}")
    Console().print(table)
