"""Seconds and memory of `seqbraid inspect`, and of a run until its first step, on a file of a million lines.

`python benchmarks/big_file.py [--lines N] [--folder DIR]` writes JSON lines, unless they are there, reads
them once and prints how long that and each command takes. There are no data workers, so that memory and
CPU are all that the command takes; CPU is of its whole life.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORDS = ["the", "answer", "is", "a", "small", "red", "square", "on", "white", "ground", "42", "what"]

BLOCK = 2**24
SMALL = 2000
"""Records of the file whose time is that of the start-up."""


def write_file(path: Path, lines: int, letters: int, seed: int = 0) -> None:
    """Questions and answers of so many letters, by the median."""
    rng = np.random.default_rng(seed)
    text = " ".join(rng.choice(WORDS, 30 * letters))
    with path.open("w") as file:
        for number in range(lines):
            length = int(np.clip(letters * rng.lognormal(0.0, 0.9), 20, 20 * letters))
            start = int(rng.integers(0, len(text) - length))
            turns = [("user", f"What is {number}?"), ("assistant", text[start : start + length])]
            file.write(
                json.dumps({"messages": [{"role": who, "content": said} for who, said in turns]}) + "\n"
            )


def read_once(path: Path) -> float:
    """Seconds to read a file, which is then in memory as far as that goes."""
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK):
            pass
    return time.perf_counter() - start


class Took(NamedTuple):
    """What a command took."""

    began: float
    seconds: float
    cpu: float
    gib: float

    def __str__(self) -> str:
        return f"{self.seconds:6.1f} s, {self.cpu:5.1f} s of CPU, {self.gib:.2f} GiB"


def child(arguments: Sequence[str], cache: Path) -> Took:
    """Run a command."""
    began = time.time()
    pid = os.fork()
    if not pid:
        os.environ["XDG_CACHE_HOME"] = str(cache)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.execv(sys.executable, [sys.executable, "-m", "seqbraid", *arguments])
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"seqbraid {' '.join(arguments)} ended with status {status}")
    return Took(began, time.time() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def options(path: Path, out: Path, row_tokens: int) -> list[str]:
    """Of a run with a tiny model, whose own steps take no time worth naming."""
    return [
        "--model=tiny:llama", f"--out={out}", f"--data.train={path}", f"--data.row_tokens={row_tokens}",
        f"--train.batch_tokens={2 * row_tokens}", "--train.steps=1", "--precision=float32", "--log.sinks=[]",
        "--data.over_long=drop", "--data.workers=0",
    ]  # fmt: skip


def first_step(path: Path, folder: Path, name: str, row_tokens: int) -> Took:
    """A run, with the seconds until it has logged its first step."""
    out = folder / name
    took = child(["train", *options(path, out, row_tokens)], folder / "cache")
    log = (out / "log.jsonl").read_text().splitlines()
    first = next(record for record in map(json.loads, log) if "loss" in record)
    return took._replace(seconds=first["time"] - took.began)


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--letters", type=int, default=150, help="of an answer, by the median")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=2000, help="that inspect looks at")
    parser.add_argument(
        "--folder", type=Path, help="for the file, which stays there; by default a temporary one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as found:
        temporary = Path(found)
        folder = args.folder or temporary
        big, small = folder / f"{args.lines}x{args.letters}.jsonl", temporary / "small.jsonl"
        if not big.exists():
            write_file(big, args.lines, args.letters)
        write_file(small, min(SMALL, args.lines), args.letters)
        seconds = read_once(big)
        print(f"{args.lines:,} lines, {big.stat().st_size / 2**30:.2f} GiB, read once in {seconds:.2f} s")
        show = [f"--samples={args.samples}", *options(big, temporary / "seen", args.row_tokens)]
        cache = temporary / "cache"
        print(f"inspect, small file       {child(['inspect', *show, f'--data.train={small}'], cache)}")
        print(f"inspect                   {child(['inspect', *show], cache)}")
        for name, path in (("small file", small), ("first start", big), ("second start", big)):
            took = first_step(path, temporary, name.replace(" ", "_"), args.row_tokens)
            print(f"first step, {name:<13} {took}", flush=True)


if __name__ == "__main__":
    main()
