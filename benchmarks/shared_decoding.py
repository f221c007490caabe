"""What sharing a row's media saves: the time to encode the samples of a row, whole and as one of P ranks.

`python benchmarks/shared_decoding.py` makes videos and pictures of many sizes and encodes a row of
conversations about them in this process: as one rank would for itself, and as each rank of a sequence group
does, which decodes what it will encode and reads the text and the headers of the rest. It prints the slowest
rank's time over that of the whole.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import av
import numpy as np
from PIL import Image

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.media import media_ranks


def make_media(root: Path, num_videos: int, num_pictures: int) -> list[dict[str, Any]]:
    """Files of noise, and a conversation about each."""
    rng = np.random.default_rng(0)
    parts = []
    for number in range(num_videos):
        name, frames = f"{number}.mp4", int(rng.integers(24, 240))
        with av.open(str(root / name), "w") as container:
            stream = container.add_stream("libx264", rate=24)
            stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
            for _ in range(frames):
                picture = rng.integers(0, 256, (60, 80, 3), np.uint8).repeat(4, 0).repeat(4, 1)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
            container.mux(stream.encode())
        parts.append({"type": "video", "video": name})
    for number in range(num_pictures):
        name, (height, width) = f"{number}.jpg", rng.integers(200, 1200, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(root / name)
        parts.append({"type": "image", "image": name})
    rng.shuffle(parts)  # type: ignore[arg-type]
    answer = {"role": "assistant", "content": "noise"}
    return [
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}, answer]}
        for part in parts
    ]


def seconds(
    encoder: SampleEncoder, records: list[dict[str, Any]], ranks: list[Any], rank: int, repeats: int
) -> float:
    """The least of a few runs."""
    found = []
    for _ in range(repeats):
        start = perf_counter()
        for record, of_sample in zip(records, ranks, strict=True):
            encoder.encode(record, of_sample, rank)
        found.append(perf_counter() - start)
    return min(found)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--videos", type=int, default=16)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="the quickest of so many runs counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = make_media(Path(folder), args.videos, args.pictures)
        model, processor = tiny_training_model("qwen3_vl")
        encoder = SampleEncoder(processor, model.config, MediaFiles(Path(folder)))
        costs = [encoder.measure(record)[1] for record in records]
        whole = seconds(encoder, records, [None] * len(records), 0, args.repeats)
        print(f"{args.videos} videos and {args.pictures} pictures: {whole:.2f} s for all")
        none = seconds(encoder, records, media_ranks(costs, 1), 1, args.repeats)
        print(f"a rank without media: {none / whole:.2f} of that, for text and headers")
        for size in (2, 4, 8):
            ranks = media_ranks(costs, size)
            slowest = max(seconds(encoder, records, ranks, rank, args.repeats) for rank in range(size))
            print(f"{size} ranks: the slowest has {slowest / whole:.2f} of that (1/{size} is {1 / size:.2f})")


if __name__ == "__main__":
    main()
