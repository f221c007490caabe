"""The whole path on one GPU: two gloo ranks share it, and one step in bfloat16 must equal that of one rank,
of a llama, (`--model qwen3_5`) of gated delta layers and attention with heads of 256, or
(`--model qwen3_moe`) of experts: as ring, as ulysses, with tp=2 and, where there are experts, with ep=2.

NCCL takes one rank per GPU only, so point-to-point messages go through the host here; compute runs on the
GPU. What bfloat16 itself costs is measured as well: how far the one rank is from a step in float32. Two
ranks may be at most half as far again from float32, in every gradient: their blocks are rounded before
they are merged.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from seqbraid import Mesh, pack
from seqbraid.distributed.experts import place_experts
from seqbraid.distributed.tensor import share_matrices
from seqbraid.models.braided import BraidedModel
from seqbraid.models.tiny.decoders import tiny_config
from seqbraid.models.tiny.samples import random_samples
from seqbraid.models.unchanged import Unchanged

LENGTHS = (1, 2, 63, 64, 65, 130, 257)
SIZES = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}  # fmt: skip
MODELS = {
    "llama": {"head_dim": 64},
    "qwen3_5": {
        "head_dim": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {
        "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    },
}  # fmt: skip


def step(
    family: str, mesh: Mesh, policy: str, device: str, longest: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step, summed over the ranks."""
    torch.manual_seed(0)
    config = tiny_config(family, **SIZES, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).to(dtype)
    # Without FSDP: gloo has no reduce-scatter for GPU tensors, so the sum of the gradients is made here.
    braided = BraidedModel(model, mesh)
    braided.join_groups()
    if mesh.ep > 1:
        place_experts(braided.parts, mesh)
    if mesh.tp > 1:
        share_matrices(braided)
    placed = own_parts(model, device)
    braided._unchanged = Unchanged(model)  # parts have shapes of their own here
    braided.to(device)
    batch = pack(random_samples((*LENGTHS, longest), 512), config, mesh, policy=policy).to(device)
    out = braided(batch)
    out.loss.backward()
    row = braided.groups["row"]
    sums = {"loss": out.mean_loss}
    for name, p in model.named_parameters():
        if name not in placed:
            sums[name] = row.all_reduce(p.grad.float())
            continue
        parts = row.all_gather(p.grad.float())  # two ranks: each one has a part, and the whole gradient of it
        sums[name] = torch.cat(parts, placed[name])
    return sums


def own_parts(model: torch.nn.Module, device: str) -> dict[str, int]:
    """Let parameters that are cut be plain tensors, this rank's parts; gives the dim of each cut."""
    dims: dict[str, int] = {}
    done: dict[int, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, DTensor):
                own = done.setdefault(id(p), torch.nn.Parameter(p.to_local().to(device)))
                module._parameters[name] = own
                dims[f"{prefix}.{name}"] = p.placements[0].dim
    return dims


def rank_main(rank: int, store: str, results: str, family: str, device: str, longest: int) -> None:
    """One of two ranks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    meshes = [{"ring": 2}, {"ulysses": 2}, {"tp": 2}]
    if "num_experts" in MODELS[family]:
        meshes += [{"ring": 2, "ep": 2}, {"tp": 2, "ep": 2}]
    for sizes in meshes:
        for policy in ("balanced",) if "tp" in sizes else ("zigzag", "balanced"):
            mesh = Mesh(**sizes)
            sums = step(family, mesh, policy, device, longest)
            found[f"{sizes} {policy}"] = {name: x.cpu() for name, x in sums.items()}
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def main() -> None:
    """Print how far two ranks are from one, and both from float32: in loss and gradients, as a whole and
    where it is most.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest sample")
    parser.add_argument("--model", choices=MODELS, default="llama")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        how = (args.model, args.device, args.longest)
        mp.spawn(rank_main, (f"{folder}/store", f"{folder}/results.pt", *how), nprocs=2)
        found = torch.load(f"{folder}/results.pt")
    alone = Mesh(rank=0, world_size=1)
    one, exact = (
        {n: x.cpu() for n, x in step(args.model, alone, "balanced", args.device, args.longest, dtype).items()}
        for dtype in (torch.bfloat16, torch.float32)
    )
    noise = errors(one, exact)
    print(f"one rank from float32: {said(noise)}")
    for case, got in found.items():
        distance = errors(got, exact)
        print(f"{case}: from one rank: {said(errors(got, one))}; from float32: {said(distance)}")
        ratios = {name: distance[name] / noise[name] for name in distance if name != "loss"}
        worst = max(ratios, key=lambda name: ratios[name])
        print(f"  at most {ratios[worst]:.2f} × as far from float32 as one rank ({worst})")
        if not ratios[worst] < 1.5:
            raise SystemExit("not within bfloat16 noise")


def errors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative, by name."""
    return {n: float((got[n] - x).norm() / x.norm()) for n, x in wanted.items()}


def said(errors: dict[str, float]) -> str:
    """The loss and the worst gradient."""
    worst = max((name for name in errors if name != "loss"), key=lambda name: errors[name])
    return f"loss {errors['loss']:.1e}, worst gradient {errors[worst]:.1e} ({worst})"


if __name__ == "__main__":
    main()
