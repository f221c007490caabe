"""Peak memory of losses in chunks against the size of the full logits they never make.

`sft` is the built-in loss; `logprobs` and `entropy` are what `token_logprobs` gives, each token with a factor
of its own; `kl` is distillation from a teacher's hidden states, whose head is given.

`python benchmarks/loss_memory.py` runs each way in a process of its own and reads the process's
high-water mark, less what it held before the loss: 64 K tokens, 32 K vocabulary, float32, hidden 512,
forward and backward.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

WAYS = ("sft", "logprobs", "entropy", "kl", "full")


def measure(way: str, tokens: int, vocabulary: int, hidden: int) -> None:
    """Print how far the process's peak grew while the loss and its gradients were computed, in bytes."""
    import torch
    import torch.nn.functional as F

    from seqbraid.ops.linear_cross_entropy import linear_cross_entropy
    from seqbraid.ops.linear_kl import TeacherHead, linear_kl
    from seqbraid.ops.linear_logprobs import linear_logprobs

    torch.manual_seed(0)
    # Touch the kernels once, so that their own buffers are not counted.
    linear_cross_entropy(torch.randn(8, 16), torch.randn(32, 16), torch.zeros(8, dtype=torch.long))
    linear_logprobs(torch.randn(8, 16), torch.randn(32, 16), torch.zeros(8, dtype=torch.long), entropy=True)
    h = torch.randn(tokens, hidden, requires_grad=True)
    w = (0.02 * torch.randn(vocabulary, hidden)).requires_grad_()
    targets, factors = torch.randint(0, vocabulary, (tokens,)), torch.ones(tokens)
    teacher = TeacherHead(torch.randn(tokens, hidden), 0.02 * torch.randn(vocabulary, hidden))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "sft":
        loss = linear_cross_entropy(h, w, targets).loss
    elif way in ("logprobs", "entropy"):
        loss = -(factors * sum(linear_logprobs(h, w, targets, entropy=way == "entropy"))).sum()
    elif way == "kl":
        loss = (factors * linear_kl(h, w, torch.arange(tokens), teacher)).sum()
    else:
        loss = F.cross_entropy(h @ w.T, targets, reduction="sum")
    (loss / tokens).backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((after - before) * 1024, float(loss.detach()) / tokens)


def main() -> None:
    """Compare the growth with the logits' size; the full way is run on a part of the tokens and scaled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process")
    args = parser.parse_args()
    if args.way:
        measure(args.way, args.tokens, args.vocabulary, args.hidden)
        return
    logits = 4 * args.tokens * args.vocabulary
    print(
        f"{args.tokens} tokens, {args.vocabulary} vocabulary, hidden {args.hidden}: logits "
        f"{logits / 2**30:.2f} GiB"
    )
    for way in WAYS:
        tokens = args.tokens // 16 if way == "full" else args.tokens
        sizes = ["--tokens", str(tokens), "--vocabulary", str(args.vocabulary), "--hidden", str(args.hidden)]
        command = [sys.executable, __file__, "--way", way, *sizes]
        growth, loss = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        share = int(growth) / (4 * tokens * args.vocabulary)
        print(
            f"{way:>8}: peak grew by {int(growth) / 2**20:.0f} MiB at {tokens} tokens, {100 * share:.1f} % "
            f"of their logits (mean loss {float(loss):.4f})"
        )


if __name__ == "__main__":
    main()
