"""Defects of losses of tokens and samples: a field at the wrong token, a term counted twice."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ..data import fields as fields_module
from ..models import local_tokens as tokens_module
from ..ops import linear_logprobs as logprobs_module
from ..sequence_parallel import samples as samples_module
from .mutants import Mutant


def _field_not_shifted() -> AbstractContextManager[Any]:
    """Entry t of a field stands at token t, whose target is label t + 1."""
    return patch.object(fields_module, "shifted_values", lambda values: values)


def _terms_of_every_rank() -> AbstractContextManager[Any]:
    """Each rank of a row counts each sample's term."""
    right = samples_module.sums_on_first

    def sums_on_all(values: Any, samples: Any, group: Any) -> Any:
        return right(values, samples, replace(group, rank=0))

    stack = ExitStack()
    stack.enter_context(patch.object(tokens_module, "sums_on_first", sums_on_all))
    whole = property(lambda self: self.batch.scalars)
    stack.enter_context(patch.object(tokens_module.LocalRow, "scalars", whole))
    return stack


def _gradient_of_own_tokens() -> AbstractContextManager[Any]:
    """A sample's term reaches the tokens of the rank that counts it, and no others."""
    return patch.object(
        samples_module._SumsOnFirst,
        "backward",
        lambda ctx, dsums: (
            ctx.samples.spread(dsums if ctx.group.rank == 0 else dsums.new_zeros(len(ctx.samples.counts_N))),
            None,
            None,
        ),
    )


def _temperature_left_out() -> AbstractContextManager[Any]:
    """Logits are divided by the temperature, their gradient is not."""
    right = logprobs_module._LogprobRows.backward
    return patch.object(
        logprobs_module._LogprobRows,
        "backward",
        lambda self, *args: right(self, *args) * self.temperature,
    )


LOSS_MUTANTS: tuple[Mutant, ...] = (
    Mutant("a field not shifted", _field_not_shifted, "llama"),
    Mutant("the temperature missing in the gradient", _temperature_left_out, "llama"),
    Mutant("a sample's term counted on every rank", _terms_of_every_rank, "llama", ring=2),
    Mutant("a sample's gradient on one rank alone", _gradient_of_own_tokens, "llama", ring=2),
)
"""Each is seen by `objective.POLICY`."""
