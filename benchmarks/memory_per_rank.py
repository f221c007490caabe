"""The memory of a rank falls as 1/P: what it holds of the parameters, and what autograd keeps of one long
sequence, on 1, 2, 4 and 8 CPU ranks.

`python benchmarks/memory_per_rank.py` counts the bytes of a rank's parameters (its shards, and at the peak
beside them what FSDP2 has gathered of the units at work), those that the forward saves for the backward
(each storage once, parameters left out), and the largest tensor with a dim of the whole sequence that any
operation makes on any rank. With `--mesh tp` also what norms and residuals keep, which have a rank's own
tokens, and that no rank makes a tensor of the whole vocabulary; with `--mesh ep` that none has all experts of
a layer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from seqbraid import Mesh, pack, parallelize
from seqbraid.models.tiny.samples import random_samples

VOCABULARY, EXPERTS = 131, 16


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor with a dim of at least the whole sequence that any operation returned, and
    whether one was of the whole vocabulary or of all experts; and the most that was gathered at once.
    """

    def __init__(self, tokens: int, experts: int, model: torch.nn.Module) -> None:
        super().__init__()
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        self.units = [group for state in states if (group := state._fsdp_param_group) is not None]
        self.of_parameters = {size for unit in self.units for size in _buffers(unit)}
        self.gathered = 0
        """Bytes of whole parameters, and of those on their way."""
        self.tokens = tokens
        self.experts = experts
        """Numbers of all experts of a layer."""
        self.elements = 0
        self.shape: tuple[int, ...] = ()
        self.whole: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.gathered = max(self.gathered, sum(map(_gathered, self.units)))
        for leaf in tree_leaves(out):
            # A DTensor has the shape of the whole, and is computed by parts.
            if type(leaf) is torch.Tensor and not leaf.is_meta:
                self.whole |= {"vocabulary"} if VOCABULARY in leaf.shape else set()
                self.whole |= {"experts"} if self.experts and leaf.numel() >= self.experts else set()
            if isinstance(leaf, torch.Tensor) and max(leaf.shape, default=0) >= self.tokens:
                stored = _stored(leaf)
                # Parameters and their gradients, flat on their way between ranks, may be as long.
                is_flat = stored in self.of_parameters and self.tokens not in leaf.shape
                # Expanded views have elements that take no memory.
                elements = min(leaf.numel(), stored)
                if elements > self.elements and not is_flat:
                    self.elements, self.shape = elements, tuple(leaf.shape)
        return out


def _buffers(unit: Any) -> set[int]:
    """The numbers of the buffers in which FSDP2 sends what a unit has: of all of it or of one parameter, of a
    rank or of all ranks.
    """
    own = [p.padded_sharded_param_size.numel() for p in unit.fsdp_params]
    return {n * ranks for n in (*own, sum(own)) for ranks in (1, unit._all_gather_process_group.size())}


def _gathered(unit: Any) -> int:
    """Bytes that a unit of FSDP2 has beside its shards just now."""
    coming = unit._all_gather_result
    whole = [x for p in unit.fsdp_params for x in p.all_gather_outputs]
    whole += [] if coming is None else [coming.all_gather_output]
    return sum(x.untyped_storage().nbytes() for x in whole)


def largest_unit(model: torch.nn.Module) -> int:
    """Bytes of the parameters of the largest unit, whole."""
    units = LargestTensor(1, 0, model).units
    return max((sum(p._orig_size.numel() for p in unit.fsdp_params) * 4 for unit in units), default=0)


def _stored(x: torch.Tensor) -> int:
    try:
        return x.untyped_storage().nbytes() // x.element_size()
    except (NotImplementedError, RuntimeError):  # wrappers without a storage of their own
        return 0


class Found(NamedTuple):
    """Of a rank."""

    held: int
    """Bytes of parameters, its shards."""
    peak: int
    """The most bytes of parameters at once: shards, and the units that are gathered."""
    unit: int
    """Bytes of the largest unit."""
    saved: int
    """Bytes kept for the backward."""
    own: int
    """Of these, what has as many rows as a rank has tokens between mixers and MLPs, and the hidden size."""
    elements: int
    shape: tuple[int, ...]
    whole: set[str]
    """What it had a whole tensor of."""


def make(args: argparse.Namespace) -> Any:
    """A llama, or with `--mesh ep` a model of experts."""
    torch.manual_seed(0)
    family = "qwen3_moe" if args.mesh == "ep" else "llama"
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": args.hidden}
    own = {"num_key_value_heads": 8} if args.mesh == "tp" else experts if args.mesh == "ep" else {}
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=8, head_dim=args.hidden // 8,
        max_position_embeddings=args.tokens, **({"num_key_value_heads": 2} | own),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def measure(mesh: Mesh, args: argparse.Namespace) -> Found:
    """What a rank holds, keeps and makes."""
    stock = make(args)
    # Of both projections.
    experts = 3 * EXPERTS * args.hidden**2 if args.mesh == "ep" else 0
    model = parallelize(stock, mesh)
    held = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in model.parameters())
    batch = pack(random_samples([args.tokens], VOCABULARY), stock.config, mesh)
    saved: dict[int, int] = {}
    own: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter) and x.dtype.is_floating_point:
            place = x.untyped_storage().data_ptr()
            saved[place] = x.untyped_storage().nbytes()
            if x.numel() == args.tokens * args.hidden // mesh.row_size and x.shape[-1] == args.hidden:
                own[place] = saved[place]
        return x

    unit = largest_unit(model)
    with LargestTensor(args.tokens, experts, model) as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(batch)
        parameters = {
            p.untyped_storage().data_ptr() for p in model.parameters() if not hasattr(p, "to_local")
        }
        out.loss.backward()
    kept = {place: size for place, size in saved.items() if place not in parameters}
    peak = held + largest.gathered
    sums = sum(kept.values()), sum(own.values())
    return Found(held, peak, unit, *sums, largest.elements, largest.shape, largest.whole)


def rank_main(rank: int, size: int, store: str, args: argparse.Namespace, results: str) -> None:
    """One rank of a mesh."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    meshes = {
        "ring": {"ring": size},
        "ulysses": {"ulysses": size},
        "product": {"ring": max(1, size // 2), "ulysses": min(2, size)},
        "tp": {"tp": size},
        "ep": {"ring": size, "ep": size},
    }
    found = measure(Mesh(**meshes[args.mesh]), args)
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
    parser.add_argument("--mesh", choices=("ring", "ulysses", "product", "tp", "ep"), default="product")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    args = parser.parse_args()
    if args.tokens <= max(VOCABULARY, 2 * args.hidden):
        parser.error(
            f"--tokens={args.tokens} cannot be told from the dims of weights of --hidden={args.hidden}; use "
            f"more than {max(VOCABULARY, 2 * args.hidden)}"
        )
    full = args.tokens * args.hidden
    print(
        f"one sequence of {args.tokens} tokens, hidden {args.hidden}, {args.layers} layers, mesh: {args.mesh}"
    )
    alone: Found | None = None
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = f"{folder}/results.pt"
            mp.spawn(rank_main, (size, f"{folder}/store", args, results), nprocs=size)
            found: list[Found] = torch.load(results, weights_only=False)
        most = Found(*(max(values) for values in zip(*(x[:-1] for x in found), strict=True)), set())
        whole = set().union(*(x.whole for x in found))
        alone = alone or most._replace(held=most.held * size, saved=most.saved * size, own=most.own * size)
        pairs = ((most.held, alone.held), (most.saved, alone.saved), (most.own, alone.own))
        of_one = [f"{now * size / max(1, before):5.3f} of (P = 1) / P" for now, before in pairs]
        print(
            f"P={size}: parameters {most.held / 2**20:6.2f} MiB a rank, {of_one[0]}, and at the peak "
            f"{most.peak / 2**20:.2f} with what is gathered (the largest unit has "
            f"{most.unit / 2**20:.2f}); saved for backward "
            f"{most.saved / 2**20:7.2f} MiB, {of_one[1]}; norms and residuals {of_one[2]}; largest tensor "
            f"over the whole sequence {most.shape}, {most.elements / full:.2f} × tokens × hidden"
        )
        if size > 1 and most.elements >= full and args.mesh not in ("tp", "ep"):
            raise SystemExit("a rank holds a tensor of full-sequence × hidden size")
        if size > 1 and {"tp": "vocabulary", "ep": "experts"}.get(args.mesh) in whole:
            raise SystemExit("a rank has a tensor of the whole vocabulary, or of all experts of a layer")


if __name__ == "__main__":
    main()
