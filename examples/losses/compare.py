"""Each loss on a mesh beside plain code in one process: the loss and every gradient.

`torchrun --nproc-per-node 8 -m examples.losses.compare --ring 2 --ulysses 2 --tp 2`
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import seqbraid as sb
from seqbraid.models.tiny.decoders import tiny_model

from . import distillation, dpo, plain, policy

LENGTHS = (40, 33, 200, 64, 3, 17, 90, 51)
ROWS = 2


class Algorithm(NamedTuple):
    """A step on the mesh, and what plain code gives."""

    step: Callable[[sb.BraidedModel, sb.BraidedModel, Sequence[sb.PackedBatch]], sb.StepOutput]
    plain: Callable[[Any, Sequence[dict[str, Any]], Any], Tensor]
    fields: tuple[str, ...] = ()


def _with(loss: sb.TokenLoss, divisor: str) -> Any:
    return lambda model, _, batches: sb.forward_backward(model, batches, loss, divisor)


ALGORITHMS = {
    "weighted SFT": Algorithm(lambda m, _, b: sb.forward_backward(m, b), plain.weighted_sft, ("weights",)),
    "DPO": Algorithm(dpo.train_step, plain.dpo_pairs),
    "PPO": Algorithm(_with(policy.ppo, "tokens"), plain.ppo, ("old_logprobs", "advantages")),
    "GRPO": Algorithm(_with(policy.grpo, "samples"), plain.grpo, ("old_logprobs", "reference", "advantage")),
    "REINFORCE": Algorithm(_with(policy.reinforce, "samples"), plain.reinforce, ("advantage",)),
    "GSPO": Algorithm(_with(policy.gspo, "samples"), plain.gspo, ("old_logprobs", "advantage")),
    "distillation": Algorithm(distillation.train_step, plain.distil),
}


def make_samples(vocabulary: int, model: Any) -> list[dict[str, Any]]:
    """Rollouts near the policy, so that ratios lie on both sides of the clip; all labels but of a prompt."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 4] = -100

        def drawn(length: int = length, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(length, generator=generator)

        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / policy.TEMPERATURE
            now = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        now = torch.cat([now.new_zeros(1), now])
        fields = {
            "weights": drawn().abs(),
            "advantages": drawn(),
            "advantage": float(drawn(1)),
            "old_logprobs": now + drawn(scale=0.3),
            "reference": now + drawn(scale=0.3),
        }
        samples.append({"input_ids": ids, "labels": labels, "fields": fields})
    return samples


def only(samples: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Samples with some of their fields."""
    return [{**s, "fields": {name: s["fields"][name] for name in names}} for s in samples]


def gradients(model: Any) -> Tensor:
    """All of a stock model, whole, one behind the other."""
    found = []
    for p in model.parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        found.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten())
        p.grad = None
    return torch.cat(found)


def compare(mesh: sb.Mesh, names: Sequence[str] = tuple(ALGORITHMS)) -> dict[str, tuple[float, float, float]]:
    """By algorithm the loss in plain code, and how far loss and gradient of the mesh are off; relative."""
    stock, other = tiny_model("qwen3", seed=0), tiny_model("qwen3", seed=1)
    samples = make_samples(stock.config.vocab_size, stock)
    wanted = {}
    for name in names:
        loss = ALGORITHMS[name].plain(stock, samples, other)
        loss.backward()
        wanted[name] = loss.item(), gradients(stock)
    model, second = sb.parallelize(copy.deepcopy(stock), mesh), sb.parallelize(other, mesh)
    size = len(samples) // (mesh.data_world_size * ROWS)
    first = mesh.data_rank * ROWS * size
    found = {}
    for name in names:
        step, _, fields = ALGORITHMS[name]
        mine = only(samples[first : first + ROWS * size], fields)
        rows = [mine[i * size : (i + 1) * size] for i in range(ROWS)]
        out = step(model, second, [sb.pack(row, stock.config, mesh, policy="zigzag") for row in rows])
        loss, gradient = wanted[name]
        off = (gradients(model.model) - gradient).norm() / gradient.norm()
        found[name] = loss, abs(float(out.mean_loss) / loss - 1), float(off)
    return found


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    axes = ("dp_shard", "ring", "ulysses", "tp")
    for axis in axes:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=1)
    args = parser.parse_args()
    mesh = sb.Mesh(**{axis: getattr(args, axis) for axis in axes})
    found = compare(mesh)
    if mesh.rank == 0:
        print(f"{'loss':<14}{'one process':>14}{'loss off by':>14}{'gradient off by':>18}")
        for name, (loss, loss_off, gradient_off) in found.items():
            print(f"{name:<14}{loss:>14.6f}{loss_off:>14.1e}{gradient_off:>18.1e}")


if __name__ == "__main__":
    main()
