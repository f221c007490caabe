"""`ModelParts`: where a stock model keeps what, found once, by one set of rules.

Whoever shards, checkpoints, freezes, adapts, counts or cuts a model reads it here. Modules are looked at and
never changed, so the model may be stock, wrapped by peft, on the meta device, or sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from .decoder import find_decoder, find_layers
from .experts import are_experts
from .families import FAMILIES, family_of
from .gated_delta import is_gated_delta
from .head import find_head
from .mixers import HEAD_SIZES, SoftmaxSizes, layer_window, softmax_sizes
from .mtp_module import NAME, MtpModule

MixerKind = Literal["full_attention", "sliding_attention", "gated_delta"]

MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("w1", "w3", "w2"),
)
"""What the families call the linear layers of a dense MLP, the last one last; each must be a module (experts
are tensors)."""

ROUTERS = ("gate", "router")
"""What the families call what chooses a token's experts."""


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A decoder layer."""

    index: int
    module: nn.Module
    kind: MixerKind | None
    """None where we know no module that mixes tokens, or several; a step sees whether they were mixed."""
    mixer: Any
    """The module in which tokens meet."""
    window: int | None
    """How many keys a query of sliding-window attention sees, itself included."""
    norms: tuple[nn.Module, ...]
    """Beside the mixer, on hidden states and on what routers and MLPs make of them."""
    mixer_norms: tuple[nn.Module, ...]
    """Within the mixer, on queries, keys or what comes out of it."""
    mlps: tuple[nn.Module, ...]
    """Dense MLPs, those of shared experts left out."""
    shared_experts: tuple[nn.Module, ...]
    """MLPs that work for every token, beside the chosen experts."""
    experts: tuple[nn.Module, ...]
    """Modules of experts of which a few are chosen for each token."""
    router: nn.Module | None
    """What chooses them."""

    @property
    def dense(self) -> tuple[nn.Module, ...]:
        """All MLPs that every token passes through."""
        return self.mlps + self.shared_experts


@dataclass(frozen=True, eq=False)
class TowerParts:
    """A media encoder."""

    kind: Literal["vision", "audio"]
    module: Any
    blocks: tuple[nn.Module, ...]
    """Its stack of layers."""
    mergers: tuple[nn.Module, ...]
    """What makes features of the decoder's width from patches, those for DeepStack included."""


@dataclass(frozen=True, eq=False)
class MtpParts:
    """Multi-token prediction."""

    module: MtpModule
    layers: tuple[LayerParts, ...]
    """Their indices go on behind those of the decoder."""

    @property
    def of_depths(self) -> tuple[LayerParts, ...]:
        """The layer of each depth; one may serve several."""
        return tuple(self.layers[depth % len(self.layers)] for depth in range(self.module.options.depth))


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A stock model; `ModelParts.of` finds its parts, or says why it is no model that we know."""

    model: PreTrainedModel
    """Without the wrappers of peft and of `parallelize`."""
    config: Any
    """The text decoder's."""
    decoder: Any
    """All of the text model but the head."""
    embedding: nn.Module
    """Of tokens."""
    other_embeddings: tuple[nn.Module, ...]
    """Of positions, in older families, and of tokens once more where a family has tables for its layers."""
    layer_list: nn.ModuleList
    """The decoder's own list of its layers."""
    layers: tuple[LayerParts, ...]
    final_norm: nn.Module | None
    head: nn.Linear
    towers: tuple[TowerParts, ...]
    mtp: MtpParts | None = None
    """Multi-token prediction, where it was attached."""

    @staticmethod
    def of(model: Any) -> ModelParts:
        """Of a stock model, or of one that peft or `parallelize` has wrapped."""
        stock = unwrapped(model)
        check_family(stock)
        config = stock.config.get_text_config()
        head = find_head(stock)
        towers = _towers(stock)
        decoder: Any = getattr(stock.model, "language_model", stock.model) if towers else find_decoder(stock)
        layers = find_layers(stock, decoder, config)
        inside = {id(module) for module in layers.modules()}
        embedding = decoder.get_input_embeddings()
        tables = [m for m in decoder.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
        norms = [child for child in decoder.children() if is_norm(child)]
        return ModelParts(
            stock,
            config,
            decoder,
            embedding,
            tuple(table for table in tables if table is not embedding),
            layers,
            tuple(_layer(index, layer, config) for index, layer in enumerate(layers)),
            norms[-1] if norms else None,
            head,
            towers,
            _mtp(stock),
        )

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one weight."""
        return getattr(self.embedding, "weight", None) is self.head.weight

    @property
    def every_layer(self) -> tuple[LayerParts, ...]:
        """Those of the decoder, and behind them those of multi-token prediction."""
        return self.layers if self.mtp is None else self.layers + self.mtp.layers

    @cached_property
    def expert_parameters(self) -> frozenset[int]:
        """The ids of all parameters of experts that are chosen."""
        parts = (expert for layer in self.every_layer for expert in layer.experts)
        return frozenset(id(p) for part in parts for p in part.parameters())

    def tower(self, kind: Literal["vision", "audio"]) -> TowerParts | None:
        """The tower of a kind, if there is one."""
        return next((tower for tower in self.towers if tower.kind == kind), None)

    def heads(self, layer: LayerParts) -> SoftmaxSizes:
        """The heads of a layer of softmax attention, as many as its (maybe sharded) weights have."""
        return softmax_sizes(layer.mixer, self.config)


def plain_name(name: str) -> str:
    """The name of a parameter without what wrappers add (activation checkpointing, compile)."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and buffers; those that are not saved too."""
    return {plain_name(name): x for name, x in chain(model.named_parameters(), model.named_buffers())}


def unwrapped(model: Any) -> Any:
    """The stock model below `BraidedModel` and peft's wrapper."""
    if isinstance(model, nn.Module) and hasattr(model, "mesh") and hasattr(model, "model"):
        model = getattr(model, "structure", model.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_family(model: PreTrainedModel) -> None:
    """Refuse a model of several parts that is of no media family we know."""
    if model.config is model.config.get_text_config() or family_of(model.config) is not None:
        return
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(
        f"{type(model).__name__} (model_type {model.config.model_type!r}) has unknown parts besides its "
        f"text decoder; supported multimodal models are {known}; or load the text-only class of the family"
    )


def towers_of(model: Any) -> Any:
    """The module that holds the towers: below the head, or in older releases of Omni beside the decoder."""
    for module in (model.model, model):
        if hasattr(module, "visual"):
            return module
    raise ValueError(f"{type(model).__name__} has no vision tower at the expected places")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by itself."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _towers(model: Any) -> tuple[TowerParts, ...]:
    if model.config is model.config.get_text_config():
        return ()
    holder = towers_of(model)
    vision, audio = holder.visual, getattr(holder, "audio_tower", None)
    return (_tower("vision", vision), *([] if audio is None else [_tower("audio", audio)]))


def _tower(kind: Literal["vision", "audio"], module: nn.Module) -> TowerParts:
    # The library marks layers that are to be checkpointed.
    blocks = next(
        part
        for part in module.children()
        if isinstance(part, nn.ModuleList) and len(part) and hasattr(part[0], "gradient_checkpointing")
    )
    mergers = tuple(child for name, child in module.named_children() if "merger" in name)
    return TowerParts(kind, module, tuple(blocks), mergers)


def _mtp(model: nn.Module) -> MtpParts | None:
    module = getattr(model, NAME, None)
    if not isinstance(module, MtpModule):
        return None
    layers = enumerate(module.layers, start=module.first_index)
    return MtpParts(module, tuple(_layer(index, layer, module.config) for index, layer in layers))


def _layer(index: int, layer: nn.Module, config: Any) -> LayerParts:
    mixers = [module for module in layer.modules() if _mixes(module)]
    mixer: Any = mixers[0] if len(mixers) == 1 else None
    kind: MixerKind | None = None
    window = None
    if mixer is not None and is_gated_delta(mixer):
        kind = "gated_delta"
    elif mixer is not None:
        window = layer_window(config, index, mixer)
        kind = "full_attention" if window is None else "sliding_attention"
    in_mixer = {id(module) for found in mixers for module in found.modules()}
    experts = tuple(_experts(layer))
    in_experts = {id(module) for part in experts for module in part.modules()}
    outside = [(name, m) for name, m in layer.named_modules() if id(m) not in in_mixer]
    dense = [(name, m) for name, m in _dense_mlps(layer) if id(m) not in in_mixer | in_experts]
    routers = (m for name, m in outside if name.rpartition(".")[2] in ROUTERS and id(m) not in in_experts)
    return LayerParts(
        index=index,
        module=layer,
        kind=kind,
        mixer=mixer,
        window=window,
        norms=tuple(module for _, module in outside if is_norm(module)),
        mixer_norms=tuple(m for m in layer.modules() if id(m) in in_mixer and is_norm(m)),
        mlps=tuple(m for name, m in dense if "shared" not in name),
        shared_experts=tuple(m for name, m in dense if "shared" in name),
        experts=experts,
        router=next(routers, None) if experts else None,
    )


def _mixes(module: nn.Module) -> bool:
    return is_gated_delta(module) or (
        hasattr(module, "layer_idx") and any(hasattr(module, name) for name in HEAD_SIZES)
    )


def _experts(layer: nn.Module) -> Iterator[nn.Module]:
    """Experts as one module of tensors; where there is none, what the family calls experts."""
    for name, module in layer.named_modules():
        called = name.rpartition(".")[2] == "experts"
        if are_experts(module) or (called and not any(are_experts(part) for part in module.modules())):
            yield module


def _dense_mlps(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if any(_has_modules(child, names) for names in MLPS):
            yield prefix + name, child
        else:
            yield from _dense_mlps(child, f"{prefix}{name}.")


def _has_modules(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)
