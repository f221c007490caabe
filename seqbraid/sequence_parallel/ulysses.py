"""Ulysses: heads for tokens. Each rank of a group gives its tokens' heads away and gets all tokens of
its own heads.

Letters: n tokens of this rank, N tokens of the group, H query heads, G key/value heads, D head size,
u group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.all_to_all import all_to_all
from ..comm.group import Group


@dataclass(frozen=True)
class SoftmaxHeads:
    """Which heads each rank of a Ulysses group computes: equal runs of query heads, and the KV
    heads they use.

    Where a KV head serves query heads of several ranks it goes to all of them, and their gradients add up.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads do not divide {self.num_heads} query heads")
        if self.num_heads % self.size:
            valid = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"ulysses={self.size} does not divide {self.num_heads} query heads; use "
                f"{', '.join(map(str, valid[:-1]))} or {valid[-1]}, and ring for the rest"
            )

    def query_heads(self, rank: int) -> slice:
        """The query heads of a rank."""
        count = self.num_heads // self.size
        return slice(rank * count, (rank + 1) * count)

    def kv_heads(self, rank: int) -> slice:
        """The KV heads that those use."""
        heads, served = self.query_heads(rank), self.num_heads // self.num_kv_heads
        return slice(heads.start // served, (heads.stop - 1) // served + 1)

    def kv_of_query(self, rank: int) -> list[int] | None:
        """For each query head of a rank, its KV head among the rank's own; None where they share
        evenly in order.
        """
        heads, kv = self.query_heads(rank), self.kv_heads(rank)
        served = self.num_heads // self.num_kv_heads
        used = [head // served - kv.start for head in range(heads.start, heads.stop)]
        count, even = kv.stop - kv.start, len(used)
        if even % count == 0 and used == [i // (even // count) for i in range(even)]:
            return None
        return used

    def query_heads_per_kv_head(self, rank: int) -> float:
        """Of the heads that a rank computes with."""
        kv, used = self.kv_heads(rank), self.kv_of_query(rank)
        count = self.num_heads // self.size
        return count / (kv.stop - kv.start if used is None else len(used))


def heads_for_tokens(
    q_nHD: Tensor, k_nGD: Tensor, v_nGD: Tensor, tokens: Sequence[int], plan: SoftmaxHeads, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Give each rank its heads of our tokens; get our heads of all tokens, q, k and v in one exchange.

    `tokens[i]` is how many tokens rank i holds; they may differ.
    """
    if group.size == 1:
        return q_nHD, k_nGD, v_nGD
    parts = []
    for rank in range(group.size):
        q = q_nHD[:, plan.query_heads(rank)]
        parts.append(
            torch.cat([x.flatten(1) for x in (q, _kv_for(k_nGD, plan, rank), _kv_for(v_nGD, plan, rank))], 1)
        )
    mine = plan.kv_heads(group.rank)
    num_kv, num_heads = mine.stop - mine.start, plan.num_heads // plan.size
    widths = [num_heads * q_nHD.shape[2], num_kv * k_nGD.shape[2], num_kv * v_nGD.shape[2]]
    received = all_to_all(
        torch.cat([part.flatten() for part in parts]),
        [part.numel() for part in parts],
        [count * sum(widths) for count in tokens],
        group,
        "ulysses",
    )
    # Token by token in rank order: the row of the group, as it is.
    q, k, v = received.view(-1, sum(widths)).split(widths, dim=1)
    q, k, v = (x.unflatten(1, (heads, -1)) for x, heads in ((q, num_heads), (k, num_kv), (v, num_kv)))
    used = plan.kv_of_query(group.rank)
    return (q, k, v) if used is None else (q, k[:, used], v[:, used])


def _kv_for(x_nGD: Tensor, plan: SoftmaxHeads, rank: int) -> Tensor:
    """The KV heads that a rank's query heads use; their gradients from all ranks add up in the slices."""
    return x_nGD[:, plan.kv_heads(rank)]


def tokens_for_heads(out_NHD: Tensor, tokens: Sequence[int], group: Group, name: str = "ulysses") -> Tensor:
    """Undo the exchange for the outputs: all heads of our own tokens."""
    if group.size == 1:
        return out_NHD
    num_heads, size = out_NHD.shape[1:]
    width = num_heads * size
    own = tokens[group.rank]
    received = all_to_all(
        out_NHD.flatten(), [count * width for count in tokens], [own * width] * group.size, group, name
    )
    # From each rank its heads of our tokens: [u, n, H/u, D] to [n, H, D].
    return received.view(group.size, own, num_heads, size).transpose(0, 1).flatten(1, 2)
