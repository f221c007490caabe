"""Training arguments that cannot mean here what they mean in the stock Trainer: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..mesh import Mesh
from ..plan.memory import MemoryOptions

ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Optimizers whose update of a number depends on that number alone, so that sharded parameters are updated as
whole ones are."""


class Refusal(NamedTuple):
    """An argument, when it is refused, and why."""

    name: str
    refused: Callable[[Any], bool]
    reason: str


def _is_set(value: Any) -> bool:
    return bool(value)


REFUSALS = (
    Refusal("fp16", _is_set, "float16 needs its loss scaled, which is not exact; use bf16=True, or float32"),
    Refusal("fp16_full_eval", _is_set, "it casts the weights between steps; leave it out"),
    Refusal("bf16_full_eval", _is_set, "it casts the weights between steps; leave it out"),
    Refusal("torch_compile", _is_set, "it compiles the stock forward, which is not what runs; leave it out"),
    Refusal("fsdp", _is_set, "parallelize shards the model by FSDP2 already; use mesh=Mesh(dp_shard=-1, …)"),
    Refusal("deepspeed", _is_set, "parallelize shards the model by FSDP2; use mesh=Mesh(dp_shard=-1, …)"),
    Refusal(
        "parallelism_config", lambda value: value is not None,
        "accelerate would split the batch a second time; give the axes as mesh=Mesh(ring=…, ulysses=…, tp=…)",
    ),
    Refusal(
        "use_liger_kernel", _is_set,
        "it replaces modules that parallelize has placed; seqbraid.KernelOptions chooses among fused kernels",
    ),
    Refusal("neftune_noise_alpha", _is_set, "its noise would differ from mesh to mesh; leave it out"),
    Refusal("label_smoothing_factor", _is_set, "the loss is cross entropy, without smoothing; set it to 0"),
    Refusal(
        "auto_find_batch_size", _is_set,
        "one rank that runs out of memory would change its batch alone, and the others would wait for it; "
        "set per_device_train_batch_size",
    ),
    Refusal("save_on_each_node", _is_set, "checkpoints are written once, to a shared folder; leave it out"),
    Refusal(
        "train_sampling_strategy", lambda value: value not in ("random", "sequential"),
        "nothing is padded, so lengths need not be alike; use 'random' or 'sequential'",
    ),
    Refusal(
        "average_tokens_across_devices", lambda value: not value,
        "the loss is the mean over the label tokens of all ranks; leave it at True",
    ),
    Refusal("batch_eval_metrics", _is_set, "compute_metrics is given the whole data set once; leave it out"),
    Refusal("include_for_metrics", _is_set, "compute_metrics is given log-probabilities and labels"),
)  # fmt: skip
"""Of transformers' `TrainingArguments`; a release may lack some of them."""

ACCELERATOR = (
    ("split_batches", "per_device_train_batch_size is that of a data rank"),
    ("dispatch_batches", "each rank reads its own samples"),
)
"""Fields of `args.accelerator_config` that would change who reads what."""


def check_arguments(args: Any) -> None:
    """Raise a `ValueError` for an argument that cannot be kept."""
    for name, refused, reason in REFUSALS:
        value = getattr(args, name, None)
        if hasattr(args, name) and refused(value):
            raise ValueError(f"{name}={value!r} is not supported: {reason}")
    for name, reason in ACCELERATOR:
        value = getattr(args.accelerator_config, name, None)
        if value:
            raise ValueError(f"accelerator_config {name}={value!r} is not supported: {reason}; leave it out")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, and the stock Trainer would copy the model to each "
            f"(DataParallel); start `torchrun --nproc-per-node {args.n_gpu}`, or set CUDA_VISIBLE_DEVICES=0"
        )
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "load_best_model_at_end reads the sharded state of a checkpoint, which save_only_model=True "
            "leaves out; set one of them to False"
        )


def check_world(args: Any, mesh: Mesh) -> None:
    """Refuse a mesh of other processes than those that accelerate has found, and optimizers that need
    whole parameters.
    """
    if args.world_size != mesh.world_size:
        raise ValueError(
            f"the mesh has {mesh.world_size} processes, accelerate {args.world_size}; start with torchrun, "
            "which tells both, and make the mesh after it"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if mesh.world_size > 1 and optimizer not in ELEMENTWISE:
        raise ValueError(
            f"optim={optimizer!r} on {mesh.world_size} processes is not supported: parameters are sharded, "
            f"and it may need whole ones; use one of {', '.join(ELEMENTWISE)}"
        )


def asked_memory(args: Any) -> MemoryOptions:
    """The memory options that stand for the arguments' activation checkpointing.

    >>> from types import SimpleNamespace
    >>> asked_memory(SimpleNamespace(gradient_checkpointing=True)).checkpointing
    'full'
    """
    on = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None)
    if not on:
        return MemoryOptions()
    name = "activation_checkpointing_kwargs"
    given = getattr(args, name, None) or getattr(args, "gradient_checkpointing_kwargs", None) or {}
    for key, value in given.items():
        if key not in ("use_reentrant", "selective", "offload") and not (
            key == "every_n_layers" and value == 1
        ):
            raise ValueError(
                f"{name} {key}={value!r} is not supported; pass memory=seqbraid.MemoryOptions(…) instead"
            )
    checkpointing = "selective" if given.get("selective") else "full"
    return MemoryOptions(checkpointing=checkpointing, offload=bool(given.get("offload")))  # type: ignore[arg-type]


def without_stock_checkpointing(args: Any) -> None:
    """Keep the stock Trainer from switching on the stock layers' own checkpointing beside ours."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, False)
