"""Time and fill of `pack_rows` on a long-tailed corpus, beside TRL's best-fit-decreasing on the same lengths.

python benchmarks/packing.py [--samples N] [--row-tokens N] [--no-trl]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqbraid.layout.packing import CostModel, level_rows, pack_rows
from seqbraid.layout.streaming import StreamingPacker

# Installed without dependencies, beside the torch, transformers and numpy that are here already.
TRL_AND_ITS_IMPORTS = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "python-dateutil",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash",
)
NUM_RANKS = 8
ROWS_PER_STEP = 32
NUM_STREAMED = 100_000


def corpus(num_samples: int, row_tokens: int) -> NDArray[np.int64]:
    """Lognormal lengths with median 1 K and sigma 1.3, clipped to a row."""
    lengths = np.random.default_rng(0).lognormal(np.log(1000), 1.3, num_samples)
    return np.clip(lengths, 1, row_tokens).astype(np.int64)


def timed(function: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    """The last result and the least seconds of a few calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def waiting_share(costs: NDArray[np.float64], level: bool) -> float:
    """Share of the work of an average rank that the busiest one of each step has beyond it."""
    steps = costs[: len(costs) // ROWS_PER_STEP * ROWS_PER_STEP].reshape(-1, ROWS_PER_STEP)
    as_they_come = [list(range(rank, ROWS_PER_STEP, NUM_RANKS)) for rank in range(NUM_RANKS)]
    busiest = 0.0
    for step in steps:
        busiest += max(step[rows].sum() for rows in (level_rows(step, NUM_RANKS) if level else as_they_come))
    return float(busiest * NUM_RANKS / steps.sum() - 1)


class LengthsOnly:
    """Stands in for `pyarrow.compute` inside TRL, so that it assigns rows but moves no token.

    The token column holds nulls only, no sample is empty and none is over-long. So filtering and slicing
    leave it as it is, and reordering gives an equal column. What is left is the work of `pack_rows`.
    """

    def __getattr__(self, name: str) -> Any:
        import pyarrow.compute

        return getattr(pyarrow.compute, name)

    def filter(self, column: Any, mask: Any) -> Any:
        return column

    def list_slice(self, column: Any, start: int, stop: int) -> Any:
        return column

    def take(self, table: Any, indices: list[int]) -> Any:
        taken = table["seq_lengths"].take(np.asarray(indices)).combine_chunks()
        return table.set_column(table.schema.get_field_index("seq_lengths"), "seq_lengths", taken)


def trl_rows(lengths: NDArray[np.int64], row_tokens: int, repeats: int, target: str) -> tuple[int, float]:
    """Number of rows and seconds of TRL's own code, installed into the folder `target`."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
    subprocess.run([*install, *TRL_AND_ITS_IMPORTS], check=True)
    sys.path.append(target)
    import pyarrow as pa
    from trl import data_utils

    data_utils.pc = LengthsOnly()
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, pa.nulls(offsets[-1]))})
    packed, seconds = timed(lambda: data_utils._pack_bfd(table, row_tokens), repeats)
    placed = packed["seq_lengths"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(np.sort(placed), np.sort(lengths)), "TRL packed other samples than it was given"
    return len(packed), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--row-tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3, help="the quickest of so many runs counts")
    parser.add_argument("--no-trl", action="store_true", help="do not install and time TRL")
    options = parser.parse_args()
    row_tokens = options.row_tokens

    lengths = corpus(options.samples, row_tokens)
    print(f"{len(lengths):,} samples, {lengths.sum():,} tokens, rows of {row_tokens:,}")

    rows, seconds = timed(lambda: pack_rows(lengths, row_tokens), options.repeats)
    print(f"pack_rows     {seconds:8.3f} s  {len(rows):,} rows, fill {rows.fill:.4%}")

    cost = CostModel()
    costs = np.random.default_rng(0).permutation([cost.of_lengths(lengths[row].tolist()) for row in rows])
    level_share, level_seconds = timed(lambda: waiting_share(costs, level=True), options.repeats)
    print(
        f"level_rows    {level_seconds:8.3f} s  in steps of {ROWS_PER_STEP} rows {NUM_RANKS} ranks wait "
        f"{level_share:.2%} of their work (rows as they come: {waiting_share(costs, level=False):.1%})"
    )

    stream = lengths[:NUM_STREAMED].tolist()
    num_streamed_rows, stream_seconds = timed(
        lambda: sum(1 for _ in StreamingPacker(row_tokens, length=int).pack(stream)), options.repeats
    )
    stream_fill = sum(stream) / (num_streamed_rows * row_tokens)
    print(f"streaming     {stream_seconds:8.3f} s  first {len(stream):,} samples, fill {stream_fill:.4%}")

    if not options.no_trl:
        with tempfile.TemporaryDirectory() as target:
            num_trl_rows, trl_seconds = trl_rows(lengths, row_tokens, options.repeats, target)
        trl_fill = lengths.sum() / (num_trl_rows * row_tokens)
        print(
            f"TRL 1.16 bfd  {trl_seconds:8.3f} s  {num_trl_rows:,} rows, fill {trl_fill:.4%} "
            "(trl.data_utils._pack_bfd on all lengths at once, its copies of the tokens not counted)"
        )
        ratio = seconds / trl_seconds
        print(f"pack_rows / TRL = {ratio:.5f}: {1 / ratio:.0f} × as fast")


if __name__ == "__main__":
    main()
