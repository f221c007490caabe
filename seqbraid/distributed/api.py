"""`parallelize`: a stock model in, a `BraidedModel` on the mesh out."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from ..comm.consensus import agree
from ..mesh import Mesh
from ..models.agreement import config_values
from ..models.braided import BraidedModel
from ..models.mtp import attached
from ..models.mtp_module import MtpOptions
from ..models.stage import Stage, without_weights
from ..models.unchanged import resizing_refused
from ..ops.kernels import KernelOptions
from ..plan.memory import MemoryOptions
from ..plan.pipeline import PipelineOptions, cut_into_stages
from .fsdp import check_compute_dtype, check_same_weights, shard_parameters
from .memory import apply_memory_options
from .pipeline import StagePipeline


def parallelize(
    model: PreTrainedModel,
    mesh: Mesh | None = None,
    gated_delta: str = "auto",
    memory: MemoryOptions | None = None,
    compute_dtype: torch.dtype | None = None,
    kernels: KernelOptions | None = None,
    mtp: MtpOptions | None = None,
    pipeline: PipelineOptions | None = None,
) -> BraidedModel:
    """Put a stock model on the mesh; refuses, before anything is changed, a model that we could
    not keep exact.

    Args:
        model: a causal language model of transformers, from `from_pretrained` or from a config.
        mesh: the device mesh; one process when left out.
        gated_delta: how gated-delta layers talk over `ring × ulysses`: by `states` (any number of heads), by
            `heads` (they must divide), or `auto`, whichever sends less for the batch at hand.
        memory: switches that trade time for memory; the gradient stays what it is.
        compute_dtype: `torch.bfloat16` to compute in 16 bits with float32 parameters and float32 sums of
            gradients; the parameters' own type when left out.
        kernels: which kernels compute attention, the gated delta rule, the loss; by default the first of each
            that is installed, fits and is right (`seqbraid doctor` lists them).
        mtp: trains the model's multi-token prediction too, from its checkpoint's `mtp.` tensors
            ([docs/mtp.md](docs/mtp.md)); without it they stay as they are.
        pipeline: which layers each of the `pp` stages has, and how micro-batches go through them.

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
    memory = MemoryOptions() if memory is None else memory
    pipeline = PipelineOptions() if pipeline is None else pipeline
    group, error, braided, alike, attaching = mesh.cpu_group, None, None, {}, ExitStack()
    stages: tuple[Stage, ...] = ()
    try:
        check_model(model)
        if mtp is not None:
            attaching.enter_context(attached(model, mtp))
        check_compute_dtype(model, compute_dtype)
        alike = _alike(model, mesh, gated_delta, memory, compute_dtype, kernels)
        structure = without_weights(model) if mesh.pp > 1 else model
        braided = BraidedModel(model, mesh, gated_delta, kernels)
        braided.until_release(attaching)
        if mesh.pp > 1:
            stages = cut_into_stages(braided.parts, mesh.pp, pipeline)
            alike["pipeline"] = repr((pipeline, stages))
        apply_memory_options(braided, memory)
    except Exception as problem:
        error = problem
    # What one rank refuses, the others must not wait for; nothing above talks to another rank.
    try:
        agree(group, error, alike=alike)
    except Exception:
        if braided is not None:
            braided.release()
        attaching.close()
        raise
    assert braided is not None
    braided.join_groups()
    check_same_weights(braided, mesh)
    if stages:
        dtype = compute_dtype or braided.parts.model.get_input_embeddings().weight.dtype
        own = stages[mesh.axis_rank("pp") :: mesh.pp]
        tied = braided.parts.is_tied
        braided.keep(own, structure)
        braided.pipeline = StagePipeline(braided, own, dtype, tied)
    if mesh.world_size > 1 or any(p.dtype != (compute_dtype or p.dtype) for p in model.parameters()):
        shard_parameters(braided, mesh, compute_dtype)
        braided.until_release(resizing_refused(model))
    return braided


def check_model(model: Any) -> None:
    """Refuse what is no stock model."""
    if not isinstance(model, PreTrainedModel):
        called = type(model).__name__
        raise ValueError(
            f"parallelize takes a PreTrainedModel of transformers, not {called}{_instead(model)}"
        )


def _instead(model: Any) -> str:
    """What to give in the place of a wrapper."""
    if hasattr(model, "get_base_model"):
        return "; give model.get_base_model(), which has peft's adapters in it"
    if isinstance(model, BraidedModel):
        return ", whose model is parallelized already; call release() on it first"
    if isinstance(getattr(model, "module", None), PreTrainedModel):
        return "; give model.module, and the mesh says over which ranks it is shared"
    return ""


def _alike(
    model: PreTrainedModel,
    mesh: Mesh,
    gated_delta: str,
    memory: MemoryOptions,
    compute_dtype: torch.dtype | None,
    kernels: KernelOptions | None,
) -> dict[str, Any]:
    """Ranks that compute another model, other layers again, or in another type, would wait for each other."""
    # Tiles and chunks send nothing, so their sizes are a rank's own; but tp ranks share each of them.
    shared = ("mlp_tile", "loss_chunk") if mesh.tp > 1 else ()
    return {
        "the call": "parallelize",
        "the model": type(model).__name__,
        "config": config_values(model.config.get_text_config()),
        "gated_delta": gated_delta,
        **{
            f"memory.{name}": getattr(memory, name)
            for name in ("checkpointing", "offload", "reduce_gradients", *shared)
        },
        "kernels": repr(kernels or KernelOptions()),
        "compute_dtype": str(compute_dtype),
        "the parameter": {
            name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()
        },
    }
