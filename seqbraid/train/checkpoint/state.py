"""What of a model and its optimizer is saved, under which key, and where it goes on load.

Keys are `model.<name>` and `optimizer.<parameter>.<entry>`. The optimizer's state is read and filled in place
rather than through torch's `get_optimizer_state_dict` and `set_optimizer_state_dict`: the first steps a fresh
optimizer (a save before the first step would change the run), the second casts every entry to its parameter's
dtype (float32 master weights of bf16 parameters would be lost).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...models.parts import plain_name, tensors_by_name
from .index import DTYPES, Index


def model_tensors(model: nn.Module, frozen: bool = True, copies: bool = True) -> dict[str, Tensor]:
    """Parameters, frozen ones only if asked for, and persistent buffers as they lie on this rank;
    tied ones once. The `copies` of a pipeline stage have the name of what they are copies of.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without a backward, the root's parameters are still gathered
    every = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    known = _copies(model)
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    left_out = every - named.keys() | (set() if copies else known.keys())
    if not frozen:
        left_out |= {name for name, parameter in named.items() if not parameter.requires_grad}
    found = {}
    for name, tensor in get_model_state_dict(model).items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"the model's {name} is a {type(tensor).__name__}; a checkpoint holds tensors")
        if name not in left_out:
            found[f"model.{known.get(name, name)}"] = tensor
    return found


def optimizer_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[Tensor, Mapping[str, Any]],
    copies: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of an optimizer's state; and for JSON what it trains, and the entries that are numbers."""
    trained = _trained(model, optimizer)
    others = {name for name, learns in elsewhere(model).items() if learns}
    if not copies:
        trained = {name: p for name, p in trained.items() if name not in _copies(model).values()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int | float] = {}
    for name, parameter in trained.items():
        for entry, value in state.get(parameter, {}).items():
            key = f"optimizer.{name}.{entry}"
            if isinstance(value, Tensor):
                if isinstance(parameter, DTensor) and value.dim() and not isinstance(value, DTensor):
                    raise ValueError(
                        f"{key} must be a DTensor as its parameter is: it differs from rank to rank"
                    )
                tensors[key] = value.detach()
            elif isinstance(value, int | float):
                numbers[key] = value
            else:
                raise ValueError(f"{key} is a {type(value).__name__}; a checkpoint holds tensors and numbers")
    return tensors, {"parameters": sorted(trained.keys() | others), "numbers": numbers}


def optimizer_state_for(
    model: nn.Module, optimizer: torch.optim.Optimizer, index: Index, record: dict[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """The state that the optimizer will have: numbers as saved; tensors, its own or new ones, to be filled.

    The optimizer is left as it is; assign the result once it is filled.
    """
    trained, others = _trained(model, optimizer), elsewhere(model)
    for name in sorted(trained.keys() ^ (set(record["parameters"]) - others.keys())):
        here, there = ("trains", "did not") if name in trained else ("does not train", "did")
        raise ValueError(f"this optimizer {here} {name}; the saved one {there}")
    flags = {p: group for group in optimizer.param_groups for p in group["params"]}
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    for key in [*index, *record["numbers"]]:
        if not key.startswith("optimizer."):
            continue
        name, _, entry = key.removeprefix("optimizer.").rpartition(".")
        if name in others:
            continue
        if name not in trained:
            raise ValueError(f"the checkpoint has {key}, but the optimizer does not train {name}")
        parameter = trained[name]
        own = optimizer.state.get(parameter, {}).get(entry)
        if key in record["numbers"]:
            state[parameter][entry] = record["numbers"][key]
        elif isinstance(own, Tensor):
            state[parameter][entry] = own
        else:
            state[parameter][entry] = _empty(key, parameter, entry, index[key], flags[parameter])
    return state


def _empty(key: str, parameter: Tensor, entry: str, saved: dict[str, Any], flags: dict[str, Any]) -> Tensor:
    dtype = DTYPES[saved["dtype"]]
    if saved["shape"] == [] and (entry == "step" or parameter.dim()):
        # Where torch's own optimizers keep their step counters.
        on_device = flags.get("capturable") or flags.get("fused")
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if saved["shape"] != list(parameter.shape):
        raise ValueError(f"{key} has shape {saved['shape']}, its parameter {list(parameter.shape)}")
    return torch.zeros_like(parameter.detach(), dtype=dtype)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    named = _parameters(model)
    if unknown := len(held - set(named.values())):
        raise ValueError(
            f"{unknown} parameters of the optimizer are not the model's: build it after parallelize"
        )
    return {name: p for name, p in named.items() if p in held and p.requires_grad}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names that they are saved under."""
    named, copies = model.named_parameters(), _copies(model)
    return {copies.get(plain_name(name), plain_name(name)): parameter for name, parameter in named}


def _copies(model: nn.Module) -> dict[str, str]:
    """Parameters that another pipeline stage saves, and under which name."""
    found: dict[str, str] = getattr(model, "copies", {})
    return {f"model.{name}": f"model.{saved}" for name, saved in found.items()}


def elsewhere(model: nn.Module) -> dict[str, bool]:
    """The tensors that other pipeline stages have, and this rank does not; whether they are trained."""
    structure: Any = getattr(model, "structure", None)
    if structure is None or getattr(model, "pipeline", None) is None:
        return {}
    whole = {f"model.{name}": x.requires_grad for name, x in tensors_by_name(structure).items()}
    copies = _copies(model)
    own = {plain_name(name) for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return {name: learns for name, learns in whole.items() if name not in own | set(copies.values())}


def of_ours(index: Index, model: nn.Module) -> Index:
    """What an index has for this rank's pipeline stages."""
    others = elsewhere(model)
    names = {
        key: key.removeprefix("model.")
        if key.startswith("model.")
        else key.removeprefix("optimizer.").rpartition(".")[0]
        for key in index
    }
    return {key: entry for key, entry in index.items() if names[key] not in others}


def check_json(value: Any, where: str) -> None:
    """ValueError where a value is none of JSON's, or a key would come back as another."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings")
            check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_json(item, f"{where}[{number}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(
            f"{where} is a {type(value).__name__}; a checkpoint's state is JSON, see also `tensors`"
        )
