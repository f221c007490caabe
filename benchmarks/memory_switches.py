"""What each memory switch saves and costs.

`python benchmarks/memory_switches.py` prints, on a GPU, the peak memory of a step (parameters and gradients
included) and its time; on a CPU, with a small model, what the forward keeps for the backward, how much of
that is the host's (with a GPU it would not be on the device), and the peak of the step without parameters
and gradients.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from seqbraid import BraidedModel, PackedBatch, pack, parallelize
from seqbraid.bench.trial import net_and_peak
from seqbraid.distributed import offload
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions

MIB = 2**20


def switches(args: argparse.Namespace) -> dict[str, MemoryOptions]:
    """Each alone, and together."""
    tile, chunk = args.mlp_tile, args.loss_chunk
    return {
        "none": MemoryOptions(),
        "loss chunk": MemoryOptions(loss_chunk=chunk),
        "MLP tiles": MemoryOptions(mlp_tile=tile),
        "selective": MemoryOptions("selective"),
        "selective, offload": MemoryOptions("selective", offload=True),
        "full": MemoryOptions("full"),
        "full, offload": MemoryOptions("full", offload=True),
        "full, tiles": MemoryOptions("full", mlp_tile=tile),
        "all": MemoryOptions("full", offload=True, mlp_tile=tile, loss_chunk=chunk),
    }


def make(args: argparse.Namespace, memory: MemoryOptions, device: str) -> tuple[BraidedModel, PackedBatch]:
    """A llama with random weights, and one row of three samples."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // args.head,
        num_key_value_heads=max(1, args.hidden // args.head // 4), head_dim=args.head,
        max_position_embeddings=args.tokens,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = parallelize(AutoModelForCausalLM.from_config(config).to(device, dtype), memory=memory)
    lengths = [args.tokens // 2, args.tokens // 4, args.tokens // 4]
    batch = pack(random_samples(lengths, args.vocabulary), config)
    return model, batch.to(device) if device == "cuda" else batch


def step(model: BraidedModel, batch: PackedBatch) -> None:
    """Forward and backward."""
    model(batch).loss.backward()


def on_gpu(model: BraidedModel, batch: PackedBatch) -> str:
    """Peak of the device's memory, and the median time of five steps."""
    for _ in range(2):
        step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(5):
        begin = perf_counter()
        step(model, batch)
        torch.cuda.synchronize()
        times.append(perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / MIB
    return f"peak {peak:9.0f} MiB, step {1e3 * sorted(times)[2]:8.1f} ms"


def on_cpu(model: BraidedModel, batch: PackedBatch) -> str:
    """Bytes by the allocator's own records: they hold what autograd keeps whoever keeps it."""
    step(model, batch)
    hosted: list[int] = []
    copy = offload._Saved._copy

    def counted(self: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        hosted.append(source.nbytes)
        return copy(self, source, target)

    offload._Saved._copy = counted  # type: ignore[method-assign]
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            out = model(batch)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            out.loss.backward()
    finally:
        offload._Saved._copy = copy  # type: ignore[method-assign]
    left, forward_peak = net_and_peak(forward)
    peak = max(forward_peak, left + net_and_peak(backward)[1])
    host = sum(hosted)
    return (
        f"kept {left / MIB:8.2f} MiB, of which the host's {host / MIB:8.2f} MiB; peak of activations "
        f"{(peak - host) / MIB:8.2f} MiB"
    )


def main() -> None:
    """Print one line per switch."""
    on_a_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768 if on_a_gpu else 2048)
    parser.add_argument("--hidden", type=int, default=2048 if on_a_gpu else 128)
    parser.add_argument("--head", type=int, default=128 if on_a_gpu else 16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=150000 if on_a_gpu else 2000)
    parser.add_argument("--mlp-tile", type=int, default=4096 if on_a_gpu else 256)
    parser.add_argument("--loss-chunk", type=int, default=256)
    args = parser.parse_args()
    if not on_a_gpu:
        torch.set_num_threads(1)
    print(f"{args.tokens} tokens, hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}")
    for name, memory in switches(args).items():
        model, batch = make(args, memory, "cuda" if on_a_gpu else "cpu")
        print(f"{name:20s} {on_gpu(model, batch) if on_a_gpu else on_cpu(model, batch)}", flush=True)
        del model, batch
        if on_a_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
