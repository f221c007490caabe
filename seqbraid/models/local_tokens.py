"""What a loss of the user's own is given: this rank's tokens, and what the model says of their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm.group import Group
from ..layout.labels import IGNORE
from ..ops.cross_entropy import VocabularyShard
from ..ops.kernels import Kernels
from ..ops.linear_kl import TeacherHead, linear_kl
from ..ops.linear_logprobs import linear_logprobs
from ..sequence_parallel.samples import sums_at_tokens, sums_on_first
from .agreement import check_temperature
from .batch import PackedBatch


@dataclass(frozen=True)
class LocalRow:
    """This rank's tokens of a row and the group of ranks that hold the others.

    All ranks of the group must ask for the same sums in the same order.
    """

    batch: PackedBatch
    group: Group = field(repr=False)

    @property
    def targets(self) -> Tensor:
        """`[T]`: what each token is to predict; −100 for nothing."""
        return self.batch.targets

    @property
    def labelled(self) -> Tensor:
        """`[T]`: whether a token has a target."""
        return self.batch.targets != IGNORE

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """`[T, …]` by name: for each token what its sample says of the target. A number that a sample has as
        a whole stands at each of its tokens.
        """
        samples = self.batch.plans.samples(self.targets.device)
        spread = {name: samples.spread(values) for name, values in self.batch.scalars.items()}
        return {**self.batch.fields, **spread}

    @property
    def scalars(self) -> Mapping[str, Tensor]:
        """By name what each sample has as a whole, for what `sample_sums` gives: `[N]` on the first rank of
        the row, `[0]` on the others.
        """
        return {name: x if self.group.rank == 0 else x[:0] for name, x in self.batch.scalars.items()}

    def sample_sums(self, values: Tensor) -> Tensor:
        """The sum of `[T]` values over all tokens of each sample, in the order in which samples were packed:
        `[N]` on the first rank of the row and `[0]` on the others, so that each sample's term is counted
        once. Its gradient reaches the tokens on every rank. Give 0 for tokens that do not count.
        """
        self._check(values)
        return sums_on_first(values, self.batch.plans.samples(values.device), self.group)

    def sums_at_tokens(self, values: Tensor) -> Tensor:
        """The same sums, `[T]`: at each token that of its sample."""
        self._check(values)
        return sums_at_tokens(values, self.batch.plans.samples(values.device), self.group)

    def _check(self, values: Tensor) -> None:
        if values.shape != self.targets.shape or not values.is_floating_point():
            raise ValueError(
                f"a sum over samples takes one floating point number for each of this rank's "
                f"{len(self.targets)} tokens, not {values.dtype} of shape {tuple(values.shape)}"
            )


@dataclass(frozen=True)
class TokenLogprobs(LocalRow):
    """What `model.token_logprobs` gives: this rank's values, aligned with `batch.targets`."""

    logprobs: Tensor
    """`[T]`: of each target given what is before it; 0 where there is none. Differentiable."""
    entropy: Tensor | None = None
    """`[T]`: of the distribution that the target is drawn from; None where it was not asked for."""

    def per_sample(self, values: Tensor | None = None) -> list[Tensor]:
        """Values `[T]` of this rank, by default the log-probabilities, as one tensor per sample on every rank
        of the row: detached, and unshifted as labels are, entry t for label t and 0 for the first. So they
        can go into the `fields` of the sample. All ranks of the row call it.
        """
        own = self.logprobs if values is None else values
        layout = self.batch.layout
        row = layout.unshard(self.group.all_gather(own.detach().contiguous()))
        return [_unshifted(of_sample) for of_sample in row.split(list(layout.lengths))]


def _unshifted(values_T: Tensor) -> Tensor:
    found = values_T.roll(1, 0)
    found[0] = 0
    return found


@dataclass(frozen=True)
class HeadPart:
    """What makes logits on this rank."""

    weight: Tensor
    bias: Tensor | None
    shard: VocabularyShard | None
    kernels: Kernels
    chunk: int | None

    def logprobs(
        self, hidden_TD: Tensor, targets_T: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, ...]:
        """See `linear_logprobs`."""
        return linear_logprobs(
            hidden_TD,
            self.weight,
            targets_T,
            self.bias,
            temperature,
            entropy,
            self.chunk,
            self.kernels,
            self.shard,
        )


ASKED = ("sample_sums", "sums_at_tokens", "failure", "end")
"""What ranks of a row tell each other in a loss, so that none waits for one that has failed."""

ORDER = (
    "the ranks that share a row called sample_sums and sums_at_tokens in different orders, or some of them "
    "more often; let a loss make the same calls on every rank, with zeros for what does not count"
)


@dataclass(frozen=True)
class LocalTokens(LocalRow):
    """This rank's tokens of a micro-batch, as a loss of the user's own sees them (`TokenLoss`).

    Under tensor parallelism the ranks that share a token all see it, and must make the same of it.
    """

    hidden_TD: Tensor = field(repr=False)
    head: HeadPart = field(repr=False)
    tp: Group = field(repr=False)
    made: list[Tensor] = field(default_factory=list, repr=False)
    """What every rank has a backward of, used or not."""
    of_head: list[Tensor] = field(default_factory=list, repr=False)
    """What was made with the head."""
    asked: list[Tensor] = field(default_factory=list, repr=False)
    """How many ranks of the row asked for each of `ASKED`, time after time; nobody waits for these numbers
    before the end.
    """

    @property
    def hidden(self) -> Tensor:
        """`[T, D]`: hidden states after the final norm."""
        if self.tp.size == 1:
            return self.hidden_TD
        return self._noted(_GradientOfFirst.apply(self.hidden_TD, self.tp.rank == 0))  # type: ignore[no-untyped-call]

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """`[T]`: the log-probability of each target, 0 where there is none; logits are divided by
        the temperature.
        """
        temperature = check_temperature(temperature)
        return self._of_head(self.head.logprobs(self.hidden_TD, self.targets, temperature, False)[0])

    def logprobs_and_entropy(self, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The same, and the entropies of the distributions that the targets are drawn from."""
        temperature = check_temperature(temperature)
        logprobs_T, entropy_T = self.head.logprobs(self.hidden_TD, self.targets, temperature, True)
        return self._of_head(logprobs_T), self._of_head(entropy_T)

    def kl(
        self,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """`[T]`: KL(teacher ‖ model) over the whole vocabulary at each token with a target, 0 at the others.

        Args:
            teacher_hidden: `[T, E]`, the teacher's hidden states at the same tokens.
            teacher_weight: `[V, E]`, the weight of its head, whole on every rank.
            teacher_bias: `[V]`.
            temperature: what the logits of both are divided by.
        """
        weight, bias = teacher_weight, teacher_bias
        self._check_teacher(teacher_hidden, weight)
        if self.head.shard is not None:
            own = slice(self.head.shard.start, self.head.shard.start + len(self.head.weight))
            weight, bias = weight[own], None if bias is None else bias[own]
        found = linear_kl(
            self.hidden_TD,
            self.head.weight,
            self.labelled.nonzero()[:, 0],
            TeacherHead(teacher_hidden, weight, bias),
            self.head.bias,
            check_temperature(temperature),
            None if self.head.chunk is None else max(1, self.head.chunk // 2),
            self.head.shard,
        )
        return self._of_head(found)

    def sample_sums(self, values: Tensor) -> Tensor:
        self._check(values)
        self._ask("sample_sums")
        return self._noted(super().sample_sums(values))

    def sums_at_tokens(self, values: Tensor) -> Tensor:
        self._check(values)
        self._ask("sums_at_tokens")
        return self._noted(super().sums_at_tokens(values))

    def _ask(self, what: str) -> Tensor:
        if self.group.size == 1:
            return torch.empty(0)
        own = [float(what == name) for name in ASKED]
        self.asked.append(
            self.group.all_reduce(torch.tensor(own, dtype=torch.float64).to(self.targets.device))
        )
        return self.asked[-1]

    def end(self, error: Exception | None) -> tuple[bool, Exception | None]:
        """Called by all ranks of the row when they are done with the loss, or have failed: whether one has,
        and what this rank raises. What others still ask for, it takes part in.
        """
        if self.group.size == 1:
            return error is not None, error
        while sum(self._ask("end" if error is None else "failure")[:2].tolist()):
            if error is None:
                error = ValueError(ORDER)
            numbers = torch.zeros(len(self.batch.layout.lengths), dtype=torch.float64)
            self.group.all_reduce(numbers.to(self.targets.device))
        asked = torch.stack(self.asked).tolist()
        if error is None and any(0 < times < self.group.size for row in asked for times in row[:2]):
            error = ValueError(ORDER) if not any(row[ASKED.index("failure")] for row in asked) else None
        has_failed = error is not None or any(row[ASKED.index("failure")] for row in asked)
        if has_failed:  # on some ranks; what each has made is another thing
            self.made.clear()
            self.of_head.clear()
        return has_failed, error

    @property
    def tied(self) -> list[Tensor]:
        """What must have a gradient on every rank if it has one on any, be it of zeros."""
        head = [] if self.of_head else [x for x in (self.head.weight, self.head.bias) if x is not None]
        return [self.hidden_TD, *head, *self.made, *self.of_head]

    def _of_head(self, x: Tensor) -> Tensor:
        self.of_head.append(x)
        return x

    def _noted(self, x: Tensor) -> Tensor:
        self.made.append(x)
        return x

    def _check_teacher(self, hidden: Tensor, weight: Tensor) -> None:
        whole = len(self.head.weight) if self.head.shard is None else None
        if hidden.ndim != 2 or len(hidden) != len(self.targets) or hidden.shape[1:] != weight.shape[1:]:
            raise ValueError(
                f"the teacher's hidden states are {tuple(hidden.shape)} and its head {tuple(weight.shape)}; "
                f"they are [{len(self.targets)}, E], one for each of this rank's tokens, and [V, E]"
            )
        if whole is not None and len(weight) != whole:
            raise ValueError(
                f"the teacher's head has {len(weight)} tokens, the model's {whole}; distillation over the "
                "whole vocabulary needs the same one"
            )
        if hidden.dtype != weight.dtype:
            raise ValueError(
                f"the teacher's hidden states are {hidden.dtype}, its head is {weight.dtype}; convert one"
            )


class _GradientOfFirst(torch.autograd.Function):
    """What ranks compute alike has one gradient: that of the first, as the sum over them is taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx if ctx.is_first else torch.zeros_like(dx), None


TokenLoss = Callable[[LocalTokens], Tensor | tuple[Tensor, Mapping[str, Tensor]]]
"""A loss of the user's own: the differentiable sum over this rank's tokens, and beside it, if wanted, other
sums by name, which the step adds over all ranks (`StepOutput.metrics`).
"""
