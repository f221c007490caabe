"""Gated-delta layers by a head all-to-all: each rank gets its heads of all tokens of the split sequences.

One exchange carries the inputs of the convolution and of the gates, one brings the outputs back; in between a
rank runs whole sequences, so neither halo nor state leaves it. Sequences that live whole on a rank stay
there, with all their heads.

Letters: T slots of this rank, n open tokens of this rank, N open tokens of the group, P ranks, C channels of
q, k and v side by side, W width of the convolution, G key heads, H value heads, K and V their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..comm.all_to_all import all_to_all
from ..comm.group import Group
from ..layout import SequenceLayout
from ..ops.conv import causal_conv
from ..ops.gated_delta import gated_delta_rule
from ..ops.kernels import DEFAULT, Kernels
from .gated_delta_layer import GatedDeltaLayer
from .ulysses import tokens_for_heads

EXCHANGE = "gated delta heads"
"""What the bytes of both exchanges are counted under."""


@dataclass(frozen=True)
class GatedDeltaHeads:
    """Which heads each rank computes: equal runs of key heads, and the value heads that use them."""

    num_key_heads: int
    num_value_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_key_heads} key heads do not divide {self.num_value_heads} value heads"
            )
        if self.num_key_heads % self.size:
            valid = [str(n) for n in range(1, self.num_key_heads + 1) if self.num_key_heads % n == 0]
            raise ValueError(
                f"ring × ulysses = {self.size} does not divide {self.num_key_heads} key heads (with "
                f"{self.num_value_heads} value heads), but the head all-to-all needs the same number on "
                f'every rank; use {" or ".join(valid)} ranks, or state passing (gated_delta="states"), '
                "which takes any number of heads"
            )

    def layer_of(self, layer: GatedDeltaLayer, rank: int) -> GatedDeltaLayer:
        """A rank's heads of a layer, as a smaller layer; gradients go to the slices, zeros elsewhere."""
        weight_CW, bias_C = layer.conv_weight_CW, layer.conv_bias_C
        return layer._replace(
            conv_weight_CW=self._channels(weight_CW, layer, rank),
            conv_bias_C=None if bias_C is None else self._channels(bias_C, layer, rank),
            A_log_H=layer.A_log_H.chunk(self.size)[rank],
            dt_bias_H=layer.dt_bias_H.chunk(self.size)[rank],
            num_key_heads=self.num_key_heads // self.size,
            num_value_heads=self.num_value_heads // self.size,
        )

    def _channels(self, x: Tensor, layer: GatedDeltaLayer, rank: int) -> Tensor:
        return torch.cat([part.chunk(self.size)[rank] for part in x.split(layer.widths)])


@dataclass(frozen=True)
class HeadExchangePlan:
    """Which rows of a rank change hands, and how those that arrive make whole sequences.

    From the layout alone, so one serves all layers of a step.
    """

    open_rows_n: Tensor
    """Slots with tokens of sequences that live on more than one rank, in local order."""
    open_tokens: tuple[int, ...]
    """How many such tokens each rank holds."""
    sequence_order_N: Tensor
    """For the open sequences laid end to end, where each token stands among those that arrive."""
    arrival_order_N: Tensor
    """Of each token that arrives, its place among them: the way back for the outputs."""
    open_cu: tuple[int, ...]
    """Boundaries of the open sequences laid end to end."""
    home_rows: Tensor
    """Slots with tokens of sequences that live whole on this rank, sequence by sequence."""
    home_cu: tuple[int, ...]
    """Boundaries of those sequences laid end to end."""

    @staticmethod
    def of(layout: SequenceLayout, rank: int, device: torch.device | str = "cpu") -> HeadExchangePlan:
        """The plan of one rank."""
        lengths = torch.tensor(layout.lengths)
        is_open = torch.tensor([layout.is_split(i) for i in range(len(lengths))])
        token_is_open = is_open.repeat_interleave(lengths)
        index_PT = torch.stack([layout.index(r) for r in range(layout.num_ranks)])
        slot_is_open_PT = (index_PT >= 0) & token_is_open[index_PT.clamp(min=0)]
        # Of an open token, its place when the open sequences are laid end to end.
        place = token_is_open.cumsum(0) - 1
        arrival_order_N = place[index_PT[slot_is_open_PT]]
        sequence_order_N = torch.empty_like(arrival_order_N)
        sequence_order_N[arrival_order_N] = torch.arange(len(arrival_order_N))

        home = [s for s in layout.segments(rank) if not layout.is_split(s.sequence)]
        home.sort(key=lambda s: (s.sequence, s.start))
        home_rows = [torch.arange(s.offset, s.offset + s.num_tokens) for s in home]
        home_lengths = [layout.lengths[i] for i in sorted({s.sequence for s in home})]
        return HeadExchangePlan(
            slot_is_open_PT[rank].nonzero().flatten().to(device),
            tuple(slot_is_open_PT.sum(1).tolist()),
            sequence_order_N.to(device),
            arrival_order_N.to(device),
            tuple(accumulate(lengths[is_open].tolist(), initial=0)),
            torch.cat([torch.empty(0, dtype=torch.long), *home_rows]).to(device),
            tuple(accumulate(home_lengths, initial=0)),
        )

    def to(self, device: torch.device) -> HeadExchangePlan:
        """The plan with its indices on another device."""
        names = ("open_rows_n", "sequence_order_N", "arrival_order_N", "home_rows")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def is_exchanging(self) -> bool:
        """Whether any token of the group is open: the same answer on every rank."""
        return len(self.open_cu) > 1


def mixing_by_heads(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    layer: GatedDeltaLayer,
    plan: HeadExchangePlan,
    group: Group,
    kernels: Kernels = DEFAULT,
) -> Tensor:
    """The rule's outputs `[T, H, V]` for this rank's slots, whole sequences to every head; padding gets 0."""
    assert mixed_TC.dtype == b_TH.dtype == a_TH.dtype and len(plan.open_tokens) == group.size
    heads = GatedDeltaHeads(layer.num_key_heads, layer.num_value_heads, group.size)
    rows, outs = [], []
    if plan.is_exchanging:
        own = heads.layer_of(layer, group.rank)
        arrived = _heads_for_tokens(*_select(plan.open_rows_n, mixed_TC, b_TH, a_TH), layer, plan, group)
        widths = [sum(own.widths), own.num_value_heads, own.num_value_heads]
        mixed, b, a = arrived.index_select(0, plan.sequence_order_N).split(widths, dim=1)
        out_NHV = _mix_whole_sequences(mixed, b, a, own, plan.open_cu, kernels)
        out_NHV = out_NHV.index_select(0, plan.arrival_order_N)
        rows.append(plan.open_rows_n)
        outs.append(tokens_for_heads(out_NHV, plan.open_tokens, group, EXCHANGE))
    if len(plan.home_rows) or not plan.is_exchanging:
        # Also where there is nothing but padding, so that every parameter gets a gradient on every rank.
        rows.append(plan.home_rows)
        home = _select(plan.home_rows, mixed_TC, b_TH, a_TH)
        outs.append(_mix_whole_sequences(*home, layer, plan.home_cu, kernels))
    out_THV = mixed_TC.new_zeros(len(mixed_TC), layer.num_value_heads, layer.value_dim)
    return out_THV.index_copy(0, torch.cat(rows), torch.cat(outs))


def _select(rows: Tensor, mixed_TC: Tensor, b_TH: Tensor, a_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return mixed_TC.index_select(0, rows), b_TH.index_select(0, rows), a_TH.index_select(0, rows)


def _heads_for_tokens(
    mixed_nC: Tensor, b_nH: Tensor, a_nH: Tensor, layer: GatedDeltaLayer, plan: HeadExchangePlan, group: Group
) -> Tensor:
    """Our heads' channels of all open tokens, those of q, k, v, b and a side by side, in rank order."""
    parts = [*mixed_nC.split(layer.widths, dim=1), b_nH, a_nH]
    # Of each, the run of every rank: [P, n, width / P].
    sent = torch.cat([x.unflatten(1, (group.size, -1)).transpose(0, 1) for x in parts], dim=2)
    width = sent.shape[2]
    arrived = all_to_all(
        sent.flatten(),
        [len(mixed_nC) * width] * group.size,
        [count * width for count in plan.open_tokens],
        group,
        EXCHANGE,
    )
    return arrived.view(-1, width)


def _mix_whole_sequences(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    layer: GatedDeltaLayer,
    cu: tuple[int, ...],
    kernels: Kernels,
) -> Tensor:
    """Convolution and rule over sequences that are all here, from their first token to their last."""
    convolved_TC = causal_conv(
        mixed_TC, layer.conv_weight_CW, layer.conv_bias_C, cu, activation=layer.activation, kernels=kernels
    )
    q, k, v = layer.split(convolved_TC)
    out_THV, _ = gated_delta_rule(q, k, v, layer.log_decay(a_TH), b_TH.sigmoid(), cu, kernels=kernels)
    return out_THV
