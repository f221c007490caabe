"""The micro-batches of a step on this rank, and what all ranks together have in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.consensus import gather_ints
from ..data.pack import pack
from ..data.stream.loader import StepData
from ..mesh import Mesh
from ..models.batch import PackedBatch
from .flops import Media, ModelFlops


@dataclass(frozen=True)
class StepBatches:
    """What this rank computes in a step; counts are those of the whole job."""

    batches: list[PackedBatch]
    tokens: int
    label_tokens: int
    physical_tokens: int
    flops: float
    stop: bool
    """Whether some rank has been asked to stop."""


def make_batches(
    data: StepData, config: Any, mesh: Mesh, policy: str, flops: ModelFlops | None = None, stop: bool = False
) -> StepBatches:
    """Pack each row, and count over the ranks that have different samples."""
    rows = [row or [nobody(config)] for row in data.rows]
    batches = [pack(row, config, mesh, policy=policy, check_media=True) for row in rows]
    own = [0, 0, 0, 0, int(stop)]
    if mesh.rank in mesh.leaders:
        lengths = [[len(sample["input_ids"]) for sample in row] for row in data.rows]
        labels = sum(batch.label_tokens for batch in batches)
        physical = sum(batch.layout.num_local_tokens for batch in batches) * mesh.sequence_size
        # In megaflops: exact enough, and an integer goes through the gather of integers.
        media = _media([sample for row in data.rows for sample in row])
        work = 0 if flops is None else int(flops.step(lengths, labels, media) / 1e6)
        own = [sum(map(sum, lengths)), labels, physical, work, int(stop)]
    found = gather_ints(mesh.cpu_group, own)
    tokens, labels, physical, work, _ = mesh.sum_over_data(found)
    return StepBatches(batches, tokens, labels, physical, work * 1e6, any(rank[4] for rank in found))


def nobody(config: Any) -> Mapping[str, Any]:
    """Fills a row that has no sample: every rank takes part in every exchange.

    A token without a label touches no gradient, unless a family has none for it: the embedding of a pad
    token is zero, so it is another one.
    """
    text = config.get_text_config()
    return {"input_ids": [1 if getattr(text, "pad_token_id", None) == 0 else 0], "labels": [-100]}


def _media(samples: Sequence[Mapping[str, Any]]) -> Media:
    grids: list[tuple[int, int, int]] = []
    mel_frames: list[int] = []
    for sample in samples:
        for key in ("image_grid_thw", "video_grid_thw"):
            if sample.get(key) is not None:
                grids += [tuple(grid) for grid in sample[key].tolist()]
        if sample.get("feature_attention_mask") is not None:
            mel_frames += sample["feature_attention_mask"].sum(-1).tolist()
    return Media(grids, mel_frames)
