"""`parallelize`: a stock model in, a `BraidedModel` on the mesh out."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..mesh import Mesh
from ..models.braided import BraidedModel
from .fsdp import shard_parameters


def parallelize(model: PreTrainedModel, mesh: Mesh | None = None, gated_delta: str = "auto") -> BraidedModel:
    """Put a stock model on the mesh; refuses, before anything is changed, a model that we could not keep
    exact.

    Args:
        model: a causal language model of transformers, from `from_pretrained` or from a config.
        mesh: the device mesh; one process when left out.
        gated_delta: how gated-delta layers talk over `ring × ulysses`: by `states` (any number of heads), by
            `heads` (they must divide), or `auto`, whichever sends less for the batch at hand.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> model = parallelize(AutoModelForCausalLM.from_config(config))
    >>> batch = seqbraid.pack([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], config)
    >>> out = model(batch)
    >>> out.loss.backward()
    >>> out.label_tokens, [tuple(x.shape) for x in model.logits(batch)]
    (3, [(3, 99), (2, 99)])
    """
    mesh = Mesh() if mesh is None else mesh
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"parallelize takes a transformers PreTrainedModel, not {type(model).__name__}")
    for axis in ("pp", "tp", "ep"):
        if getattr(mesh, axis) > 1:
            raise ValueError(
                f"{axis}={getattr(mesh, axis)} is not supported yet; use 1, and dp_shard, ring or ulysses "
                "instead"
            )
    braided = BraidedModel(model, mesh, gated_delta)
    if mesh.world_size > 1:
        shard_parameters(braided, mesh)
    return braided
