"""What cutting a row into a ring's blocks costs on a GPU: every rank's compute, replayed one after the other
on one device.

`python benchmarks/ring_blocks.py` takes one sequence of 128 K tokens and a packed row of 128 K, P = 4 and 8,
and prints for the slowest rank `GPU time of one undivided call / (P × time of the rank)`, forward and
backward, for the kernels that the library chooses and for others, and how far the joined result is from the
undivided call. Communication is not in it. Where FlashAttention-4 or -3 is installed, it is what is chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqbraid.layout import SequenceLayout
from seqbraid.ops import blocks
from seqbraid.ops.attention import block_attention, block_attention_backward, merge_block_attention
from seqbraid.ops.flash_impl import TORCH, flash_impl, use_flash_attention
from seqbraid.sequence_parallel.context import StepContext
from seqbraid.sequence_parallel.ring_plan import Message, RingPlan, RingRound
from seqbraid.verify.gpu_time import gpu_time

STEADY_S = 0.3
"""What is short runs faster at first than after a while, so everything is timed for this long."""


class Times(NamedTuple):
    """Milliseconds."""

    forward: float
    backward: float


def _sent_to(layout: SequenceLayout, source: int, target: int) -> list[Message]:
    rounds = RingPlan.of(layout, source).rounds
    return [message for round_ in rounds for message in round_.sent if message.rank == target]


class Rank:
    """One rank's blocks: its own rows, and the keys it would receive, taken from the row directly."""

    def __init__(self, layout: SequenceLayout, rank: int, row: list[Tensor]) -> None:
        self.layout, self.rank = layout, rank
        self.q, self.k, self.v, self.dout = (layout.shard(x, rank) for x in row)
        plan = StepContext(layout, rank).ring_plan(None, shared=True, whole=True)
        self.local, self.shared = plan.local, slice(plan.num_shared)
        self.steps = [round_ for round_ in plan.rounds if round_.num_received]
        self.received = [self._received(round_, row) for round_ in self.steps]
        self.scale = self.q.shape[-1] ** -0.5
        self.sum_dtype = torch.float32 if len(self.steps) > 1 else self.q.dtype

    def _received(self, round_: RingRound, row: list[Tensor]) -> tuple[Tensor, Tensor]:
        parts = []
        for message in round_.received:
            (sent,) = _sent_to(self.layout, message.rank, self.rank)
            k, v = (self.layout.shard(x, message.rank) for x in row[1:3])
            parts.append([torch.cat([x[start:stop] for start, stop in sent.rows]) for x in (k, v)])
        k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        order = round_.sorting
        return (k, v) if order is None else (k[order.cuda()], v[order.cuda()])

    def forward(self) -> None:
        self.out, self.lse = block_attention(self.q, self.k, self.v, self.local, self.scale)
        if self.steps:
            shared = self.shared
            wide, lse = self.out[shared].to(self.sum_dtype), self.lse[:, shared].contiguous()
            for step, (k, v) in zip(self.steps, self.received, strict=True):
                merge_block_attention(wide, lse, self.q[shared], k, v, step.blocks, self.scale)
            self.lse[:, shared] = lse
            if len(self.steps) > 1:
                self.out[shared] = wide

    def backward(self) -> None:
        arguments = (self.dout, self.q, self.k, self.v, self.out, self.lse, self.local, self.scale)
        self.dq, self.dk, self.dv = block_attention_backward(*arguments)
        self.sent = []
        if self.steps:
            shared = self.shared
            dq = self.dq[shared].to(self.sum_dtype)
            self.shared_dkv = [self.dk[shared].float(), self.dv[shared].float()]
            queries = (self.dout[shared], self.q[shared])
            results = (self.out[shared], self.lse[:, shared].contiguous())
            for step, (k, v) in zip(self.steps, self.received, strict=True):
                _, *theirs = block_attention_backward(*queries, k, v, *results, step.blocks, self.scale, dq)
                self.sent.append(theirs)
            if len(self.steps) > 1:
                self.dq[shared] = dq


def time_rank(rank: Rank) -> Times:
    """Forward and backward of all of a rank's blocks, merging included."""
    return Times(gpu_time(rank.forward, STEADY_S), gpu_time(rank.backward, STEADY_S))


def join(layout: SequenceLayout, ranks: list[Rank]) -> list[Tensor]:
    """Out and gradients of the row, the gradients of keys brought home."""
    for rank in ranks:
        for round_, theirs in zip(rank.steps, rank.sent, strict=True):
            back = round_.unsorting
            theirs = [x if back is None else x[back.cuda()] for x in theirs]
            first = 0
            for message in round_.received:
                (sent,) = _sent_to(layout, message.rank, rank.rank)
                begin = first
                for start, stop in sent.rows:
                    for total, part in zip(ranks[message.rank].shared_dkv, theirs, strict=True):
                        total[start:stop] += part[begin : begin + stop - start]
                    begin += stop - start
                first += message.num_rows
    for rank in ranks:
        if rank.steps:
            rank.dk[rank.shared], rank.dv[rank.shared] = rank.shared_dkv
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
    use_flash_attention(None if name == "chosen" else "torch")
    try:
        yield
    finally:
        blocks.ANY_PAIRS, blocks.ROUND_PAIRS = before
        use_flash_attention(None)


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
    chosen = flash_impl(row[0], row[1])
    print(f"\n{name}: {len(lengths)} sequences, {sum(lengths)} tokens; chosen: {chosen.name}")
    choices = ["chosen", *(["torch"] if chosen is not TORCH else []), "varlen"]
    singles: dict[str, Times] = {}
    undivided = None
    for choice in [*choices, *(["dense"] if len(lengths) == 1 else [])]:
        with kernels(choice):
            single = Rank(SequenceLayout(lengths), 0, row)
            singles[choice] = time_rank(single)
        t = singles[choice]
        print(
            f"  undivided, {choice:>6}: forward {t.forward:8.2f} ms ({flops / t.forward / 1e9:4.0f} "
            f"TFLOP/s), backward {t.backward:8.2f} ms ({2.5 * flops / t.backward / 1e9:4.0f} TFLOP/s)"
        )
        if choice == "chosen":
            undivided = join(single.layout, [single])
        del single
    assert undivided is not None
    for size in args.ranks:
        for policy in args.policies:
            layout = SequenceLayout(lengths, ring=size, policy=policy)
            slowest: dict[str, Times] = {}
            for choice in choices:
                with kernels(choice):
                    ranks = [Rank(layout, rank, row) for rank in range(size)]
                    times = [time_rank(rank) for rank in ranks]
                slowest[choice] = Times(max(t.forward for t in times), max(t.backward for t in times))
                if choice == "chosen":
                    errors = [relative(a, b) for a, b in zip(join(layout, ranks), undivided, strict=True)]
                del ranks
            for choice, t in slowest.items():
                s = singles[choice]
                both = (s.forward + s.backward) / (size * (t.forward + t.backward))
                print(
                    f"  P={size} {policy:>8}, {choice:>6}: slowest rank {t.forward:7.2f} + "
                    f"{t.backward:7.2f} ms; efficiency forward {100 * s.forward / (size * t.forward):5.1f} "
                    f"%, backward {100 * s.backward / (size * t.backward):5.1f} %, both {100 * both:5.1f} %"
                )
            ratios = [
                f"{sum(slowest[choice]) / sum(slowest['chosen']):.2f} × as fast as {choice}"
                for choice in choices[1:]
            ]
            print(
                f"      chosen blocks {', '.join(ratios)}; against the undivided call: "
                + ", ".join(f"{n} {e:.1e}" for n, e in zip(("out", "dq", "dk", "dv"), errors, strict=True))
            )


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


def main() -> None:
    """Print all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[4, 8])
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
        report("packed row", packed_lengths(args.tokens), args)


if __name__ == "__main__":
    main()
