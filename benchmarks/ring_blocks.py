"""What cutting a row into a ring's blocks costs on a GPU: every rank's compute, replayed one after the other
on one device.

`python -m benchmarks.ring_blocks` takes one sequence of 128 K tokens and packed rows of 128 K, P = 4 and 8,
and prints for the slowest rank `GPU time of one undivided call / (P × time of the rank)` (the slowest forward
and the slowest backward, if they are not the same rank's), for the kernels that the library chooses and for
others, and how far the joined result is from the undivided call. Communication is not in it. Where
FlashAttention-4 or -3 is installed, it is what is chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_time import gpu_times
from seqbraid.layout import SequenceLayout
from seqbraid.ops import blocks
from seqbraid.ops.flash_impl import TORCH, flash_impl
from seqbraid.ops.kernels import DEFAULT, KernelOptions, Kernels
from seqbraid.sequence_parallel.plans import RowPlans
from seqbraid.sequence_parallel.ring import Keys, RingGradients, ring_backward, ring_forward
from seqbraid.sequence_parallel.ring_plan import RingMessage, RingPlan, RingRound

TURN_S, TURNS = 0.1, 5
"""Everything that is compared is replayed in turns, so long and so often: at its power limit a GPU changes
its clock all the time."""


class Times(NamedTuple):
    """Milliseconds."""

    forward: float
    backward: float


def _sent_to(layout: SequenceLayout, source: int, target: int) -> list[RingMessage]:
    rounds = RingPlan.of(layout, source, query_heads=1).rounds  # what is sent depends on them only in when
    return [message for round_ in rounds for message in round_.sent if message.rank == target]


class Here(Keys):
    """Keys that are here already."""

    def __init__(self, received: list[tuple[Tensor, Tensor]], home: RingGradients | None = None) -> None:
        self.received = iter(received)
        self.home = home

    def fetch(self) -> None:
        """Nothing to fetch."""

    def take(self) -> tuple[Tensor, Tensor]:
        """Those of the next round."""
        return next(self.received)

    def gradients(self) -> RingGradients:
        """Kept here."""
        assert self.home is not None
        return self.home


class Kept(RingGradients):
    """Gradients of other ranks' keys, kept instead of sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Tensor, Tensor]] = []

    def send(self, round_: RingRound, dk: Tensor, dv: Tensor) -> None:
        """Keep a round's."""
        self.sent.append((dk, dv))

    def all_in(self) -> tuple[Tensor, Tensor]:
        """Ours, to which `join` adds."""
        return self.dk, self.dv


class Wish:
    """What `kernels` asked for."""

    kernels = DEFAULT


class Rank:
    """One rank's blocks: its own rows, and the keys it would receive, taken from the row directly."""

    def __init__(self, layout: SequenceLayout, rank: int, row: list[Tensor]) -> None:
        self.layout, self.rank = layout, rank
        self.q, self.k, self.v, self.dout = (layout.shard(x, rank) for x in row)
        ratio = self.q.shape[1] / self.k.shape[1]
        plan = RowPlans(layout, rank).ring(None, shared=True, whole=True, query_heads=ratio)
        self.plan = replace(plan, rounds=tuple(round_ for round_ in plan.rounds if round_.num_received))
        self.received = [self._received(round_, row) for round_ in self.plan.rounds]
        self.scale = self.q.shape[-1] ** -0.5

    def _received(self, round_: RingRound, row: list[Tensor]) -> tuple[Tensor, Tensor]:
        parts = []
        for message in round_.received:
            (sent,) = _sent_to(self.layout, message.rank, self.rank)
            k, v = (self.layout.shard(x, message.rank) for x in row[1:3])
            parts.append([torch.cat([x[start:stop] for start, stop in sent.rows]) for x in (k, v)])
        k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        return round_.sorted(k), round_.sorted(v)

    def forward(self) -> None:
        keys = Here(self.received)
        self.out, self.lse = ring_forward(self.q, self.k, self.v, self.plan, self.scale, keys, Wish.kernels)

    def backward(self) -> None:
        self.home = Kept()
        tensors = (self.dout, self.q, self.k, self.v, self.out, self.lse)
        self.dq, self.dk, self.dv = ring_backward(
            *tensors, self.plan, self.scale, Here(self.received, self.home), Wish.kernels
        )


def time_ranks(ranks: list[Rank]) -> list[Times]:
    """Forward and backward of all of each rank's blocks, merging included."""
    found = gpu_times([call for rank in ranks for call in (rank.forward, rank.backward)], TURNS, TURN_S)
    return [Times(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


def join(layout: SequenceLayout, ranks: list[Rank]) -> list[Tensor]:
    """Out and gradients of the row, the gradients of keys brought home."""
    for rank in ranks:
        for round_, theirs in zip(rank.plan.rounds, rank.home.sent, strict=True):
            parts = [round_.unsorted(x) for x in theirs]
            first = 0
            for message in round_.received:
                (sent,) = _sent_to(layout, message.rank, rank.rank)
                home = ranks[message.rank].home
                begin = first
                for start, stop in sent.rows:
                    for total, part in zip((home.dk, home.dv), parts, strict=True):
                        total[start:stop] += part[begin : begin + stop - start]
                    begin += stop - start
                first += message.num_rows
    for rank in ranks:
        if rank.plan.rounds:
            shared = slice(rank.plan.num_shared)
            rank.dk[shared], rank.dv[shared] = rank.home.all_in()
    return [layout.unshard([getattr(rank, name) for rank in ranks]) for name in ("out", "dq", "dk", "dv")]


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """`chosen`: as the library chooses; `torch`: as it chooses of what torch has; `varlen`: FlashAttention-2
    for every block; `dense`: cuDNN for every block.
    """
    before = blocks.ANY_PAIRS, blocks.ROUND_PAIRS
    never = 1 << 62
    pairs = {"varlen": (never, never), "dense": (0, 0)}
    blocks.ANY_PAIRS, blocks.ROUND_PAIRS = pairs.get(name, before)
    Wish.kernels = DEFAULT if name == "chosen" else Kernels(KernelOptions(attention="torch"))
    try:
        yield
    finally:
        blocks.ANY_PAIRS, blocks.ROUND_PAIRS = before
        Wish.kernels = DEFAULT


def packed_lengths(tokens: int, seed: int = 0) -> list[int]:
    """A heavy-tailed row: median 1 K, sigma 1.3, cap 32 K, filled to the last token."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(np.clip(np.exp(rng.normal(np.log(1024), 1.3)), 1, 32768))))
    return lengths


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def report(name: str, lengths: list[int], args: argparse.Namespace) -> None:
    """All ranks of all rings for one row."""
    torch.manual_seed(0)
    shapes = [(args.heads, args.head_dim), (args.kv_heads, args.head_dim)]
    shapes = [shapes[0], shapes[1], shapes[1], shapes[0]]
    row = [torch.randn(sum(lengths), *s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    flops = 4 * pairs * args.heads * args.head_dim
    chosen = flash_impl(row[0], row[1], windowed=False, kernels=DEFAULT)
    print(f"\n{name}: {len(lengths)} sequences, {sum(lengths)} tokens; chosen: {chosen.name}")
    choices = args.kernels or ["chosen", *(["torch"] if chosen is not TORCH else []), "varlen"]
    slowest: dict[tuple[str, int, str], float] = {}
    undivided = None
    for choice in choices:
        with kernels(choice):
            alone = Rank(SequenceLayout(lengths), 0, row)
            cases = {
                (size, policy): _ranks(SequenceLayout(lengths, ring=size, policy=policy), row)
                for size in args.ranks
                for policy in args.policies
            }
            single, *times = time_ranks([alone, *(rank for ranks in cases.values() for rank in ranks)])
        if undivided is None:
            undivided = join(alone.layout, [alone])
        speeds = flops / single.forward / 1e9, 2.5 * flops / single.backward / 1e9
        print(
            f"  {choice:>6}, undivided: {single.forward:.2f} + {single.backward:.2f} ms "
            f"({speeds[0]:.0f} and {speeds[1]:.0f} TFLOP/s)"
        )
        for (size, policy), ranks in cases.items():
            mine, times = times[:size], times[size:]
            worst = Times(max(t.forward for t in mine), max(t.backward for t in mine))
            mean = sum(map(sum, mine)) / size
            slowest[choice, size, policy] = sum(worst)
            errors = [relative(a, b) for a, b in zip(join(ranks[0].layout, ranks), undivided, strict=True)]
            ratio = slowest[choice, size, policy] / slowest[choices[0], size, policy]
            efficiency = sum(single) / (size * sum(worst))
            print(
                f"  {choice:>6}, P={size} {policy}: slowest rank {worst.forward:.2f} + "
                f"{worst.backward:.2f} ms ({ratio:.2f} × {choices[0]}), efficiency {100 * efficiency:.1f} % "
                f"(forward {100 * single.forward / (size * worst.forward):.1f}, backward "
                f"{100 * single.backward / (size * worst.backward):.1f}; all ranks "
                f"{100 * sum(single) / (size * mean):.1f}); off by {max(errors):.1e} at most",
                flush=True,
            )
        del alone, cases, ranks


def _ranks(layout: SequenceLayout, row: list[Tensor]) -> list[Rank]:
    return [Rank(layout, rank, row) for rank in range(layout.num_ranks)]


def first_calls(args: argparse.Namespace) -> None:
    """What a shape that was never seen costs in its first call, kernel by kernel."""
    for choice in ("chosen", "dense", "varlen"):
        with kernels(choice):
            costs = []
            for length in (4000, 4001, 4002, 4003, 4004, 4005):
                shapes = [(args.heads, args.head_dim), (args.kv_heads, args.head_dim)]
                shapes = [shapes[0], shapes[1], shapes[1], shapes[0]]
                row = [torch.randn(length, *s, device="cuda", dtype=torch.bfloat16) for s in shapes]
                rank = Rank(SequenceLayout([length]), 0, row)
                found = []
                for _ in range(2):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    rank.forward()
                    rank.backward()
                    torch.cuda.synchronize()
                    found.append(1e3 * (time.perf_counter() - start))
                costs.append(found)
            print(
                f"{choice}: first and second call of new lengths, ms:",
                [f"{a:.1f} / {b:.1f}" for a, b in costs],
            )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Print all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=_numbers, default=[4, 8])
    parser.add_argument("--seeds", type=_numbers, default=[0], help="of the packed rows")
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="of chosen, torch, varlen")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["zigzag", "balanced"])
    parser.add_argument(
        "--rows", default="first,one,packed", help="which of first (calls), one and packed to run"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    print(
        torch.cuda.get_device_name(),
        torch.__version__,
        f"{args.heads}/{args.kv_heads} heads of {args.head_dim}",
    )
    if "first" in args.rows:
        first_calls(args)
    if "one" in args.rows:
        report("one sequence", [args.tokens], args)
    if "packed" in args.rows:
        for seed in args.seeds:
            report(f"packed row {seed}", packed_lengths(args.tokens, seed), args)


if __name__ == "__main__":
    main()
