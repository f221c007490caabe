"""How far the kernels of the gated delta rule are from the torch version in float32.

`python -m benchmarks.gated_delta_kernels` prints relative errors, in bfloat16, of every part that state
passing uses (M, S0, outputs, final states, dS_in, all gradients), for packed segments of odd lengths; and of
a sequence in four segments with states passed from one to the next, beside those of the same sequence in one
call. `--kernel` names whose kernels (`auto`: those that a model would take), and `--times` how many tokens
of a packed row and of one sequence are timed on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.step_cases import row_lengths
from seqbraid.ops.gated_delta import GatedDeltaCall, make_call
from seqbraid.ops.kernels import KernelOptions, Kernels

NAMES = ("q", "k", "v", "g", "beta", "initial")


def inputs(tokens: int, decay: float, args: argparse.Namespace) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g, beta, and the gradient of the outputs."""
    torch.manual_seed(0)
    keys, values = (tokens, args.key_heads, args.head_dim), (tokens, args.value_heads, args.head_dim)
    q, k, v, dout = (
        torch.randn(shape, device=args.device).bfloat16() for shape in (keys, keys, values, values)
    )
    g = -decay * torch.rand(values[:2], device=args.device)
    return [q, k, v, g, torch.rand(values[:2], device=args.device).bfloat16()], dout


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def show(title: str, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    print(
        f"{title}: " + ", ".join(f"{name} {relative(*pair):.1e}" for name, pair in found.items()), flush=True
    )


def check_parts(lengths: list[int], opened: tuple[int, ...], decay: float, args: argparse.Namespace) -> None:
    """Every part of a call on packed segments, with states going in and gradients of states coming back."""
    cu = tuple(accumulate(lengths, initial=0))
    tensors, dout = inputs(cu[-1], decay, args)
    wide = [x.float() for x in tensors]
    shape = (len(lengths), args.value_heads, args.head_dim, args.head_dim)
    initial, dfinal = (torch.randn(shape, device=args.device) for _ in range(2))
    plain, call = GatedDeltaCall(*wide, cu), make_call(*tensors, cu, opened=opened, kernels=args.kernels)
    found = dict(
        zip(
            ("M", "S0"),
            zip(call.summaries(opened, True), plain.summaries(opened, True), strict=True),
            strict=True,
        )
    )
    found |= zip(
        ("out", "final"), zip(call.forward(initial), plain.forward(initial), strict=True), strict=True
    )
    plain = GatedDeltaCall(*wide, cu, kept=plain.kept)
    call = make_call(*tensors, cu, kept=call.kept, opened=opened, kernels=args.kernels)
    found["dS_in"] = (call.entering_gradients(dout, opened), plain.entering_gradients(dout.float(), opened))
    gradients = call.backward(dout, initial, dfinal), plain.backward(dout.float(), initial, dfinal)
    found |= zip((f"d{name}" for name in NAMES), zip(*gradients, strict=True), strict=True)
    show(f"segments {lengths}, decay {decay}", found)


def check_chain(tokens: int, cuts: tuple[int, ...], decay: float, args: argparse.Namespace) -> None:
    """One sequence in several segments, states passed on by hand, and in one call."""
    tensors, dout = inputs(tokens, decay, args)
    wide = [x.float() for x in tensors]
    plain = GatedDeltaCall(*wide, (0, tokens))
    wanted = [plain.forward(None)[0]]
    wanted += GatedDeltaCall(*wide, (0, tokens), kept=plain.kept).backward(dout.float(), None, None)[:5]

    call = make_call(*tensors, (0, tokens), kernels=args.kernels)
    one = [call.forward(None)[0]]
    one += make_call(*tensors, (0, tokens), kept=call.kept, kernels=args.kernels).backward(dout, None, None)[
        :5
    ]

    cu = (0, *cuts, tokens)
    segments = tuple(range(len(cu) - 1))
    call = make_call(*tensors, cu, opened=segments, kernels=args.kernels)
    M, S0 = call.summaries(segments, True)
    assert M is not None
    S_in = [torch.zeros_like(S0[0])]
    for j in segments[:-1]:
        S_in.append(M[j] @ S_in[-1] + S0[j])
    initial = torch.stack(S_in)
    chained = [call.forward(initial)[0]]
    call = make_call(*tensors, cu, kept=call.kept, opened=segments, kernels=args.kernels)
    dS_in = call.entering_gradients(dout, segments)
    dS_out = [torch.zeros_like(S0[0])]
    for j in segments[:0:-1]:
        dS_out.append(dS_in[j] + M[j].mT @ dS_out[-1])
    chained += call.backward(dout, initial, torch.stack(dS_out[::-1]))[:5]
    names = ("out", *(f"d{name}" for name in NAMES[:5]))
    for title, results in (("one call", one), (f"in segments {cu}", chained)):
        show(title, dict(zip(names, zip(results, wanted, strict=True), strict=True)))


def show_times(title: str, lengths: list[int], args: argparse.Namespace) -> None:
    """Median GPU milliseconds of a forward, and of forward and backward."""
    cu = tuple(accumulate(lengths, initial=0))
    tensors, dout = inputs(cu[-1], 0.1, args)

    def forward() -> tuple[Tensor, ...]:
        call = make_call(*tensors, cu, kernels=args.kernels)
        call.forward(None)
        return call.kept

    def both() -> None:
        make_call(*tensors, cu, kept=forward(), kernels=args.kernels).backward(dout, None, None)

    torch.cuda.reset_peak_memory_stats()
    found = []
    for run in (forward, both):
        times = []
        for i in range(args.repeats + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times += [begin.elapsed_time(end)] if i > 1 else []
        found.append(statistics.median(times))
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{title}: {found[0]:.2f} / {found[1]:.2f} ms, {peak:.1f} GiB", flush=True)


def main() -> None:
    """Print all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--times", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    args.kernels = Kernels(KernelOptions(gated_delta=args.kernel))
    check_parts([300, 1, 63, 64, 700, 9000], (0, 5), 0.1, args)
    check_parts([1000, 2000], (1,), 3.0, args)
    check_chain(9000, (2000, 2100, 6500), 0.05, args)
    if args.device == "cuda" and args.times:
        packed = row_lengths(args.times, "packed")
        show_times(f"{args.times} tokens, {len(packed)} samples", packed, args)
        show_times(f"{args.times} tokens, one sequence", [args.times], args)


if __name__ == "__main__":
    main()
