"""Defects of tensor parallelism: a gradient lacks a share, a part is another rank's, a tie is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import fsdp as fsdp_module
from ..distributed import tensor as tensor_module
from ..models import tensor_parts as plan_module
from .mutants import Mutant


def _without_gradient(x: Tensor) -> Tensor:
    """The same numbers; the gradient is there, and zero."""
    return x.detach() + 0.0 * x


def _norms_of_one_rank(*names: str) -> AbstractContextManager[Any]:
    """Norms within mixers get the gradient of the first rank's heads alone."""
    right = tensor_module._Region.__call__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        norms = [getattr(self.region.module, name, None) for name in names]
        with _swapped([n for n in norms if isinstance(n, nn.Module) and self.group.rank]):
            return right(self, *args, **kwargs)

    return patch.object(tensor_module._Region, "__call__", wrong)


@contextmanager
def _swapped(norms: list[nn.Module]) -> Iterator[None]:
    held: list[Any] = [norm._parameters["weight"] for norm in norms]
    for norm, weight in zip(norms, held, strict=True):
        norm._parameters["weight"] = _without_gradient(weight)  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm, weight in zip(norms, held, strict=True):
            norm._parameters["weight"] = weight


def _keys_of_one_rank() -> AbstractContextManager[Any]:
    """Key heads that neighbouring ranks use get the gradient of one of them alone."""
    right = plan_module.Chosen.of

    def wrong(self: Any, whole: Tensor) -> Tensor:
        own = right(self, whole)
        is_first = dist.get_rank() % 2 == 0
        return own if is_first or not isinstance(self.module, nn.Linear) else _without_gradient(own)

    return patch.object(plan_module.Chosen, "of", wrong)


def _columns_permuted() -> AbstractContextManager[Any]:
    """Each rank has the columns of its neighbour."""
    right = tensor_module._cut

    def wrong(parameter: nn.Parameter, cut: Any, axis: Any) -> nn.Parameter:
        if cut.dim == 1 and parameter.ndim == 2:
            parameter = nn.Parameter(parameter.detach().roll(parameter.shape[1] // axis.size(), 1))
        return right(parameter, cut, axis)

    return patch.object(tensor_module, "_cut", wrong)


def _tie_lost() -> AbstractContextManager[Any]:
    """Embedding and head are given a weight each, as `parallelize_module` of torch does."""
    right = fsdp_module.share_matrices

    def wrong(model: Any) -> None:
        right(model)
        head = model.parts.head
        head.weight = nn.Parameter(head.weight.detach().clone())

    return patch.object(fsdp_module, "share_matrices", wrong)


def _bias_of_every_rank() -> AbstractContextManager[Any]:
    """The bias behind partial sums is added on every rank."""
    right = tensor_module._CutLinear.__call__

    def wrong(self: Any, x: Tensor) -> Tensor:
        out = right(self, x)
        if self.by_columns and self.module.bias is not None:
            bias = plan_module.own_part(self.module.bias)
            out = out + tensor_module.gather_tokens(bias[:, None], self.group)[:, 0]
        return out

    return patch.object(tensor_module._CutLinear, "__call__", wrong)


TENSOR_MUTANTS: tuple[Mutant, ...] = (
    Mutant("q/k norms not summed over tp", lambda: _norms_of_one_rank("q_norm", "k_norm"), "qwen3", tp=2),
    Mutant("gated norm not summed over tp", lambda: _norms_of_one_rank("norm"), "qwen3_5", tp=2),
    Mutant("KV gradient not summed over tp", _keys_of_one_rank, "llama", tp=4),
    Mutant("a shard of columns permuted", _columns_permuted, "llama", tp=2),
    Mutant("tie lost", _tie_lost, "qwen3", tp=2),
    Mutant("bias added by every rank", _bias_of_every_rank, "gpt_oss", tp=2),
)
"""Each with the family that must show it."""
