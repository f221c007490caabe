"""What gated-delta layers send over ranks, and what passing states costs a GPU.

`python -m benchmarks.gated_delta_exchange` prints, for the heads of Qwen3.5-9B (16 key / 32 value heads of
128, bf16), the bytes that the busiest rank sends in one layer's forward by state passing and by the head
all-to-all; and, on a GPU with flash-linear-attention, the GPU time of the two-pass scheme on one rank's
tokens (reduce, scan, run; and back) over one call of flash-linear-attention's function on the same tokens.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.gpu_time import gpu_time
from seqbraid.layout import SequenceLayout
from seqbraid.ops.fla_status import fla_missing, fla_wrong
from seqbraid.ops.gated_delta import make_call
from seqbraid.sequence_parallel.gated_delta_bytes import HeadSizes, choose_method, heads_bytes, states_bytes

QWEN3_5_9B = HeadSizes(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)


def print_bytes(ranks: int) -> None:
    """One line per row and policy."""
    print(f"MiB that the busiest of {ranks} ranks sends in one layer's forward")
    rows = {"one of 16 K": [16384], "one of 64 K": [65536], "one of 256 K": [262144]}
    rows["64 K and 192 of 1 K"] = [65536] + [1024] * 192
    for name, lengths in rows.items():
        for policy in ("contiguous", "zigzag", "balanced"):
            layout = SequenceLayout(lengths, ring=ranks, policy=policy)
            states, heads = (max(f(layout, QWEN3_5_9B, 2)) / 2**20 for f in (states_bytes, heads_bytes))
            taken = choose_method(layout, QWEN3_5_9B, 2)
            print(f"{name:>20} {policy:>10}: states {states:6.1f}, heads {heads:6.1f} -> {taken}")


def tensors(tokens: int, sizes: HeadSizes) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v, g, beta; the gradient of the outputs; a state."""
    torch.manual_seed(0)
    keys = (tokens, sizes.num_key_heads, sizes.key_dim)
    values = (tokens, sizes.num_value_heads, sizes.value_dim)
    q, k, v, dout = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in (keys, keys, values, values)
    )
    g = -0.1 * torch.rand(values[:2], device="cuda")
    beta = torch.rand(values[:2], device="cuda").bfloat16()
    state = torch.randn(1, sizes.num_value_heads, sizes.key_dim, sizes.value_dim, device="cuda")
    return [q, k, v, g, beta], dout, state


def print_times(tokens: int, sizes: HeadSizes) -> None:
    """One call, and the two passes of a segment that has others before and after it."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs, dout, state = tensors(tokens, sizes)
    cu = torch.tensor([0, tokens], device="cuda")
    leaves = [x[None].clone().requires_grad_() for x in inputs]

    def one_call(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            out, _ = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
        if backward:
            torch.autograd.grad(out, leaves, dout[None])

    def two_passes(backward: bool) -> None:
        call = make_call(*inputs, (0, tokens), opened=(0,))
        call.summaries([0], with_transition=True)
        call.forward(state)
        if backward:
            again = make_call(*inputs, (0, tokens), kept=call.kept, opened=(0,))
            again.entering_gradients(dout, [0])
            again.backward(dout, state, state)

    def local_call(backward: bool) -> None:
        call = make_call(*inputs, (0, tokens))
        call.forward(None)
        if backward:
            make_call(*inputs, (0, tokens), kept=call.kept).backward(dout, None, None)

    base = [gpu_time(lambda b=b: one_call(b)) for b in (False, True)]  # type: ignore[misc]
    print(f"{tokens} local tokens: fla's function forward {base[0]:.2f} ms, with backward {base[1]:.2f} ms")
    for name, function in (("ours, a whole sequence", local_call), ("ours, two passes", two_passes)):
        found = [gpu_time(lambda b=b, f=function: f(b)) for b in (False, True)]  # type: ignore[misc]
        over = [100 * (a / b - 1) for a, b in zip(found, base, strict=True)]
        print(
            f"  {name:>22}: forward {found[0]:.2f} ms ({over[0]:+.1f} %), with backward {found[1]:.2f} ms "
            f"({over[1]:+.1f} %)",
            flush=True,
        )


def main() -> None:
    """Print both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[8192, 65536]
    )
    args = parser.parse_args()
    print_bytes(args.ranks)
    if not torch.cuda.is_available():
        print("no GPU: times are left out")
        return
    reason = fla_missing() or fla_wrong(torch.device("cuda", torch.cuda.current_device()))
    print(torch.cuda.get_device_name(), f"flash-linear-attention: {reason or 'usable'}")
    if reason is None:
        for tokens in args.tokens:
            print_times(tokens, QWEN3_5_9B)


if __name__ == "__main__":
    main()
