"""The command line of the chaos trials."""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import __doc__ as description
from .hosts import why_no_hosts
from .kinds import KINDS, ONCE
from .trial import Chaos, Outcome


def kills_of(kind: str, chance: random.Random) -> list[str]:
    """One to three, as many as torchrun restarts; a start after a kill has something to resume from."""
    if kind in ONCE:
        return [kind]
    return ["step", *["start"] * chance.randint(1, 2)] if kind == "start" else [kind] * chance.randint(1, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials and print what came of them."""
    parser = argparse.ArgumentParser(prog="tests.train.chaos", description=description.split("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default="step,save,prefetch", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--number", type=int, help="this trial only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that torchrun may take")
    parser.add_argument("--out", type=Path, help="a new folder; a temporary one when left out")
    args = parser.parse_args(arguments)
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds {sorted(unknown)}; known are {', '.join(KINDS)}")
    if "host" in kinds and (why := why_no_hosts()):
        print(f"host: skipped, {why}")
        kinds.remove("host")
    folder = (args.out or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    chaos = Chaos(folder, args.limit)
    numbers = range(args.trials) if args.number is None else [args.number]
    for variant in sorted({variant_of(kind, number) for number in numbers for kind in kinds}):
        chaos.reference(variant)
        print(f"{variant}: {chaos.paces[variant]}", flush=True)

    def one(trial: tuple[int, str]) -> Outcome:
        number, kind = trial
        chance = random.Random(f"{args.seed} {kind} {number}")
        outcome = chaos.trial(f"{kind}-{number}", kills_of(kind, chance), chance, variant_of(kind, number))
        again = f"--kinds {kind} --number {number} --seed {args.seed}"
        report(outcome, f"kept in {folder}; again: python -m tests.train.chaos {again}")
        return outcome

    outcomes: list[Outcome] = []
    todo = [(number, kind) for number in numbers for kind in kinds]
    with ThreadPoolExecutor(args.jobs) as pool:
        while todo:
            new = list(pool.map(one, todo))
            outcomes += new
            # A trial whose kills all came too late shows nothing, so another one is made in its place.
            missed = [trial for trial, outcome in zip(todo, new, strict=True) if not outcome.hit]
            todo = [(number + len(numbers), kind) for number, kind in missed if number < 4 * len(numbers)]
    Console().print(summary(outcomes, kinds))
    failed = any(outcome.problems for outcome in outcomes)
    for kind in kinds:
        if sum(outcome.hit for outcome in outcomes if outcome.kind == kind) < len(numbers):
            print(f"{kind}: fewer than {len(numbers)} trials had a kill at its moment")
            failed = True
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


def variant_of(kind: str, number: int) -> str:
    """Of four trials two have parts of the same samples on their ranks, one has pipeline stages, one other
    samples.
    """
    return "eval" if kind == "eval" else ("ring", "pp", "ring", "dp_shard")[number % 4]


def report(outcome: Outcome, where: str) -> None:
    """A line for a trial, and what is wrong with it."""
    kills = "; ".join(
        kill.what
        + ("" if kill.hit else " (missed)")
        + ("" if kill.seconds is None else f", again after {kill.seconds:.1f} s")
        for kill in outcome.kills
    )
    verdict = "DIFFERS" if outcome.problems else "equal"
    resumed = ", ".join(map(str, outcome.resumed))
    print(f"{outcome.name}, {outcome.variant}, {outcome.seconds:.0f} s: {kills}; from {resumed}: {verdict}")
    for problem in outcome.problems:
        print(f"    {problem}")
    if outcome.problems:
        print(f"    {where}")
    sys.stdout.flush()


def summary(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> Table:
    """One row for each kind."""
    table = Table(
        "kind",
        "trials",
        "with a hit",
        "kills",
        "at their moment",
        "resumed from",
        "restart s",
        "bitwise equal",
    )
    for kind in kinds:
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        kills = [kill for outcome in of_kind for kill in outcome.kills]
        waits = [kill.seconds for kill in kills if kill.seconds is not None]
        steps = Counter(step for outcome in of_kind for step in outcome.resumed)
        equal = sum(not outcome.problems for outcome in of_kind)
        table.add_row(
            kind,
            str(len(of_kind)),
            str(sum(outcome.hit for outcome in of_kind)),
            str(len(kills)),
            str(sum(kill.hit for kill in kills)),
            " ".join(f"{step}×{count}" for step, count in sorted(steps.items())),
            f"{statistics.median(waits):.1f}, at most {max(waits):.1f}" if waits else "",
            "yes" if equal == len(of_kind) else f"{equal} of {len(of_kind)}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
