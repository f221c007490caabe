"""From the samples of a step to its `Step`: pure, so that the loader does it ahead of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..data.pack import pack, plan_row
from ..layout.labels import IGNORE
from ..mesh import Mesh
from ..models.batch import BadBatch, PackedBatch
from ..models.step import Step
from ..plan.flops import MediaSizes, ModelFlops
from ..sequence_parallel.plans import RowPlans


@dataclass(frozen=True)
class StepMaker:
    """Makes the micro-batches of a step from the samples of this data rank, and counts what is in them."""

    config: Any
    """The model's."""
    mesh: Mesh
    policy: str
    flops: ModelFlops | None = None
    mtp_depth: int = 0
    """Depths of multi-token prediction."""

    def plan(self, lengths: Sequence[int]) -> RowPlans | None:
        """What follows from the lengths of a row's samples alone; None where they are refused, which `pack`
        says in its own words.
        """
        try:
            return plan_row(lengths or [1], self.config, self.mesh, self.policy)
        except ValueError:
            return None

    def __call__(
        self, rows: Sequence[Sequence[Mapping[str, Any]]], plans: Sequence[RowPlans | None] | None = None
    ) -> Step:
        """The step of these rows; `plans` are what `plan` gave for them."""
        plans = [None] * len(rows) if plans is None else plans
        try:
            batches = [
                pack(
                    row or [nobody(self.config)],
                    self.config,
                    self.mesh,
                    policy=self.policy,
                    plans=of_row,
                    mtp_depth=self.mtp_depth,
                )
                for row, of_row in zip(rows, plans, strict=True)
            ]
            return Step(batches, self._counts(rows, batches))
        except Exception as error:  # every rank is to hear of it, in the agreement of the step
            bad = cast(PackedBatch, BadBatch(error))
            return Step([bad] * len(rows), dict.fromkeys(COUNTS, 0))

    def _counts(
        self, rows: Sequence[Sequence[Mapping[str, Any]]], batches: Sequence[PackedBatch]
    ) -> dict[str, int]:
        if any(isinstance(batch, BadBatch) for batch in batches):
            return dict.fromkeys(COUNTS, 0)
        lengths = [[len(sample["input_ids"]) for sample in row] for row in rows]
        labels = sum(batch.label_tokens for batch in batches)
        physical = sum(batch.layout.num_local_tokens for batch in batches) * self.mesh.sequence_size
        # In megaflops: exact enough, and an integer goes through the gather of integers.
        media = _media([sample for row in rows for sample in row])
        work = 0 if self.flops is None else int(self.flops.step(lengths, labels, media) / 1e6)
        return dict(zip(COUNTS, (sum(map(sum, lengths)), physical, work), strict=True))


COUNTS = ("tokens", "physical_tokens", "megaflops")
"""What is counted of a step beside its labels."""


def nobody(config: Any) -> Mapping[str, Any]:
    """Fills a row that has no sample: every rank takes part in every exchange.

    A token without a label touches no gradient, unless a family has none for it: the embedding of a pad
    token is zero, so it is another one.
    """
    text = config.get_text_config()
    return {"input_ids": [1 if getattr(text, "pad_token_id", None) == 0 else 0], "labels": [IGNORE]}


def _media(samples: Sequence[Mapping[str, Any]]) -> MediaSizes:
    grids: list[tuple[int, int, int]] = []
    mel_frames: list[int] = []
    for sample in samples:
        for key in ("image_grid_thw", "video_grid_thw"):
            if sample.get(key) is not None:
                grids += [tuple(grid) for grid in sample[key].tolist()]
        if sample.get("feature_attention_mask") is not None:
            mel_frames += sample["feature_attention_mask"].sum(-1).tolist()
    return MediaSizes(grids, mel_frames)
