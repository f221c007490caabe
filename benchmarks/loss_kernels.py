"""Head and loss on a GPU: time, peak memory and distance from float32, by chunk size and by how the weight's
gradient is summed; Liger's fused loss beside it where that is installed.

`python benchmarks/loss_kernels.py` prints a table for each width (random bf16 weights, all tokens labelled).
`floor` is what the three matrix products take by themselves, undivided, at the rate of this GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seqbraid.ops import cross_entropy_triton
from seqbraid.ops.linear_cross_entropy import linear_cross_entropy

WIDTHS = {"qwen3_4b": (2560, 151936), "qwen3_8b": (4096, 151936), "qwen3_5_9b": (4096, 248320)}


def timed(step: Callable[[], Any], repeats: int = 7) -> float:
    """Median milliseconds, after two to warm up."""
    times = []
    for i in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def in_float32(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss and gradients of the same numbers, every product in float32."""
    loss, dweight, dhidden = 0.0, torch.zeros_like(weight, dtype=torch.float32), []
    wide = weight.float()
    for part, target in zip(hidden.split(1024), targets.split(1024), strict=True):
        x = part.float()
        logits = x @ wide.T
        lse = logits.logsumexp(1, keepdim=True)
        loss = loss + (lse[:, 0] - logits.gather(1, target[:, None])[:, 0]).double().sum()
        p = (logits - lse).exp_()
        p.scatter_add_(1, target[:, None], p.new_full((len(part), 1), -1.0))
        dhidden.append(p @ wide)
        dweight.addmm_(p.T, x)
    return loss / len(hidden), torch.cat(dhidden) / len(hidden), dweight / len(hidden)


def products_ms(hidden: Tensor, weight: Tensor) -> float:
    """Milliseconds of the three products of a linear layer and its backward."""
    out = hidden @ weight.T
    return sum(map(timed, (lambda: hidden @ weight.T, lambda: out @ weight, lambda: out.T @ hidden)))


def ways(tokens: int, size: int) -> Iterator[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Name and mean loss of each way."""
    for share, chunk in (("D/4", size // 4), ("D/2", size // 2), ("D", size), ("2D", 2 * size)):
        for sums in (torch.float32, torch.bfloat16):

            def ours(h: Tensor, w: Tensor, t: Tensor, chunk: int = chunk, sums: Any = sums) -> Tensor:
                return linear_cross_entropy(h, w, t, chunk_tokens=chunk, weight_sums=sums).loss / tokens

            yield f"chunks of {share}, sums in {str(sums)[6:]}", ours
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return
    yield "Liger", lambda h, w, t: LigerFusedLinearCrossEntropyFunction.apply(h, w, t)[0]


def relative(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.float() - wanted).norm() / wanted.norm())


def compare(name: str, tokens: int) -> None:
    """The table of one width."""
    size, vocabulary = WIDTHS[name]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, size, device="cuda")).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    with torch.no_grad():
        floor = products_ms(hidden, weight[:16384]) * vocabulary / 16384
        loss32, dhidden32, dweight32 = in_float32(hidden, weight, targets)
    print(
        f"{name}: {tokens} tokens, hidden {size}, vocabulary {vocabulary}; floor {floor:.1f} ms", flush=True
    )
    for way, mean_loss in ways(tokens, size):
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

        def step(mean_loss: Any = mean_loss) -> Tensor:
            hidden.grad = weight.grad = None
            loss = mean_loss(hidden, weight, targets)
            loss.backward()
            return loss.detach()

        loss = step()
        peak = torch.cuda.max_memory_allocated() - before
        ms = timed(step)
        off = [abs(float(loss - loss32)) / float(loss32)]
        off += [relative(hidden.grad, dhidden32), relative(weight.grad, dweight32)]
        print(
            f"  {way:>34}: {ms:7.1f} ms ({ms / floor:.2f} x floor), peak {peak / 2**30:5.2f} GiB, off "
            "float32: loss {:.1e}, hidden {:.2e}, weight {:.2e}".format(*off),
            flush=True,
        )


def tune() -> None:
    """Times of the kernel by block and warps, beside a copy of as many bytes."""
    logits = torch.randn(2048, 151936, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, logits.shape[1], (len(logits),), device="cuda")
    other = torch.empty_like(logits)
    print(f"copy: {timed(lambda: other.copy_(logits)):.3f} ms")
    for block in (4096, 8192, 16384, 32768):
        for warps in (4, 8, 16, 32):
            cross_entropy_triton.BLOCK, cross_entropy_triton.WARPS = block, warps
            ms = timed(lambda: cross_entropy_triton.cross_entropy_rows(logits, targets, True))
            print(f"  block {block}, {warps} warps: {ms:.3f} ms", flush=True)


def main() -> None:
    """Every width asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="qwen3_4b,qwen3_5_9b", help=f"of {', '.join(WIDTHS)}")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tune", action="store_true", help="time the kernel's launch options")
    args = parser.parse_args()
    if args.tune:
        tune()
        return
    for name in args.widths.split(","):
        compare(name, args.tokens)


if __name__ == "__main__":
    main()
