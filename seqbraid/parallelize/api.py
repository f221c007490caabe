"""`parallelize`: a stock model in, a `BraidedModel` on the mesh out."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..mesh import Mesh
from ..models.braided import BraidedModel


def parallelize(model: PreTrainedModel, mesh: Mesh | None = None) -> BraidedModel:
    """Put a stock model on the mesh; refuses, before anything is changed, a model that we could not keep
    exact.

    Args:
        model: a causal language model of transformers, from `from_pretrained` or from a config.
        mesh: the device mesh; one process when left out.
    """
    mesh = Mesh() if mesh is None else mesh
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"parallelize takes a transformers PreTrainedModel, not {type(model).__name__}")
    if mesh.world_size != 1:
        raise ValueError(
            f"the mesh has {mesh.world_size} processes; this release runs on one, sequence parallelism "
            "comes next"
        )
    return BraidedModel(model, mesh)
