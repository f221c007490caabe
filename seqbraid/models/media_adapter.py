"""Models with a vision or audio tower beside their text decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..sequence_parallel.context import StepContext
from ..sequence_parallel.media import spread_features
from .adapter import Adapter
from .batch import PackedBatch
from .parts import check_family
from .tower_attention import TowerKernels, pack_towers
from .towers import Towers


class MediaAdapter(Adapter):
    """A media model: its decoder gets embeddings, with the features of media where their tokens are."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.towers = Towers(self.parts)
        self.tower_kernels = TowerKernels()

    def _braid_parts(self) -> None:
        super()._braid_parts()
        self._bound += pack_towers((tower.module for tower in self.parts.towers), self.tower_kernels)

    def _set_main_attention(self, name: str) -> None:
        """The towers keep theirs: inside a frame or a window of a clip nothing is packed."""
        self.model.set_attn_implementation({"text_config": name})

    def check_step(self, batches: Sequence[PackedBatch], seed: int | None) -> None:
        """Refuse, besides, batches without media where they are encoded."""
        super().check_step(batches, seed)
        if self.parts.towers and any(batch.media is None for batch in batches):
            raise ValueError(
                f"{self.name} takes images, videos or audio, but the batch was packed for a text model; "
                "pass this model's config to pack"
            )

    def _inputs(self, batch: PackedBatch, context: StepContext) -> dict[str, Any]:
        assert batch.media is not None, "checked before the step"
        self.tower_kernels.kernels = context.kernels
        embeds_TD: Tensor = self.parts.embedding(batch.input_ids)
        plan, width = batch.media.plan, embeds_TD.shape[1]
        features = self.towers.features(batch.media.own, embeds_TD).to(embeds_TD.dtype)
        # In the order of local slots; a rank without items or media tokens takes part all the same.
        arrived = spread_features(features, plan, context.row_group)
        embeds_TD = embeds_TD.index_copy(0, plan.local_rows, arrived[:, :width])
        inputs: dict[str, Any] = {"inputs_embeds": embeds_TD[None]}
        if self.towers.num_levels:
            is_media = torch.zeros(len(embeds_TD), dtype=torch.bool, device=embeds_TD.device)
            inputs["visual_pos_masks"] = is_media.index_fill(0, plan.local_rows, True)[None]
            inputs["deepstack_visual_embeds"] = list(arrived[:, width:].split(width, dim=1))
        return inputs


def make_adapter(model: PreTrainedModel) -> Adapter:
    """The adapter of a model, by its config."""
    check_family(model)
    is_text = model.config is model.config.get_text_config()
    return Adapter(model) if is_text else MediaAdapter(model)
