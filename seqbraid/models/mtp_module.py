"""The module of multi-token prediction, as Qwen3.5 and Qwen3-Next have it beside their decoder.

From what the decoder gives for token t, and the embedding of token t + 1, it predicts token t + 2; from its
own output and the embedding of t + 2 token t + 3, and so on, a depth each:

    x = fc([norm_e(embedding of t + k), norm_h(hidden of t)])
    hidden = norm(layer(x));  logits = head(hidden)

`fc` and the norms are there once for all depths, depth d uses layer d mod n; embedding and head are the main
model's. The embeddings are those that the decoder was given, features of media included.

Letters: T tokens of this rank between mixers and MLPs, K depths, R slots with a token that is predicted
from, E experts, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..sequence_parallel.context import StepContext
from ..sequence_parallel.shift import shifted_rows
from .attention import no_mask
from .running import running

NAME = "mtp"
"""What the module is called in a model and in checkpoints."""


@dataclass(frozen=True)
class MtpOptions:
    """How a model is trained to predict several tokens."""

    depth: int = 1
    """Tokens that are predicted beyond the next one."""
    loss_factor: float = 0.3
    """What the mean of the depths' losses is multiplied with."""
    source: str | None = None
    """The folder of the checkpoint whose `mtp.` tensors are read; where the model came from by default."""
    fresh: bool = False
    """Start from random weights, whatever the checkpoint has."""
    only: bool = False
    """Train this module alone: all else is frozen."""
    seed: int = 0
    """Of fresh weights, the same on every rank."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"mtp depth={self.depth} must be at least 1; leave mtp out to train without it")
        if not 0 <= self.loss_factor < float("inf"):
            raise ValueError(f"mtp loss_factor={self.loss_factor} must be a finite number of at least 0")


class MtpHidden(NamedTuple):
    """What the depths give for this rank's tokens."""

    hidden_K1TD: tuple[Tensor, ...]
    """After `norm`: what the head turns into logits, and the next depth starts from. No views, of
    which FSDP warns.
    """
    router_logits: tuple[Tensor, ...]
    """`[R, E]` of each depth whose layer has experts."""


class MtpModule(nn.Module):
    """`fc`, norms, and decoder layers of the family's own class."""

    def __init__(
        self, config: Any, layer: type[nn.Module], norm: type[nn.Module], options: MtpOptions, num_layers: int
    ) -> None:
        super().__init__()
        self.options = options
        self.config = layers_config(config, num_layers)
        self.first_index = int(config.num_hidden_layers)
        """That of the first layer, behind those of the decoder."""
        self.packed = False
        """Whether the checkpoint that it comes from has a layer's experts in one tensor."""
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(layer(self.config, self.first_index + i) for i in range(num_layers))
        self.norm = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.pre_fc_norm_embedding = norm(size, eps=eps)

    def forward(
        self,
        hidden_TD: Tensor,
        embeds_TD: Tensor,
        angles: tuple[Tensor, Tensor],
        routers: Sequence[nn.Module | None],
        context: StepContext,
    ) -> tuple[MtpHidden, list[StepContext]]:
        """All depths, one after the other.

        Args:
            hidden_TD: what the decoder gives, after its final norm.
            embeds_TD: what the decoder was given: embeddings with the features of media among them.
            angles: cosines and sines of the positions of all tokens that mixers see, unshifted.
            routers: of each layer, whose logits are wanted.
            context: of the step.

        Gives the hidden states, and the context that the layer of each depth ran in.
        """
        plan = context.row.shift(self.options.depth, hidden_TD.device)
        embeds_KTD = shifted_rows(embeds_TD, plan, context.row_group, "mtp embeddings")
        found: list[Tensor] = []
        logits: list[Tensor] = []
        contexts: list[StepContext] = []
        for depth, embeds in enumerate(embeds_KTD):
            joined_TC = self.joined(embeds, hidden_TD)
            # The last tokens of a sample have nobody to predict from: as padding, they go to no expert.
            rows_R = plan.has_source_KT[depth].nonzero()[:, 0]
            # Each depth drops out other channels, though a layer may serve several.
            seed = None if context.seed is None else context.seed ^ ((depth + 1) << 40)
            own = replace(context, expert_counts={}, counted_rows=rows_R, seed=seed)
            index = depth % len(self.layers)
            with _recorded(routers[index]) as recorded, running(own):
                x = self.layers[index](
                    self.fc(joined_TC)[None],
                    position_embeddings=angles,
                    attention_mask=no_mask(hidden_TD.device),
                    braid=own,
                )
            found.append(self.norm(x))
            hidden_TD = found[-1].squeeze(0)
            contexts.append(own)
            logits += [logits_TE[rows_R] for logits_TE in recorded]
        return MtpHidden(tuple(found), tuple(logits)), contexts

    def joined(self, embeds_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """What `fc` is given: embeddings first."""
        return torch.cat([self.pre_fc_norm_embedding(embeds_TD), self.pre_fc_norm_hidden(hidden_TD)], dim=-1)


def has_mtp(model: nn.Module) -> bool:
    """Whether a model has such a module."""
    return isinstance(getattr(model, NAME, None), MtpModule)


@contextmanager
def _recorded(router: nn.Module | None) -> Iterator[list[Tensor]]:
    """What a router gives first, its logits, in one call."""
    found: list[Tensor] = []
    if router is None:
        yield found
        return
    handle = router.register_forward_hook(
        lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        yield found
    finally:
        handle.remove()


def layers_config(config: Any, num_layers: int) -> Any:
    """The decoder's config with layers of full attention behind its own, with experts where it has any."""
    found = copy.deepcopy(config)
    kinds = getattr(found, "layer_types", None)
    found.num_hidden_layers = config.num_hidden_layers + num_layers
    if kinds is not None:
        found.layer_types = [*kinds, *["full_attention"] * num_layers]
    if hasattr(found, "mlp_only_layers"):
        found.mlp_only_layers, found.decoder_sparse_step = [], 1
    return found
