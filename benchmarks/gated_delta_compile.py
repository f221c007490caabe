"""Would torch.compile help the gated delta rule in torch, and what do fla's kernels give?

`python benchmarks/gated_delta_compile.py` prints, on a GPU, forward + backward of the rule in torch as it is,
with its chunk-wise parts compiled, and with flash-linear-attention's kernels where they are usable; and of
the short convolution in torch and with its kernel. On a CPU only the first two of each, on few tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from seqbraid.ops import conv, gated_delta, gated_delta_chunks
from seqbraid.ops.fla_status import fla_missing, fla_wrong
from seqbraid.ops.gated_delta import GatedDeltaCall, make_call
from seqbraid.ops.gated_delta_chunks import Chunks
from seqbraid.ops.kernels import KernelOptions, Kernels


def milliseconds(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median of some calls after two that warm up, launches included."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(2 + repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[2:])[repeats // 2]


def show(name: str, call: Callable[[], object], args: argparse.Namespace) -> None:
    """Time a call and print it at once."""
    print(f"{name}: {milliseconds(call, args.device):.2f} ms", flush=True)


@contextmanager
def compiled_parts() -> Iterator[None]:
    """The pure tensor functions of a chunk, compiled."""
    load, backward = Chunks.load, gated_delta_chunks.tile_backward
    Chunks.load = staticmethod(torch.compile(load, dynamic=False))  # type: ignore[method-assign]
    gated_delta.tile_backward = torch.compile(backward, dynamic=False)  # type: ignore[assignment]
    try:
        yield
    finally:
        Chunks.load = staticmethod(load)  # type: ignore[method-assign]
        gated_delta.tile_backward = backward


def rule(tokens: int, args: argparse.Namespace) -> None:
    """Forward and backward of one sequence."""
    keys, values = (tokens, args.key_heads, args.head_dim), (tokens, args.value_heads, args.head_dim)
    q, k, v, dout = (torch.randn(s, device=args.device).bfloat16() for s in (keys, keys, values, values))
    g = -0.1 * torch.rand(values[:2], device=args.device)
    beta = torch.rand(values[:2], device=args.device).bfloat16()

    def both(make: Callable[..., object]) -> None:
        call = make(q, k, v, g, beta, (0, tokens))
        call.forward(None)  # type: ignore[attr-defined]
        make(q, k, v, g, beta, (0, tokens), kept=call.kept).backward(dout, None, None)  # type: ignore[attr-defined]

    show(f"rule, {tokens} tokens, torch", lambda: both(GatedDeltaCall), args)
    with compiled_parts():
        show(f"rule, {tokens} tokens, torch, compiled", lambda: both(GatedDeltaCall), args)
    if args.device == "cuda" and not (fla_missing() or fla_wrong(q.device)):
        show(f"rule, {tokens} tokens, fla", lambda: both(make_call), args)


def convolution(tokens: int, args: argparse.Namespace) -> None:
    """Forward and backward of the short convolution over the channels of q, k and v."""
    channels = args.head_dim * (2 * args.key_heads + args.value_heads)
    x = torch.randn(tokens, channels, device=args.device).bfloat16().requires_grad_()
    weight = torch.randn(channels, 4, device=args.device).bfloat16().requires_grad_()
    dout = torch.randn_like(x)

    def both(name: str) -> None:
        kernels = Kernels(KernelOptions(convolution=name))
        y = conv.causal_conv(x, weight, None, (0, tokens), kernels=kernels)
        torch.autograd.grad(y, (x, weight), dout)

    show(f"convolution, {tokens} tokens, torch", lambda: both("torch"), args)
    if args.device == "cuda" and not fla_missing():
        show(f"convolution, {tokens} tokens, fla", lambda: both("fla"), args)


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+")
    args = parser.parse_args()
    torch.manual_seed(0)
    for tokens in args.tokens or ((8192, 32768) if args.device == "cuda" else (512,)):
        rule(tokens, args)
        convolution(tokens, args)


if __name__ == "__main__":
    main()
