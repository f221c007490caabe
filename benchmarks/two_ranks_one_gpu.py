"""The whole path on one GPU: two gloo ranks share it, and one llama step in bfloat16 must equal that of one
rank.

NCCL takes one rank per GPU only, so point-to-point messages go through the host here; compute runs on the
GPU.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoConfig, AutoModelForCausalLM

from seqbraid import Mesh, pack
from seqbraid.models.braided import BraidedModel
from seqbraid.verify.samples import random_samples

LENGTHS = (1, 2, 63, 64, 65, 130, 257, 4000)


def step(mesh: Mesh, policy: str) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step, summed over the ranks."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    # Without FSDP: gloo has no reduce-scatter for GPU tensors, so the sum of the gradients is made here.
    braided = BraidedModel(model, mesh)
    batch = pack(random_samples(LENGTHS, 512), config, mesh, policy=policy).to("cuda")
    out = braided(batch)
    out.loss.backward()
    sums = {name: braided.groups["loss"].all_reduce(p.grad.float()) for name, p in model.named_parameters()}
    return sums | {"loss": out.mean_loss}


def rank_main(rank: int, store: str, results: str) -> None:
    """One of two ranks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for sizes in ({"ring": 2}, {"ulysses": 2}):
        for policy in ("zigzag", "balanced"):
            mesh = Mesh(**sizes)
            found[f"{sizes} {policy}"] = {n: x.cpu() for n, x in step(mesh, policy).items()}
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def main() -> None:
    """Print the largest relative error of loss and gradients, beside that of another order on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/store", f"{folder}/results.pt"), nprocs=2)
        found = torch.load(f"{folder}/results.pt")
    reference = {n: x.cpu() for n, x in step(Mesh(rank=0, world_size=1), "balanced").items()}
    for case, got in found.items():
        errors = {n: float((got[n] - x).norm() / x.norm()) for n, x in reference.items()}
        worst = max(errors, key=lambda name: errors[name])
        print(f"{case}: loss {errors['loss']:.1e}, worst gradient {errors[worst]:.1e} ({worst})")
        if not errors[worst] < 3e-2:
            raise SystemExit("not within bfloat16 noise")


if __name__ == "__main__":
    main()
