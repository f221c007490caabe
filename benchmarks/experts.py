"""Experts of one layer at the width of Qwen3-30B-A3B: our grouped products and dispatch beside stock's.

`python benchmarks/experts.py` prints milliseconds of forward and backward, peak memory on a GPU, and how far
the outputs are from float32. `torchrun --nproc-per-node 2 benchmarks/experts.py` shares the experts out over
the ranks (which may share a GPU) and times the dispatch as well; each rank has `--tokens` of its own.
`--skew` sends that share of all picks to the first expert.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from seqbraid.comm.dispatch import NAME, Dispatch
from seqbraid.comm.group import Group
from seqbraid.mesh import launched
from seqbraid.models.expert_kind import expert_kind, run_experts, weighted_sum
from seqbraid.ops.kernels import KernelOptions, Kernels

Given = tuple[Tensor, Tensor, Tensor]


def timed(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds, after one to warm up."""
    times = []
    for i in range(repeats + 1):
        _wait(device)
        begin = time.perf_counter()
        step()
        _wait(device)
        if i:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def experts_of(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """One layer's experts as stock has them."""
    config = Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.picks,
    )
    module = Qwen3MoeExperts(config).to(device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return module


def given_to(args: argparse.Namespace, rank: int, device: torch.device, dtype: torch.dtype) -> Given:
    """Hidden states, and whom they go to."""
    generator = torch.Generator(device).manual_seed(rank)
    hidden = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype, generator=generator)
    scores = torch.rand(args.tokens, args.experts, device=device, generator=generator)
    scores[: round(args.skew * args.tokens * args.picks), 0] = 2.0
    weights, index = scores.topk(args.picks)
    return hidden.requires_grad_(), index, (weights / weights.sum(1, keepdim=True)).to(dtype)


def ours(module: Any, num_experts: int, group: Group, kernel: str) -> Callable[..., Tensor]:
    """As a braided model runs them."""
    kind, kernels = expert_kind(module), Kernels(KernelOptions(experts=kernel))
    assert kind is not None

    def run(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        dispatch = Dispatch.of(index, num_experts, group)
        y_PD = run_experts(module, kind, dispatch.to_experts(hidden), dispatch.rows, kernels)
        return weighted_sum(dispatch.from_experts(y_PD), weights, hidden.dtype)

    return run


def travel_alone(num_experts: int, group: Group) -> Callable[..., Tensor]:
    """There and back, without the products."""

    def run(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        dispatch = Dispatch.of(index, num_experts, group)
        return weighted_sum(dispatch.from_experts(dispatch.to_experts(hidden)), weights, hidden.dtype)

    return run


def measure(name: str, run: Callable[..., Tensor], given: Given, wanted: Tensor | None, repeats: int) -> None:
    """One line of the table."""
    hidden, index, weights = given
    device = hidden.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    out = run(hidden, index, weights)
    dout = torch.ones_like(out)
    off = (
        "" if wanted is None else f", off {float((out.detach().float() - wanted).norm() / wanted.norm()):.1e}"
    )
    del out
    forward = timed(lambda: run(hidden, index, weights), device, repeats)
    both = timed(lambda: run(hidden, index, weights).backward(dout), device, repeats)
    memory = ""
    if device.type == "cuda":
        memory = f", peak {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"
    if launched()[0] == 0:
        print(
            f"  {name:>28}: {forward:8.2f} ms forward, {both:8.2f} ms with backward{off}{memory}", flush=True
        )


def keep_own(module: Any, group: Group) -> None:
    """Of all experts those of this rank."""
    for name, parameter in list(module.named_parameters()):
        own = parameter.detach().chunk(group.size)[group.rank].clone()
        setattr(module, name, nn.Parameter(own))


def compare(args: argparse.Namespace, group: Group, device: torch.device, dtype: torch.dtype) -> None:
    """The table."""
    module = experts_of(args, device, dtype)
    given = given_to(args, group.rank, device, dtype)
    wanted = None
    if group.rank == 0:
        print(
            f"{args.tokens} tokens a rank, {args.picks} of {args.experts} experts each, {args.hidden} × "
            f"{args.intermediate}, {str(dtype)[6:]} on {device.type}, {group.size} ranks"
        )
    if group.size == 1:
        if args.compare:
            wide = experts_of(args, device, dtype).float()
            with torch.no_grad():
                wanted = ours(wide, args.experts, group, "torch")(
                    given[0].float(), given[1], given[2].float()
                )
            del wide
        for implementation in ("grouped_mm", "eager"):
            module.config._experts_implementation = implementation
            measure(f"stock, {implementation}", module, given, wanted, args.repeats)
    else:
        keep_own(module, group)
    for kernel in ("auto", "torch"):
        run = ours(module, args.experts, group, kernel)
        measure(f"ours, experts={kernel}", run, given, wanted, args.repeats)
    group.sent.clear()
    measure("dispatch alone", travel_alone(args.experts, group), given, None, args.repeats)
    if group.rank == 0 and group.size > 1:
        sent = group.sent[NAME] / (2 * args.repeats + 3)
        print(f"  {sent / 2**20:.1f} MiB leave this rank in a forward")


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--picks", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="no run in float32")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    rank, size = launched()
    if size > 1:
        shared = torch.cuda.device_count() < size
        if on_gpu and not shared:
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if on_gpu and not shared else "gloo")
        compare(args, Group.of(dist.group.WORLD), device, dtype)
        dist.destroy_process_group()
    else:
        compare(args, Group(), device, dtype)


if __name__ == "__main__":
    main()
