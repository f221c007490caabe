"""How level the ranks of a row are in encoding its images, and how long it takes to plan that.

`python benchmarks/media_balance.py` draws 64 images of 64 to 16 K patches (log-uniform) and shares them
out over 4 ranks: by cost, in turn, and to the rank that holds an image's first token. The encoder is
that of Qwen3-VL.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from seqbraid.layout import SequenceLayout
from seqbraid.sequence_parallel.media import MediaItem, MediaPlan, assign_items, encoder_cost

WIDTH, INTERMEDIATE = 1152, 4304
PATCHES_PER_TOKEN = 4
TEXT_TOKENS = 100
"""Behind each image."""


def row_of_images(num_images: int, per_sample: int, seed: int) -> tuple[list[int], list[MediaItem]]:
    """The lengths of the samples of a row, and their images."""
    rng = np.random.default_rng(seed)
    patches = np.exp(rng.uniform(np.log(64), np.log(16384), num_images))
    lengths: list[int] = []
    items: list[MediaItem] = []
    begin = 0
    for image, tokens in enumerate((patches / PATCHES_PER_TOKEN).astype(int).tolist()):
        sample, index = divmod(image, per_sample)
        cost = encoder_cost([tokens * PATCHES_PER_TOKEN], WIDTH, INTERMEDIATE)
        items.append(MediaItem("image", sample, index, ((begin, begin + tokens),), cost))
        if index == 0:
            lengths.append(0)
        lengths[-1] += tokens + TEXT_TOKENS
        begin += tokens + TEXT_TOKENS
    return lengths, items


def unevenness(items: list[MediaItem], encoders: list[int], num_ranks: int) -> float:
    """Encoder cost of the dearest rank over the mean."""
    loads = np.bincount(encoders, [item.cost for item in items], minlength=num_ranks)
    return float(loads.max() / loads.mean())


def first_owners(layout: SequenceLayout, items: list[MediaItem]) -> list[int]:
    """The rank that holds the first token of each image."""
    owner = np.empty(layout.num_tokens, np.int64)
    for rank in range(layout.num_ranks):
        index = layout.index(rank).numpy()
        owner[index[index >= 0]] = rank
    return [int(owner[item.tokens[0][0]]) for item in items]


def planning_seconds(layout: SequenceLayout, items: list[MediaItem], repeats: int = 20) -> float:
    """The least seconds of a rank's plan, the layout's own arithmetic left out."""
    layout.segments(0)
    seconds = []
    for repeat in range(repeats):
        start = time.perf_counter()
        MediaPlan.of(layout, items, repeat % layout.num_ranks)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Print one line per way of sharing out, and one per size of plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--per-sample", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=100)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"by cost": [], "in turn": [], "first token": []}
    for seed in range(args.rows):
        lengths, items = row_of_images(args.images, args.per_sample, seed)
        layout = SequenceLayout(lengths, ring=args.ranks)
        ways = {
            "by cost": assign_items([item.cost for item in items], args.ranks),
            "in turn": [image % args.ranks for image in range(len(items))],
            "first token": first_owners(layout, items),
        }
        for way, encoders in ways.items():
            found[way].append(unevenness(items, encoders, args.ranks))
    print(f"{args.rows} rows of {args.images} images on {args.ranks} ranks: encoder cost max/mean")
    for way, ratios in found.items():
        print(f"{way:>12}: {np.mean(ratios):.3f} on average, {max(ratios):.3f} worst")
    for images, ranks in ((args.images, args.ranks), (500, 64)):
        lengths, items = row_of_images(images, args.per_sample, seed=0)
        for policy in ("balanced", "zigzag", "contiguous"):
            layout = SequenceLayout(lengths, ring=ranks, policy=policy)
            ms = 1e3 * planning_seconds(layout, items)
            print(
                f"plan of {images} images, {layout.num_tokens} tokens, {ranks} ranks, {policy}: {ms:.2f} ms"
            )


if __name__ == "__main__":
    main()
