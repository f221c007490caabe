"""MLPs computed tile by tile over the tokens, in the forward and again in the backward.

Only the input is kept, and the intermediate tensors of one tile exist at a time. An MLP maps each token by
itself, so tiles change nothing but the order of the sums in its weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from ..models.running import running_rows, running_step


class TiledMLP:
    """Stands in for the forward of an MLP."""

    def __init__(self, module: nn.Module, tile: int) -> None:
        self.module = module
        self.stock: Callable[[Tensor], Tensor] = module.forward
        self.tile = tile

    @property
    def trained(self) -> tuple[nn.Parameter, ...]:
        """The parameters that get a gradient: of a sharded layer those that it has gathered."""
        return tuple(p for p in self.module.parameters() if p.requires_grad)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        # Saved by a node before ours: in a checkpointed layer, where the MLP is the last that saves anything,
        # the second run then stops in front of it, and the tiles are computed twice in all, not three times.
        inputs: Tensor = _SaveFirst.apply(hidden_states)  # type: ignore[no-untyped-call]
        out: Tensor = _Tiles.apply(inputs, inputs.grad_fn, self, *self.trained)  # type: ignore[no-untyped-call]
        return out


class _SaveFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saver: Any, mlp: TiledMLP, *trained: nn.Parameter) -> Tensor:
        ctx.saver, ctx.mlp, ctx.trained = saver, mlp, trained
        ctx.around, ctx.step = _Surroundings(x), running_step()
        if saver is None:  # nothing below learns
            ctx.save_for_backward(x)
        out, begin = None, 0
        for x_tile in x.split(mlp.tile, -2):
            with running_rows(ctx.step, begin, begin + x_tile.shape[-2]):
                part = mlp.stock(x_tile)
            if out is None:
                out = part.new_empty(*x.shape[:-1], part.shape[-1])
            out.narrow(-2, begin, part.shape[-2]).copy_(part)
            begin += part.shape[-2]
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors if ctx.saver is None else ctx.saver.saved_tensors
        mlp: TiledMLP = ctx.mlp
        same = zip(ctx.trained, mlp.trained, strict=True)
        assert all(before is now for before, now in same), (
            "the parameters changed between forward and recomputation"
        )
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        wide = [torch.promote_types(p.dtype, torch.float32) for p in ctx.trained]
        sums = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(ctx.trained, wide, strict=True)]
        begin = 0
        with ctx.around.restored(), torch.enable_grad():
            for x_tile, dout_tile in zip(x.split(mlp.tile, -2), dout.split(mlp.tile, -2), strict=True):
                x_tile = x_tile.detach().requires_grad_(dx is not None)
                wanted = (*([x_tile] if dx is not None else []), *ctx.trained)
                with running_rows(ctx.step, begin, begin + x_tile.shape[-2]):
                    out_tile = mlp.stock(x_tile)
                found = torch.autograd.grad(out_tile, wanted, dout_tile, allow_unused=True)
                if dx is not None:
                    dx.narrow(-2, begin, x_tile.shape[-2]).copy_(found[0])
                    found = found[1:]
                for total, part in zip(sums, found, strict=True):
                    if part is not None:
                        total += part
                begin += x_tile.shape[-2]
        gradients = [total.to(p.dtype) for total, p in zip(sums, ctx.trained, strict=True)]
        return dx, None, None, *gradients


class _Surroundings:
    """Random state and autocast of the forward, for the second run."""

    def __init__(self, x: Tensor) -> None:
        self.device_type = x.device.type
        self.cpu_state = torch.get_rng_state()
        self.devices, self.states = get_device_states(x)
        self.autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", self.device_type}
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was then; afterwards as it was before."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type=self.device_type))
            for kind, settings in self.autocast.items():
                stack.enter_context(torch.autocast(kind, *settings))
            torch.set_rng_state(self.cpu_state)
            set_device_states(self.devices, self.states, device_type=self.device_type)
            yield
