"""What is needed of a stock decoder, found by its features, and refused where it cannot be kept exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..mesh import Mesh
from ..sequence_parallel.context import StepContext
from ..sequence_parallel.gated_delta_bytes import CHOICES
from ..sequence_parallel.gated_delta_heads import GatedDeltaHeads
from ..sequence_parallel.ulysses import SoftmaxHeads
from . import attention
from .batch import PackedBatch
from .decoder_checks import check_config, check_embeddings, check_mixers
from .dropout import braid_dropout, is_active
from .expert_check import check_experts, refuse_adapted_experts
from .experts import BraidedExperts, are_experts, braid_experts, count_of_all
from .fused import fuse_parts
from .gated_delta import braid_gated_delta, unbraid_gated_delta
from .head import check_nothing_around, check_plain_head
from .mixers import gated_delta_sizes, local_heads
from .mtp_module import NAME as MTP
from .mtp_step import MtpOutput, run_mtp
from .parts import ModelParts
from .randomness import no_random_numbers, refuse_random_layers
from .router import check_router_loss
from .running import bind_layer, running, unbind
from .stage import Stage, StageCall, check_stages, keep_stages, only
from .tensor import TensorPlan

MARK = "_is_braided"
"""An attribute of a model from `braid` to `unbraid`."""


@dataclass(frozen=True)
class DecoderOutput:
    """What a decoder gives for this rank's tokens."""

    hidden_TD: Tensor
    """After the final norm; `[1, T, D]` after its last layer, of a pipeline stage that is not the last."""
    router_logits: tuple[Tensor, ...] | None = None
    """`[T, E]` per layer with experts; None where they were not asked for."""
    expert_counts: Tensor | None = None
    """Where this rank's tokens went (`experts.count_of_all`)."""
    mtp: MtpOutput | None = None
    """What multi-token prediction gives; None where it was not asked for."""
    embeds_1TD: Tensor | None = None
    """What the first layer was given, where the last pipeline stage is to predict from it."""


class Adapter:
    """A text decoder of transformers, whose mixers we take over."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.name = type(model).__name__
        if MARK in vars(model):  # first of all: what is sharded would be gathered by the calls below
            raise ValueError(
                f"this {self.name} is parallelized already; call release() on what parallelize gave before "
                "it is parallelized again"
            )
        self.stock_attention: str = self.config._attn_implementation
        check_config(self.config, self.name)  # first, as a kind of layers says more than where they are
        self.parts = ModelParts.of(model)
        self.head, self.decoder = self.parts.head, self.parts.decoder
        self.mtp = None if self.parts.mtp is None else self.parts.mtp.module.options
        """Of multi-token prediction, whichever pipeline stage has its module."""
        self.has_learned_positions = _has_learned_positions(self.parts)
        self.gated_delta: list[Any] = [x.mixer for x in self.parts.layers if x.kind == "gated_delta"]
        self._router_is_known = False
        self._bound: list[nn.Module] = []
        self.experts: list[BraidedExperts] = []
        """One for each layer that has some, in their order, from `braid` on."""
        check_mixers(self.model, self.decoder, self.gated_delta)
        refuse_adapted_experts(self.parts)
        self._embeddings = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
        check_embeddings(self._embeddings, self.name)
        check_nothing_around(model, self.decoder, self.head)

    def check_mesh(self, mesh: Mesh, gated_delta: str) -> TensorPlan | None:
        """What the mesh requires of the model, checked before any communication; gives what tensor parallel
        ranks share, None for one.
        """
        for name, module in self._embeddings.items() if mesh.world_size > 1 else ():
            if module.sparse:
                raise ValueError(
                    f"{name} of {self.name} has sparse=True, whose gradients ranks cannot add up; set "
                    f"{name}.sparse to False"
                )
        if mesh.pp > 1:
            check_stages(self.parts)
        tensor = None if mesh.tp == 1 else TensorPlan.of_mesh(self.parts, mesh)
        if mesh.ep > 1:
            check_experts(self.parts, mesh.ep)
        for layer in self.parts.every_layer:
            if layer.mixer is not None and layer.kind != "gated_delta":
                heads = local_heads(self.parts.heads(layer), mesh.tp, mesh.axis_rank("tp"))
                SoftmaxHeads(heads.num_queries, heads.num_keys, mesh.ulysses)
        if gated_delta not in CHOICES:
            choices = ", ".join(repr(choice) for choice in CHOICES)
            raise ValueError(f"gated_delta={gated_delta!r} is unknown; use one of {choices}")
        if gated_delta == "heads":
            for module in self.gated_delta:
                sizes = gated_delta_sizes(module)
                GatedDeltaHeads(sizes.num_keys // mesh.tp, sizes.num_values // mesh.tp, mesh.sequence_size)
        return tensor

    def braid(self) -> None:
        """Take over the mixers; calls without a step context behave as before."""
        self._set_attention(attention.NAME)
        if self.config._attn_implementation != attention.NAME:
            raise ValueError(
                f"{self.name} ignores set_attn_implementation (it does not use transformers' attention "
                "interface), so its attention cannot be replaced"
            )
        for module in self.gated_delta:
            braid_gated_delta(module)
        self._braid_parts()
        vars(self.model)[MARK] = True

    def _braid_parts(self) -> None:
        """Experts, dropout, norms, gates and rotations, wherever they are; layers that have some say which
        step they run for.
        """
        for module in (part for layer in self.parts.every_layer for part in layer.experts):
            if are_experts(module) and "forward" not in vars(module):  # layers may share one
                self.experts.append(braid_experts(module, len(self.experts)))
                self._bound.append(module)
        for name, module in self._text_modules():
            if isinstance(module, nn.Dropout):
                braid_dropout(module, name)
                self._bound.append(module)
        self._bound += fuse_parts(self.decoder)
        if self.parts.mtp is not None:
            self._bound += fuse_parts(self.parts.mtp.module)
        inside = {id(module) for module in self._bound}
        for layer in (part.module for part in self.parts.every_layer):
            if any(id(module) in inside for module in layer.modules()):
                bind_layer(layer)
                self._bound.append(layer)

    def _text_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Of the decoder and of multi-token prediction, by name."""
        yield from self.decoder.named_modules()
        if self.parts.mtp is not None:
            yield from self.parts.mtp.module.named_modules(prefix=MTP)

    @property
    def dropping(self) -> dict[str, nn.Dropout]:
        """The dropout that would be drawn now."""
        return {name: module for name, module in self._text_modules() if is_active(module)}

    def unbraid(self) -> None:
        """Give the stock model back as it came."""
        self._set_attention(self.stock_attention)
        for module in self.gated_delta:
            unbraid_gated_delta(module)
        for module in self._bound:
            unbind(module)
        self._bound, self.experts = [], []
        del vars(self.model)[MARK]

    def keep(self, stages: Sequence[Stage]) -> None:
        """Leave the model some of its pipeline stages; `unbraid` does not bring the others back."""
        self.parts = keep_stages(self.parts, stages)
        self.head = self.parts.head
        self._embeddings = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Embedding)}

    def _set_attention(self, name: str) -> None:
        self._set_main_attention(name)
        if self.parts.mtp is not None:  # whose layers have a config of their own
            self.parts.mtp.module.config._attn_implementation = name

    def _set_main_attention(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    @property
    def uses_router_loss(self) -> bool:
        """Whether the stock model would add the load-balancing loss of its routers."""
        return bool(getattr(self.config, "output_router_logits", False))

    def check_step(self, batches: Sequence[PackedBatch], seed: int | None) -> None:
        """What may have changed since `braid`, or is asked of the model here, and would make a step wrong."""
        found = self.config._attn_implementation
        if found != attention.NAME:
            raise ValueError(
                f"the attention implementation of {self.name} was changed to {found!r} after parallelize; "
                f"set it back to {attention.NAME!r} or call parallelize again"
            )
        if self.model.get_output_embeddings() is not self.head:
            raise ValueError(
                f"the head of {self.name} was replaced after parallelize; call release() first and "
                "parallelize again"
            )
        if isinstance(self.head, nn.Linear):  # else another stage has it
            check_plain_head(self.head, self.name)
        check_embeddings(self._embeddings, self.name)
        if self.is_training:
            text = (module for _, module in self._text_modules())
            refuse_random_layers(self.model, text, self.config, self.name)
        for name, module in self.dropping.items() if seed is None else ():
            raise ValueError(
                f"{self.name} trains with dropout {module.p} at {name!r}; pass the seed it is drawn from, "
                "model(batch, seed=…), the same for all batches and ranks of an optimizer step and a "
                "different one for every step; or set it to 0, or call .eval()"
            )
        if self.uses_router_loss and not self._router_is_known:
            check_router_loss(self.model, self.config)
            self._router_is_known = True
        for batch in batches:
            self._check_positions(batch)

    @property
    def is_training(self) -> bool:
        """Whether what is random in training would be drawn: by the decoder's own mode."""
        return any(layer.training for layer in self.parts.layer_list)

    def _check_positions(self, batch: PackedBatch) -> None:
        if not self.has_learned_positions:
            return
        longest, limit = max(batch.layout.lengths), self.config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"a sample has {longest} tokens, but {self.name} has learned positions for {limit} "
                f"(max_position_embeddings={limit}); truncate the sample"
            )

    def decode(
        self,
        batch: PackedBatch,
        context: StepContext,
        with_router: bool,
        with_mtp: bool = False,
        call: StageCall | None = None,
    ) -> DecoderOutput:
        """The decoder, or one stage of it, on this rank's tokens, and the depths of multi-token prediction
        behind it.
        """
        extra = {"output_router_logits": True} if with_router else {}
        mtp = None
        positions_4T = batch.positions
        device = batch.input_ids.device
        with ExitStack() as stack:
            stack.enter_context(running(context))
            if call is not None:
                stack.enter_context(only(call.stage, self.parts))
            if self.is_training:
                stack.enter_context(no_random_numbers(device, self.config, self.name))
            received = None if call is None else call.hidden_TD
            inputs = self._inputs(batch, context) if received is None else {"inputs_embeds": received[None]}
            if with_mtp and "inputs_embeds" not in inputs:
                inputs = {"inputs_embeds": self.parts.embedding(inputs["input_ids"])}
            embeds_1TD = inputs["inputs_embeds"] if with_mtp else None
            if with_mtp and call is not None and call.embeds_TD is not None:
                embeds_1TD = call.embeds_TD[None]
            outputs = self.decoder(
                **inputs,
                position_ids=positions_4T[:, None] if self._multimodal_rope() else positions_4T[:1],
                attention_mask=attention.no_mask(device),
                use_cache=False,
                braid=context,
                **extra,
            )
            is_last = call is None or call.stage.is_last
            if embeds_1TD is not None and is_last:
                hidden_TD = outputs.last_hidden_state.squeeze(0)
                embeds_TD = embeds_1TD.squeeze(0)
                mtp = run_mtp(self.parts, hidden_TD, embeds_TD, batch, context, self.experts, with_router)
        layers = range(self.config.num_hidden_layers) if call is None else call.stage.layers
        missing = set(layers) - context.mixed_layers
        if missing:
            raise ValueError(
                f"layers {sorted(missing)} of {self.name} ran neither through transformers' attention "
                "interface nor through a known gated-delta module, so packed samples may have leaked "
                "into each other there"
            )
        counts = count_of_all(self.experts, context, device, of_stage=call is not None)
        counts = _with_mtp(counts, mtp, len(self.experts))
        hidden = outputs.last_hidden_state
        if is_last:
            hidden, embeds_1TD = hidden.squeeze(0), None
        if not with_router:
            return DecoderOutput(hidden, None, counts, mtp, embeds_1TD)
        router = getattr(outputs, "router_logits", None)
        if not router and call is None:  # a stage may have none
            raise ValueError(f"{self.name} has output_router_logits set but gives no router logits")
        if router and torch.is_grad_enabled() and not router[-1].requires_grad:
            self._check_routers_learn_nothing(layers)
        return DecoderOutput(hidden, tuple(router or ()), counts, mtp, embeds_1TD)

    def _check_routers_learn_nothing(self, layers: range) -> None:
        """Of logits without a gradient: whether nothing learns that they follow from."""
        own = [layer for layer in self.parts.layers if layer.index in layers]
        last = next(layer for layer in reversed(own) if layer.experts)
        before = [layer.module for layer in own if layer.index < last.index]
        learners = [self.parts.embedding, *before, *([] if last.router is None else [last.router])]
        if any(p.requires_grad for module in learners for p in module.parameters()):
            raise ValueError(
                f"the router logits of {self.name} have no gradient, so its router loss would have none: "
                "gradient checkpointing with use_reentrant=True loses it; pass use_reentrant=False to it, or "
                "memory=MemoryOptions('full') to parallelize"
            )

    def _inputs(self, batch: PackedBatch, context: StepContext) -> dict[str, Any]:
        """What the decoder starts from: the tokens of this rank."""
        return {"input_ids": batch.input_ids[None]}

    def _multimodal_rope(self) -> bool:
        parameters = getattr(self.config, "rope_parameters", None) or {}
        return "mrope_section" in parameters


def _with_mtp(counts: Tensor | None, mtp: MtpOutput | None, num_experts: int) -> Tensor | None:
    """Counts of the decoder's experts and of those behind them; a stage has rows for all of them already."""
    if counts is None or mtp is None or mtp.expert_counts is None:
        return counts
    if len(counts) < num_experts:
        return torch.cat([counts, mtp.expert_counts])
    first = num_experts - len(mtp.expert_counts)
    return torch.cat([counts[:first], mtp.expert_counts])


def _has_learned_positions(parts: ModelParts) -> bool:
    """Whether positions are looked up in a table, which ends somewhere."""
    names = {id(module): name for name, module in parts.decoder.named_modules()}
    found = [names[id(table)] for table in parts.other_embeddings]
    limit = getattr(parts.config, "max_position_embeddings", None)
    return bool(limit) and any("pos" in name or "wpe" in name for name in found)
