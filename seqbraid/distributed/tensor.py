"""Tensor parallelism: matrices cut over the `tp` ranks, and stock modules that compute with their part.

A mixer or MLP gathers the tokens of its ranks, runs the stock forward with the rank's own heads or channels,
and adds the partial sums up on their way back to the ranks that hold the tokens. What is not cut works on a
rank's own tokens or heads alone: its gradient is a sum over the ranks, which FSDP forms.

Letters: T tokens of the tp ranks, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ..comm.group import Group
from ..comm.tokens import gather_tokens, scatter_tokens
from ..models.braided import BraidedModel
from ..models.dropout import is_active
from ..models.head import forward_replaced
from ..models.running import running_step
from ..models.tensor import vocabulary_rows
from ..models.tensor_parts import Adapted, Chosen, Region, ShardedWeight, own_part
from .tiled_mlp import TiledMLP


def share_matrices(model: BraidedModel) -> None:
    """Cut the matrices of a model over its `tp` ranks; `release` gives the modules their own forward back,
    and leaves the matrices as they are.
    """
    plan, group = model.tensor, model.groups["tp"]
    assert plan is not None
    axis = model.mesh.device_meshes["tp"]
    done: dict[int, nn.Parameter] = {}
    for cut in plan.cuts:
        for name, parameter in list(cut.module.named_parameters(recurse=False)):
            if id(parameter) not in done:
                done[id(parameter)] = _cut(parameter, cut, axis)
            cut.module._parameters[name] = done[id(parameter)]
    embedding: Any = plan.embedding.module
    if isinstance(embedding, nn.Embedding):  # else another pipeline stage has it
        model.until_release(forward_replaced(embedding, _Embedding(embedding, group)))
    for region in (region for layer in plan.regions for region in layer):
        for cut in region.cuts:
            model.until_release(forward_replaced(cut.module, _CutLinear(cut, group)))
        for linear in {c.module for c in region.chosen if isinstance(c.module, nn.Linear)}:
            model.until_release(forward_replaced(linear, _ChosenLinear(linear, region.chosen)))
        for adapted in region.adapted:
            model.until_release(forward_replaced(adapted.lora.layer, _Adapted(adapted, group)))
        model.until_release(_attributes(region))
        forward = region.module.forward
        if isinstance(forward, TiledMLP):  # each tile is of a rank's own tokens, and gathered by itself
            forward.stock = _Region(region, group, forward.stock)
        else:
            model.until_release(forward_replaced(region.module, _Region(region, group, forward)))


def _cut(parameter: nn.Parameter, cut: ShardedWeight, axis: DeviceMesh) -> nn.Parameter:
    # A vector beside a matrix that is cut by columns belongs to no channel: it is cut evenly as well.
    dim = cut.dim if parameter.ndim > 1 else 0
    part = distribute_tensor(parameter.detach(), axis, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


@contextmanager
def _attributes(region: Region) -> Iterator[None]:
    own = vars(region.module)
    before = {name: own[name] for name, _ in region.attributes}
    own.update(region.attributes)
    try:
        yield
    finally:
        own.update(before)


class _Region:
    """Stands in for the forward of a mixer or MLP."""

    def __init__(self, region: Region, group: Group, stock: Callable[..., Any]) -> None:
        self.region, self.group, self.stock = region, group, stock
        self.read = [c for c in region.chosen if not isinstance(c.module, nn.Linear)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = gather_tokens(kwargs["hidden_states"], self.group)
        else:
            args = (gather_tokens(args[0], self.group), *args[1:])
        with _in_place_of(self.read):
            out = self.stock(*args, **kwargs)
        if isinstance(out, tuple):
            return (scatter_tokens(out[0], self.group), *out[1:])
        return scatter_tokens(out, self.group)


@contextmanager
def _in_place_of(chosen: list[Chosen]) -> Iterator[None]:
    """Let parameters that a module reads be this rank's rows of them."""
    whole = [c.module._parameters[c.name] for c in chosen]
    for c, parameter in zip(chosen, whole, strict=True):
        assert parameter is not None
        c.module._parameters[c.name] = c.of(parameter)  # type: ignore[assignment]
    try:
        yield
    finally:
        for c, parameter in zip(chosen, whole, strict=True):
            c.module._parameters[c.name] = parameter


class _CutLinear:
    """Stands in for the forward of a linear layer that is cut."""

    def __init__(self, cut: ShardedWeight, group: Group) -> None:
        self.module: Any = cut.module
        self.by_columns, self.group = cut.dim == 1, group

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = own_part(self.module.weight), own_part(self.module.bias)
        if not self.by_columns or bias is None:
            return F.linear(x, weight, bias)
        # Once for each token: by the rank that holds it between mixers and MLPs.
        out = F.linear(x, weight)
        _own(out, self.group).add_(gather_tokens(bias[:, None], self.group)[:, 0])
        return out


def _own(x: Tensor, group: Group) -> Tensor:
    """Of the gathered tokens those that this rank holds between mixers and MLPs."""
    own = x.shape[-2] // group.size
    return x.narrow(-2, group.rank * own, own)


class _ChosenLinear:
    """Stands in for the forward of a linear layer of which a rank uses some rows."""

    def __init__(self, linear: nn.Linear, chosen: tuple[Chosen, ...]) -> None:
        self.linear = linear
        self.chosen = {c.name: c for c in chosen if c.module is linear}

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        out = F.linear(
            x, self.chosen["weight"].of(weight), None if bias is None else self.chosen["bias"].of(bias)
        )
        used = self.chosen["weight"].repeated
        if not used:
            return out
        return out.unflatten(-1, (max(used) + 1, -1))[..., list(used), :].flatten(-2)


class _Adapted:
    """Stands in for the forward of peft's layer, `W·x + s·B·A·x`: A or B works on the rank's own tokens, and
    what is between them, as wide as the adapter's rank, is gathered or summed.
    """

    def __init__(self, adapted: Adapted, group: Group) -> None:
        self.lora, self.inputs, self.group = adapted.lora, adapted.inputs, group
        rows = adapted.outputs
        self.outputs = None if rows is None else _ChosenLinear(self.lora.b, (rows,))

    def __call__(self, x: Tensor) -> Tensor:
        lora, group = self.lora, self.group
        out: Tensor = lora.linear(x)
        if not lora.is_on:
            return out
        x = x.to(lora.a.weight.dtype)
        if self.outputs is not None:
            low = gather_tokens(lora.a(lora.dropout(_own(x, group))), group)
            return (out + self.outputs(low) * lora.scale).to(out.dtype)
        low = F.linear(self._dropped(x), lora.a.weight[:, self.inputs])
        _own(out, group).add_(lora.b(scatter_tokens(low, group)) * lora.scale)
        return out

    def _dropped(self, x: Tensor) -> Tensor:
        """As one rank that has all channels draws it, for the tokens of all ranks."""
        dropout, step = self.lora.dropout, running_step()
        if not is_active(dropout) or step is None or step.token_keys is None:
            return dropout(x)
        keys_T = gather_tokens(step.token_keys[:, None], self.group)[:, 0]
        assert self.inputs is not None
        drawn: Callable[..., Tensor] = dropout.forward  # ours (`braid_dropout`)
        return drawn(x, keys_T=keys_T, first=self.inputs.start)


class _Embedding:
    """Stands in for the forward of the embedding: each rank looks its own tokens of the vocabulary up."""

    def __init__(self, module: nn.Embedding, group: Group) -> None:
        self.module, self.group = module, group
        self.stock: Callable[[Tensor], Tensor] = module.forward
        self.rows = vocabulary_rows(module.weight.shape[0], group.size, group.rank)

    def __call__(self, ids: Tensor) -> Tensor:
        if running_step() is None:
            raise ValueError(
                f"the model is cut over tp={self.group.size} ranks, so it takes packed batches alone; to "
                "generate, save it and load it in one process"
            )
        is_here = (ids >= self.rows.start) & (ids < self.rows.stop)
        with self._own_rows():
            found = self.stock(torch.where(is_here, ids - self.rows.start, 0))
        return scatter_tokens(found.masked_fill(~is_here[..., None], 0), self.group)

    @contextmanager
    def _own_rows(self) -> Iterator[None]:
        module, padding = self.module, self.module.padding_idx
        whole = module._parameters["weight"]
        module._parameters["weight"] = own_part(whole)
        if padding is not None:
            is_here = self.rows.start <= padding < self.rows.stop
            module.padding_idx = padding - self.rows.start if is_here else None
        try:
            yield
        finally:
            module._parameters["weight"], module.padding_idx = whole, padding
