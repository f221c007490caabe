"""What a step costs on the main thread outside of forward and backward: packing, plans, agreeing, moving.

`python -m benchmarks.step_overhead` trains on nothing: a loader of lengths with a heavy tail gives steps of
several micro-batches, each a row of 64 K tokens, packed and planned for `ring=8`; a tiny model agrees on
them. It prints milliseconds a micro-batch, median over the steps, for the way of `seqbraid train` (plans in
workers, rows in a thread), and for packing on the main thread what the workers encoded.

The rank's part of an agreement is timed (its checks and the group of one), not the wait for other ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from seqbraid import Mesh, parallelize
from seqbraid.data.stream.loader import Loader, Reading
from seqbraid.data.stream.plan import RowOptions
from seqbraid.data.stream.workers import WorkerOptions
from seqbraid.models.step import Step, agree_on
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.batches import StepMaker


@dataclass(frozen=True)
class RandomLengths:
    """Records that are lengths with a heavy tail."""

    count: int
    longest: int
    fingerprint: str = "random lengths"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        drawn = np.random.default_rng(index).lognormal(7.5, 1.3)
        return int(min(self.longest, max(8, drawn)))

    def where(self, index: int) -> str:
        """A name for messages."""
        return f"record {index}"


class RandomIds:
    """An encoder of lengths; like one of media, it has no text that could be kept."""

    def length(self, record: int) -> int:
        """Tokens of a record."""
        return record

    def encode(self, record: int) -> Mapping[str, Any]:
        """Random ids, all of them labels."""
        ids = torch.from_numpy(np.random.default_rng(record).integers(0, 97, record))
        return {"input_ids": ids, "labels": ids.clone()}


def times(args: argparse.Namespace, ahead: bool) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each step: waiting for what is prepared, agreeing, moving to the device."""
    far = Mesh(ring=args.ring, rank=1, world_size=args.ring)
    model = parallelize(tiny_model("qwen3_5"), Mesh())
    make = StepMaker(model.model.config, far, "balanced")
    loader = Loader(
        Reading(RandomLengths(100_000, args.tokens), RandomIds),  # type: ignore[arg-type]
        Mesh(),
        RowOptions(args.tokens, args.micro_batches, epochs=1),
        WorkerOptions(args.workers),
        make if ahead else None,
    )
    waits, agreements, moves = [], [], []
    # The ranks of a ring would agree on this step; here the mesh is one process, and only its checks differ.
    settings = partial(agree_on, model)
    here = StepMaker(model.model.config, Mesh(), "balanced")
    stand_in = here([[{"input_ids": [1, 2]}]] * args.micro_batches)
    for number in range(args.steps + 2):
        begin = time.perf_counter()
        data = next(loader)
        step: Step = data.prepared if ahead else make(data.rows)
        got = time.perf_counter()
        settings(stand_in)
        agreed = time.perf_counter()
        for batch in step.batches:
            batch.to(args.device)
        moved = time.perf_counter()
        if number >= 2:  # the first ones wait for the workers to start
            waits.append(got - begin)
            agreements.append(agreed - got)
            moves.append(moved - agreed)
        time.sleep(args.step_seconds)  # forward and backward
    loader.close()
    return waits, agreements, moves


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536, help="of a row")
    parser.add_argument("--ring", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--step-seconds", type=float, default=2.0, help="that forward and backward would take"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"{args.micro_batches} micro-batches of {args.tokens} tokens, plans for ring={args.ring}")
    for ahead in (True, False):
        wait, agree, move = (
            1e3 * statistics.median(seconds) / args.micro_batches for seconds in times(args, ahead)
        )
        way = "prepared ahead" if ahead else "on the main thread"
        print(
            f"  {way:>18}: {wait + agree + move:7.2f} ms a micro-batch "
            f"(the prepared step {wait:.2f}, agreeing {agree:.2f}, moving {move:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
