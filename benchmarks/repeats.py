"""Whether a ring's ranks give the same bits every time on a GPU, where kernels run side by side.

`python benchmarks/repeats.py` runs the forward of every rank many times, without waiting for the GPU and
with freed memory of the main stream written over in between, and compares out and LSE with those of kernels
one after the other. What differs is a race. It also compares the sums over blocks, which Triton makes on a
GPU, with plain maths, and exits with 1 if anything is off. (Gradients are left out: kernels may add up dq
in any order.)
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import torch
from ring_blocks import Rank, kernels, packed_lengths
from torch import Tensor

from seqbraid.layout import SequenceLayout
from seqbraid.ops import streams
from seqbraid.ops.merge import add_rows, merge_rows

ROWS = 32768


def sums_off() -> int:
    """How many sums over blocks differ from plain maths by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    off = 0
    for rows in (slice(3, 3 + 777), torch.randperm(1000, generator=generator)[:777]):
        for before in (torch.bfloat16, torch.float32):
            for after in (torch.bfloat16, torch.float32):
                out = torch.randn(1000, 3, 128, generator=generator).to(before)
                part = torch.randn(777, 3, 128, generator=generator).bfloat16()
                lse, part_lse = (torch.randn(3, n, generator=generator) for n in (1000, 777))
                found = []
                for device in ("cuda", "cpu"):
                    here = rows if isinstance(rows, slice) else rows.to(device)
                    o, p, old, new = (x.to(device, copy=True) for x in (out, part, lse, part_lse))
                    merged, added = (torch.zeros_like(o, dtype=after) for _ in range(2))
                    add_rows(o, here, p, added)
                    merge_rows(o, old, here, p, new, merged)
                    found.append([x.cpu().float() for x in (merged, added, old)])
                limit = 2**-6 if after == torch.bfloat16 else 1e-5
                off += sum(float((a - b).abs().max()) > limit for a, b in zip(*found, strict=True))
    return off


def write_over_freed_memory() -> None:
    for _ in range(3):
        torch.full((1 << 24,), torch.nan, device="cuda")


def runs_off(lengths: list[int], policy: str, repeats: int) -> int:
    """How many runs of a rank of 8 differ from the one whose kernels ran one after the other."""
    torch.manual_seed(0)
    row = [torch.randn(sum(lengths), h, 128, device="cuda", dtype=torch.bfloat16) for h in (16, 4, 4, 16)]
    layout = SequenceLayout(lengths, ring=8, policy=policy)
    ranks = [Rank(layout, rank, row) for rank in range(8)]

    def results() -> list[list[Tensor]]:
        found = []
        for rank in ranks:
            rank.forward()
            found.append([rank.out.clone(), rank.lse.clone()])
            write_over_freed_memory()
        return found

    with patch.object(streams, "take_turns", lambda *_: False):
        wanted = results()
    return sum(
        not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for _ in range(repeats)
        for found, expected in zip(results(), wanted, strict=True)
    )


def main() -> None:
    """Print what is off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this check needs a GPU")
    total = sums_off()
    print(f"sums over blocks: {total} off")
    for choice in ("chosen", "torch", "varlen"):
        for name, lengths in (("one sequence", [ROWS]), ("packed row", packed_lengths(ROWS, 1))):
            for policy in ("zigzag", "balanced"):
                with kernels(choice):
                    off = runs_off(lengths, policy, args.repeats)
                total += off
                print(f"{choice}, {name}, {policy}: {off} of {8 * args.repeats} runs off", flush=True)
    raise SystemExit(1 if total else 0)


if __name__ == "__main__":
    main()
