"""A pipeline stage: consecutive layers of a stock model, what stands in for the others, and one call of it.

The decoder keeps its list of layers at full length, with layers of other stages passing hidden states
through: so names and the kinds of layers stay what they are. The first stage has the embedding and the media
encoders, the last one the final norm and the head.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .batch import PackedBatch
from .head import forward_replaced
from .parts import ModelParts


@dataclass(frozen=True)
class Stage:
    """Which layers a stage has."""

    number: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it starts from token ids and media."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends in the loss."""
        return self.number == self.num_stages - 1


class Travelling(NamedTuple):
    """What one stage sends to the next; a tuple, so that FSDP finds the tensors in it."""

    hidden_1TD: Tensor
    """Of this rank's tokens between mixers and MLPs; no view, which FSDP warns of."""
    router_2E: Tensor | None = None
    """The sums of `router_sums` over the layers so far; None without a router's loss."""
    expert_counts: Tensor | None = None
    """Stays on its rank, as in `LocalLoss`."""
    embeds_1TD: Tensor | None = None
    """What the first layer was given, media included; None without multi-token prediction."""


class StageCall(NamedTuple):
    """One micro-batch on one stage."""

    stage: Stage
    hidden_TD: Tensor | None
    """What the stage before has sent; None on the first."""
    router_2E: Tensor | None
    """The sums of routers over all layers before; None without a router's loss."""
    embeds_TD: Tensor | None = None
    """What the first layer was given; None on the first stage, and without multi-token prediction."""


class StageTimes(NamedTuple):
    """Of a step, over all ranks."""

    waiting: float
    """The share of the step in which ranks waited for other stages: the bubble."""
    seconds: tuple[float, ...]
    """What each stage computed, the mean of its ranks."""

    def summary(self) -> dict[str, float]:
        """As it is logged."""
        return {"pipeline_bubble": self.waiting} | {
            f"pipeline_stage_{number}_s": x for number, x in enumerate(self.seconds)
        }


class Pipeline(Protocol):
    """What runs the micro-batches of a model that is cut into stages (`distributed/pipeline.py`)."""

    dtype: torch.dtype
    """What hidden states are in."""
    wide: torch.dtype
    """What losses and the sums of routers are in."""
    moves: Callable[[], None]
    """Called when a micro-batch is through a stage of this rank."""

    def run(
        self,
        batches: Sequence[PackedBatch],
        call: Callable[[PackedBatch, StageCall], Any],
        after: Callable[[int], None] | None = None,
        *,
        with_router: bool = False,
        with_mtp: bool = False,
    ) -> list[Any]:
        """Let each batch pass through all stages, and back where gradients are enabled. What the calls of the
        last stage give, in the order of the batches; nothing on ranks without it.
        """

    def times(self) -> StageTimes:
        """Of the latest step; all ranks call it."""

    def full_state(self, trained_alone: bool) -> dict[str, Any]:
        """See `BraidedModel.full_state`."""

    def values(
        self,
        batch: PackedBatch,
        call: Callable[[PackedBatch, StageCall], Any],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """What `call` gives on the last stage for a batch that all ranks have agreed on, tensors of these
        shapes, on all stages; without a gradient.
        """


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the meta device; tied weights stay tied."""
    known: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    known |= {id(x): x.to("meta") for x in model.buffers()}
    return copy.deepcopy(model, known)


class PassThrough(nn.Module):
    """Stands in for a layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What came in."""
        return hidden_states


class Elsewhere(nn.Module):
    """Stands in for an embedding, an encoder, a norm or a head that another stage has."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """No stage calls what it does not have."""
        raise AssertionError("called on a stage that does not have it")


PASS, IDENTITY = PassThrough(), nn.Identity()


def keep_stages(parts: ModelParts, stages: Sequence[Stage]) -> ModelParts:
    """Leave a model the parts of some of its stages, and free the others; its parts as they are then."""
    own = {index for stage in stages for index in stage.layers}
    gone: list[tuple[nn.Module, nn.Module]] = [
        (layer.module, PassThrough()) for layer in parts.layers if layer.index not in own
    ]
    kept: dict[str, Any] = {"layers": tuple(layer for layer in parts.layers if layer.index in own)}
    if not any(stage.is_first for stage in stages):
        kept |= {"embedding": Elsewhere(), "towers": ()}
        gone.append((parts.embedding, kept["embedding"]))
        gone += [(tower.module, Elsewhere()) for tower in parts.towers]
    if not any(stage.is_last for stage in stages):
        kept |= {"head": Elsewhere()}
        gone.append((parts.head, kept["head"]))
        if parts.final_norm is not None:
            kept["final_norm"] = None
            gone.append((parts.final_norm, nn.Identity()))
        if parts.mtp is not None:
            kept["mtp"] = None
            gone.append((parts.mtp.module, Elsewhere()))
    stand_ins = {id(module): stand_in for module, stand_in in gone}
    for holder in list(parts.model.modules()):
        for name, child in holder.named_children():
            if id(child) in stand_ins:
                holder._modules[name] = stand_ins[id(child)].train(child.training)
    for module, _ in gone:  # whoever still knows it keeps no weight alive
        module.to("meta")
    return replace(parts, **kept)


def tied_copies(structure: PreTrainedModel, before: ModelParts, after: ModelParts) -> dict[str, str]:
    """The name of the head where another stage has the embedding that it is tied to, and that one's."""
    table, head = structure.get_input_embeddings(), structure.get_output_embeddings()
    if after.head is not before.head or table.weight is not head.weight:
        return {}
    every = structure.named_parameters(remove_duplicate=False)
    first = {id(p): name for name, p in structure.named_parameters()}
    of_head = next(name for name, p in after.model.named_parameters() if p is after.head.weight)
    return {name: first[id(p)] for name, p in every if name == of_head}


@contextmanager
def only(stage: Stage, parts: ModelParts) -> Iterator[None]:
    """Let the decoder be one stage of those that this rank has, for the length of a call."""
    layers, children = parts.layer_list._modules, parts.decoder._modules
    others = {name: layer for name, layer in layers.items() if int(name) not in stage.layers}
    norms = {
        name: child
        for name, child in children.items()
        if child is not None and child is parts.final_norm and not stage.is_last
    }
    layers.update(dict.fromkeys(others, PASS))
    children.update(dict.fromkeys(norms, IDENTITY))
    try:
        yield
    finally:
        layers.update(others)
        children.update(norms)


@contextmanager
def _replaced(names: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)


def check_stages(parts: ModelParts) -> None:
    """Refuse a decoder that does more to hidden states than its layers and its final norm: every stage would
    do it again.
    """
    name = type(parts.model).__name__
    weight = parts.model.get_input_embeddings().weight
    hidden = torch.zeros(1, 2, int(parts.config.hidden_size), dtype=weight.dtype, device=weight.device)
    # Masks, which no layer sees, are made by looking at numbers, of which a meta device has none.
    family = vars(sys.modules[type(parts.decoder).__module__])
    masks = {key: lambda *_, **__: None for key in family if key.startswith("create_")}
    with _replaced(family, masks), ExitStack() as stack, torch.no_grad():
        for layer in parts.layers:
            stack.enter_context(forward_replaced(layer.module, PASS.forward))
        if parts.final_norm is not None:
            stack.enter_context(forward_replaced(parts.final_norm, PASS.forward))
        try:
            found = parts.decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        except Exception as error:
            raise ValueError(
                f"the decoder of {name} does not run on hidden states alone ({type(error).__name__}: "
                f"{error}), so it cannot be cut into stages; use pp=1"
            ) from error
    if found is not hidden:
        raise ValueError(
            f"the decoder of {name} changes hidden states outside of its layers and its final norm (by "
            "positions, a scale or a norm of embeddings), which every stage would do again; use pp=1"
        )
