"""The activation memory of a rank falls as 1/P: what autograd keeps of one long sequence on 1, 2, 4 and 8 CPU
ranks.

`python benchmarks/memory_per_rank.py` counts the bytes that the forward saves for the backward (each storage
once, parameters left out) and the largest tensor with a dim of the whole sequence that any operation makes on
any rank.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from seqbraid import Mesh, pack, parallelize
from seqbraid.models.tiny.samples import random_samples


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor with a dim of at least the whole sequence that any operation returned."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.elements = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # Expanded views have elements that take no memory.
            if isinstance(leaf, torch.Tensor) and max(leaf.shape, default=0) >= self.tokens:
                elements = min(leaf.numel(), _stored(leaf))
                if elements > self.elements:
                    self.elements, self.shape = elements, tuple(leaf.shape)
        return out


def _stored(x: torch.Tensor) -> int:
    try:
        return x.untyped_storage().nbytes() // x.element_size()
    except (NotImplementedError, RuntimeError):  # wrappers without a storage of their own
        return 0


def measure(mesh: Mesh, args: argparse.Namespace) -> tuple[int, int, tuple[int, ...]]:
    """Bytes saved for the backward on this rank, and the largest tensor."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=128, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=args.hidden // 8, max_position_embeddings=args.tokens,
    )  # fmt: skip
    model = parallelize(AutoModelForCausalLM.from_config(config), mesh)
    batch = pack(random_samples([args.tokens], 128), config, mesh)
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter) and x.dtype.is_floating_point:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with LargestTensor(args.tokens) as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(batch)
        parameters = {
            p.untyped_storage().data_ptr() for p in model.parameters() if not hasattr(p, "to_local")
        }
        out.loss.backward()
    return (
        sum(size for place, size in saved.items() if place not in parameters),
        largest.elements,
        largest.shape,
    )


def rank_main(rank: int, size: int, store: str, args: argparse.Namespace, results: str) -> None:
    """One rank of a ring or a ring × Ulysses mesh."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ulysses = 2 if args.mesh == "product" and size > 1 else 1
    ulysses = size if args.mesh == "ulysses" else ulysses
    found = measure(Mesh(ring=size // ulysses, ulysses=ulysses), args)
    everybody: list[Any] = [found]
    if size > 1:
        everybody = [None] * size
        dist.all_gather_object(everybody, found)
        dist.destroy_process_group()
    if rank == 0:
        torch.save(everybody, results)


def main() -> None:
    """Print one line per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mesh", choices=("ring", "ulysses", "product"), default="product")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    args = parser.parse_args()
    full = args.tokens * args.hidden
    print(
        f"one sequence of {args.tokens} tokens, hidden {args.hidden}, {args.layers} layers, mesh: {args.mesh}"
    )
    alone = 0
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = f"{folder}/results.pt"
            mp.spawn(rank_main, (size, f"{folder}/store", args, results), nprocs=size)
            found = torch.load(results)
        saved, elements, shape = max(s for s, _, _ in found), *max((e, s) for _, e, s in found)
        alone = alone or saved * size
        print(
            f"P={size}: saved for backward {saved / 2**20:7.2f} MiB a rank, {saved * size / alone:5.3f} of "
            f"(P = 1) / P; largest tensor over the whole sequence {shape}, {elements / full:.2f} × tokens × "
            "hidden"
        )
        if size > 1 and elements >= full:
            raise SystemExit("a rank holds a tensor of full-sequence × hidden size")


if __name__ == "__main__":
    main()
