"""LoRA through peft, on the stock model as it is, so that `parallelize` takes it like any other.

Adapters on ring and Ulysses ranks are exact for the same reason as everything else: an adapted layer
works token by token, and gradients of all ranks are summed. Dropout is the exception: other meshes
draw other masks.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..comm.consensus import agree
from ..models.braided import BraidedModel
from ..models.parts import ModelParts
from .folder import new_folder

ADAPTER = "default"
"""What peft calls the one adapter that there is."""

PREFIX = "base_model.model."
"""What peft puts in front of the names of an adapter's file."""

VARIANTS = (
    "use_dora", "bias", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config", "fan_in_fan_out",
)  # fmt: skip
"""What makes an adapter of peft something else than `W + s·B·A` on linear layers."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


NO_HEAD = (
    "LoRA on the head ({head}) is not supported: the loss reads the head's weight, so the adapter would have "
    "no effect; leave it out of the targets"
)


@dataclass(frozen=True)
class LoraOptions:
    """Which layers get an adapter, and how large it is."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Their scale, divided by the rank."""
    targets: list[str] | str = "all-linear"
    """`all-linear`: every linear layer of the decoder and of multi-token prediction, never of the towers,
    never the head. Or a list: last parts of the names of such layers (`q_proj`, `mlp.down_proj`), or
    `re:PATTERN`, searched for in the names of all linear layers, those of the towers too."""
    dropout: float = 0.0
    """Dropout before the adapters; every mesh draws the same, from the `seed` of a step."""
    rslora: bool = False
    """Divide the scale by the root of the rank instead."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha={self.alpha} must be a positive number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not self.targets:
            raise ValueError("targets is empty; name layers, or use 'all-linear'")


def add_lora(model: PreTrainedModel, options: LoraOptions, seed: int = 0) -> list[str]:
    """Add adapters to a stock model and freeze all else; gives the names of the layers that got one.

    Call it before `parallelize`. The adapters are in float32 and start from the same numbers on every rank:
    their product is zero, so that the model's outputs are unchanged.
    """
    names = _targets(model, options.targets)
    peft = _peft()
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        target_modules=names,
    )
    _inject(model, config, seed)
    return names


def save_adapter(
    braided: BraidedModel, folder: Path, options: LoraOptions | None = None, base_name: str | None = None
) -> None:
    """Write the adapter as peft does, in place of one that is there; all ranks call it, the first writes.

    `PeftModel.from_pretrained(stock_model, folder)` loads it.
    """
    model, mesh = braided.model, braided.mesh
    config = _adapter_config(model)
    if options is not None and options.rank != config.r:
        raise ValueError(f"the model's adapters have rank {config.r}, not rank={options.rank}")
    state = braided.full_state(trained_alone=True)
    error = None
    if mesh.rank == 0:
        try:
            _write(folder, state, config, base_name)
        except (OSError, ValueError) as problem:
            error = problem
    agree(mesh.cpu_group, error)


def _write(folder: Path, state: Mapping[str, Tensor], config: Any, base_name: str | None) -> None:
    tensors = {
        PREFIX + name.replace(f".{ADAPTER}.", "."): x.contiguous()
        for name, x in state.items()
        if is_adapter(name)
    }
    assert tensors, "a model with adapters has adapter weights"
    written = copy.deepcopy(config)
    written.base_model_name_or_path = base_name
    written.inference_mode = True
    with new_folder(folder, replaces=CONFIG) as target:
        save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
        written.save_pretrained(str(target))
        # peft keeps names in sets: sorted, the same adapter gives the same file.
        values = json.loads((target / CONFIG).read_text(encoding="utf-8"))
        values["target_modules"] = sorted(values["target_modules"])
        (target / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_adapter(model: PreTrainedModel, folder: Path) -> list[str]:
    """Add the adapter of a folder, ours or peft's, to a stock model and freeze all else."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}, so it is not a peft adapter in safetensors format")
    peft = _peft()
    config = peft.PeftConfig.from_pretrained(str(folder))
    _check_plain(folder, config)
    config.inference_mode = False
    try:
        given = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is not a complete safetensors file: {error}") from None
    names = sorted({name.removeprefix(PREFIX).split(".lora_")[0] for name in given})
    config.target_modules = _checked(model, names)
    _inject(model, config, seed=0)
    parameters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    wanted = {PREFIX + name.replace(f".{ADAPTER}.", "."): p for name, p in parameters.items()}
    different = sorted(wanted.keys() ^ given.keys())
    different += [name for name in wanted.keys() & given.keys() if wanted[name].shape != given[name].shape]
    if different:
        raise ValueError(f"{folder} does not match {type(model).__name__}: {', '.join(different[:3])}, …")
    with torch.no_grad():
        for name, x in given.items():
            wanted[name].copy_(x)
    return names


def stock_under(model: Any) -> Any:
    """The stock model of a `PeftModel`, whose LoRA adapters stay in it; any other model as it is.

    What is more than plain LoRA on linear layers is refused.
    """
    if not hasattr(model, "get_base_model"):
        return model
    configs = model.peft_config
    config = configs.get(ADAPTER)
    if config is None or len(configs) > 1:
        raise ValueError(
            f"the PeftModel has the adapters {', '.join(configs)}; one is supported, called {ADAPTER!r}"
        )
    _check_plain("the PeftModel", config)
    stock = model.get_base_model()
    if "_require_grads_hook" in vars(stock):
        stock.disable_input_require_grads()  # which our activation checkpoints do without
    adapted = [name for name, module in stock.named_modules() if hasattr(module, "lora_A")]
    for name in adapted:
        if not isinstance(stock.get_submodule(name).base_layer, nn.Linear):
            raise ValueError(
                f"{name!r} is no linear layer of {type(stock).__name__}; LoRA adapts linear layers"
            )
    if (head := _head_name(stock)) in adapted:
        raise ValueError(NO_HEAD.format(head=head))
    if not has_lora(stock):
        raise ValueError("the PeftModel has no adapter weights; give its base model, or add adapters")
    return stock


def _check_plain(where: Any, config: Any) -> None:
    """Refuse an adapter that is more than plain LoRA on linear layers."""
    if not isinstance(config, _peft().LoraConfig):
        raise ValueError(f"{where} is an adapter of kind {config.peft_type}; only LoRA is supported")
    variants = [name for name in VARIANTS if getattr(config, name, None) not in (None, False, "none", [], {})]
    if variants:
        raise ValueError(f"{where} is not plain LoRA on linear layers: it sets {', '.join(variants)}")


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's."""
    return ".lora_" in name


def stock_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def has_lora(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def merged(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole state with every adapter added to its layer, `W + s·B·A`, under the stock model's names.

    The sum is made in float32 and rounded once.
    """
    found = {stock_name(name): x for name, x in state.items() if not is_adapter(name)}
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        a, b = (state[f"{name}.lora_{letter}.{ADAPTER}.weight"].float() for letter in "AB")
        weight = found[f"{name}.weight"]
        found[f"{name}.weight"] = (weight.float() + module.scaling[ADAPTER] * (b @ a)).to(weight.dtype)
    return found


def _inject(model: PreTrainedModel, config: Any, seed: int) -> None:
    # By the model's class peft would take the names of shared experts for those of the experts beside them.
    inside: Any = nn.Module()
    inside._modules = model._modules
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _peft().inject_adapter_in_model(config, inside, ADAPTER)
    model.peft_config = inside.peft_config
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


def _adapter_config(model: nn.Module) -> Any:
    config = getattr(model, "peft_config", {}).get(ADAPTER)
    if config is None:
        raise ValueError("the model has no adapters; call add_lora before parallelize")
    return config


def _targets(model: PreTrainedModel, targets: list[str] | str) -> list[str]:
    """The full names of the layers that the options mean."""
    linear = _linear_layers(model)
    parts = ModelParts.of(model)
    text = [parts.decoder, *([] if parts.mtp is None else [parts.mtp.module])]
    inside = {id(module) for part in text for module in part.modules()}
    own = [name for name, module in linear.items() if id(module) in inside]
    if targets == "all-linear":
        return _checked(model, own)
    found: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        if target.startswith("re:"):
            matched = [name for name in linear if _compiled(target).search(name)]
        else:
            matched = [name for name in own if name == target or name.endswith("." + target)]
            head = _head_name(model)
            if head == target or head.endswith("." + target):
                matched.append(head)
        if not matched:
            choices = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in own}))
            raise ValueError(
                f"target {target!r} is not a linear layer of the decoder; it has {choices}; layers of the "
                "towers are named by 're:PATTERN'"
            )
        found.update(matched)
    return _checked(model, sorted(found))


def _checked(model: PreTrainedModel, names: list[str]) -> list[str]:
    if has_lora(model):
        raise ValueError(f"{type(model).__name__} has adapters already")
    head, linear = _head_name(model), _linear_layers(model)
    if head in names:
        raise ValueError(NO_HEAD.format(head=head))
    if not names:
        raise ValueError(f"{type(model).__name__} has no linear layers in its decoder that LoRA could adapt")
    other = [name for name in names if name not in linear]
    if other:
        raise ValueError(
            f"{other[0]!r} is not a linear layer of {type(model).__name__}; LoRA adapts linear layers only"
        )
    return names


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _head_name(model: PreTrainedModel) -> str:
    head = ModelParts.of(model).head
    found: str = next(name for name, module in model.named_modules() if module is head)
    return found


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{target!r} is not a regular expression: {error}") from None


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError("LoRA needs peft: pip install 'seqbraid[lora]'") from None
    return peft
