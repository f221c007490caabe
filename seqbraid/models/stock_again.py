"""A parallelized model used as the stock model that it is: answers in one process, and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..comm.consensus import agree, raised_by_all
from ..mesh import Mesh
from .mtp import save_with_mtp
from .tensor_parts import whole_tensor


def generate_alone(braided: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """The stock model's `generate`, in one process; where ranks share the model it is refused."""
    if mesh.world_size > 1:
        raise ValueError(
            f"generate runs in one process, and this model is shared by {mesh.world_size}; save it with "
            "save_pretrained, and load it in one process: `seqbraid chat` does"
        )
    stock = braided.model
    was_training = stock.training
    stock.eval()  # a model in training drops out, and checkpoints without a cache
    try:
        return braided.gathered(lambda model: model.model.generate(*args, **kwargs))
    finally:
        stock.train(was_training)
        braided.free()


def full_state(braided: Any, trained_alone: bool = False) -> dict[str, Any]:
    """The tensors of the stock model, in full and on the CPU, on the first rank; all ranks call it."""
    if braided.pipeline is not None:
        found: dict[str, Any] = braided.pipeline.full_state(trained_alone)
        return found
    parts = get_model_state_dict(braided.model, options=StateDictOptions(ignore_frozen_params=trained_alone))
    state = {}
    for name, part in parts.items():  # one at a time: none is whole on the other ranks afterwards
        whole = whole_tensor(part)
        if braided.mesh.rank == 0:
            state[name] = whole.cpu()
    return state


def save_stock(
    braided: Any,
    is_sharded: bool,
    directory: str | Path,
    tokenizer: Any,
    options: dict[str, Any],
) -> None:
    """Write the stock checkpoint, the `mtp.` tensors that it came with or were trained, and its tokenizer
    or processor; all ranks call it, the first writes.
    """
    stock, mesh = braided.structure, braided.mesh
    if hasattr(stock, "peft_config"):
        raise ValueError(
            "the model has LoRA adapters, which a stock checkpoint cannot hold; write them with "
            "seqbraid.train.lora.save_adapter, or merge them with seqbraid.train.export.export"
        )
    if is_sharded:
        agree(mesh.cpu_group, None, alike={"the call": "save_pretrained"})
        state = full_state(braided)
    else:
        state = stock.state_dict()
    with raised_by_all(mesh.cpu_group):
        if mesh.rank == 0:
            save_with_mtp(stock, state, Path(directory), **options)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
