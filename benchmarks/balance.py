"""How level the three policies are on heavy-tailed rows, and how much of a row they leave in split sequences.

`python benchmarks/balance.py` packs lognormal lengths (median 1 K, sigma 1.3, cap 32 K) into 64 rows
of 64 K tokens.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from seqbraid.layout import SequenceLayout
from seqbraid.layout.packing import pack_rows


def lognormal_lengths(count: int, seed: int, cap: int = 32768) -> np.ndarray:
    """Lengths of a heavy-tailed corpus: median 1 K, sigma 1.3."""
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(np.log(1024), 1.3, count)).astype(np.int64), 1, cap)


def packed_rows(num_rows: int, row_tokens: int, seed: int) -> list[list[int]]:
    """The first rows of a best-fit packing of enough samples, drawn evenly from all its rows."""
    lengths = lognormal_lengths(num_rows * row_tokens // 800, seed)
    rows = pack_rows(lengths, row_tokens)
    chosen = np.random.default_rng(seed).choice(len(rows), num_rows, replace=False)
    return [lengths[rows[i]].tolist() for i in chosen]


def cost_ratio(layout: SequenceLayout) -> float:
    """Attention cost of the dearest rank over the mean."""
    costs = [layout.attention_cost(rank) for rank in range(layout.num_ranks)]
    return max(costs) * len(costs) / sum(costs)


def main() -> None:
    """Print one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--row-tokens", type=int, default=65536)
    parser.add_argument("--ring", type=int, default=8)
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = packed_rows(args.rows, args.row_tokens, args.seed)
    print(f"{args.rows} rows of {args.row_tokens} tokens, ring={args.ring}, ulysses={args.ulysses}")
    for policy in ("balanced", "zigzag", "contiguous"):
        start = time.perf_counter()
        layouts = [SequenceLayout(row, args.ring, args.ulysses, policy) for row in rows]
        seconds = time.perf_counter() - start
        ratios = [cost_ratio(layout) for layout in layouts]
        tokens = sum(layout.num_tokens for layout in layouts)
        physical = sum(layout.num_local_tokens * layout.num_ranks for layout in layouts)
        split = sum(layout.num_split_tokens for layout in layouts)
        print(
            f"{policy:>10}: attention cost max/mean {np.mean(ratios):.3f} on average, {max(ratios):.3f} "
            f"worst; {100 * split / tokens:.1f} % of tokens in split sequences; "
            f"{100 * (physical / tokens - 1):.2f} % padding; {1e3 * seconds / len(rows):.1f} ms a row"
        )


if __name__ == "__main__":
    main()
