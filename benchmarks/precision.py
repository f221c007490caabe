"""How far bfloat16 is from float32, ours beside stock's: loss and every parameter gradient of a packed step,
and log-probabilities with their gradients, and entropies.

`python -m benchmarks.precision` makes a small model of each family whose weights bfloat16 can hold, and
takes a step of the stock model in float32 and in bfloat16, each sample alone, and ours in bfloat16, all
samples in one row. The error of a gradient is its distance from float32 over float32's norm; printed is the
root mean square over the parameters, ours over stock's (the goal is 1.1 at most), the median of the
parameters' own ratios, and the worst of them. Parameters whose gradient is lost in bfloat16 altogether
(stock is off by more than half, as with the bias of keys, which no softmax sees) are counted and left out.
With experts much of the error is that of other choices of a router, on either side: `--seeds` averages.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import seqbraid as sb
from seqbraid.models.families import family_of
from seqbraid.models.media_tokens import token_types
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_config, tiny_media_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.objective import POLICY, TEMPERATURE, with_fields
from seqbraid.verify.parity import packed_step
from seqbraid.verify.reference import Measurement, shifted_targets, stock_step

VOCABULARY = 1024
LENGTHS = (1, 2, 63, 64, 65, 130, 257, 700, 1500)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.05,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
HEADS |= {"linear_value_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3": {"query_pre_attn_scalar": 64, "sliding_window": 128},
    "qwen3_moe": EXPERTS,
    "qwen3_next": HEADS | EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen3_5": HEADS,
    "qwen3_5_moe": HEADS | EXPERTS | {"shared_expert_intermediate_size": 128},
}
MEDIA = {"qwen3_vl": "qwen3_vl", "qwen3_5 with images": "qwen3_5", "qwen3_omni": "qwen3_omni"}
MEDIA_TEXT = {"initializer_range": 0.1}

LOST = 0.5
"""An error of stock's own by which a gradient says nothing any more."""


def small_model(name: str, seed: int) -> PreTrainedModel:
    """Float32, with weights that bfloat16 can hold."""
    if name in MEDIA:
        model = tiny_media_model(MEDIA[name], seed, text_config=MEDIA_TEXT)
    else:
        model = tiny_model(name, seed, **(SIZES | FAMILIES[name]))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def samples_of(name: str) -> list[dict[str, Any]]:
    """Text of many lengths, or media of all kinds, with fields for a loss of log-probabilities."""
    if name in MEDIA:
        samples = mixed_samples(tiny_media_config(MEDIA[name])) + mixed_samples(
            tiny_media_config(MEDIA[name]), 1
        )
        return with_fields(samples)
    return with_fields(random_samples(LENGTHS, VOCABULARY, seed=3))


def on(samples: Sequence[dict[str, Any]], device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The samples as a user of the stock model would pass them."""

    def moved(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: moved(value) for key, value in x.items()}
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() and x.dim() > 1 else None)

    return [moved(sample) for sample in samples]


def with_types(samples: Sequence[dict[str, Any]], config: Any) -> list[dict[str, Any]]:
    """What a processor gives beside the ids: which of them are of media."""
    types = [token_types(sample["input_ids"], config) for sample in samples]
    return [{**sample, "mm_token_type_ids": x} for sample, x in zip(samples, types, strict=True)]


def stock(
    model: PreTrainedModel, samples: Sequence[dict[str, Any]], objective: Any, device: str
) -> Measurement:
    """Each sample alone."""
    if family_of(model.config) is not None:
        samples = with_types(samples, model.config)
    with torch.device(device):
        return stock_step(model, on(samples, device, model.dtype), objective=objective)


def values(logits: Sequence[Tensor], samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Log-probabilities of the targets and entropies, as plain code makes them of logits."""
    found: dict[str, list[Tensor]] = {"log-probabilities": [], "entropies": []}
    for own, sample in zip(logits, samples, strict=True):
        targets = shifted_targets(sample).to(own.device)
        every = (own.float() / TEMPERATURE).log_softmax(-1)[targets >= 0]
        found["log-probabilities"].append(every.gather(1, targets[targets >= 0][:, None])[:, 0])
        found["entropies"].append(-(every.exp() * every).sum(-1))
    return {name: torch.cat(parts) for name, parts in found.items()}


@torch.no_grad()
def our_values(model: PreTrainedModel, samples: Sequence[dict[str, Any]], device: str) -> dict[str, Tensor]:
    """The same by `token_logprobs`, all samples in one row."""
    mesh = sb.Mesh(rank=0, world_size=1)
    braided = sb.parallelize(model, mesh)
    try:
        batch = sb.pack(samples, model.config, mesh).to(device)
        found = braided.token_logprobs(batch, temperature=TEMPERATURE, entropy=True)
        lists = {"log-probabilities": found.per_sample(), "entropies": found.per_sample(found.entropy)}
    finally:
        braided.release()
    return {
        name: torch.cat(
            [x[1:][shifted_targets(s)[:-1].to(x.device) >= 0] for x, s in zip(parts, samples, strict=True)]
        ).float()
        for name, parts in lists.items()
    }


def off(got: Tensor, wanted: Tensor) -> float:
    """Relative distance."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def ratios(ours: Measurement, plain: Measurement, wide: Measurement) -> tuple[float, str]:
    """The ratio, and what else the module's docstring names."""
    there = [name for name, g in wide.gradients.items() if float(g.norm())]
    names = [name for name in there if 0 < off(plain.gradients[name], wide.gradients[name]) < LOST]
    of_ours, of_stock = (
        {name: off(m.gradients[name], wide.gradients[name]) for name in names} for m in (ours, plain)
    )
    single = {name: of_ours[name] / of_stock[name] for name in names}
    worst = max(single, key=lambda name: single[name])
    whole = [math.sqrt(sum(x * x for x in e.values()) / len(names)) for e in (of_ours, of_stock)]
    losses = [abs(float(m.loss) - float(wide.loss)) for m in (ours, plain)]
    return whole[0] / whole[1], (
        f"gradients {whole[0]:.2e} / {whole[1]:.2e} = {whole[0] / whole[1]:.2f}, median of {len(names)} "
        f"parameters {statistics.median(single.values()):.2f}, worst {single[worst]:.2f} ({worst}), "
        f"{len(there) - len(names)} lost; loss {losses[0]:.1e} / {losses[1]:.1e}"
    )


def compare(name: str, device: str, seed: int) -> dict[str, float]:
    """A family's lines; gives their ratios."""
    wide = small_model(name, seed).to(device)
    narrow = copy.deepcopy(wide).bfloat16()
    samples, mesh = samples_of(name), sb.Mesh(rank=0, world_size=1)
    found: dict[str, float] = {}
    for kind, objective in (("cross entropy", None), ("log-probabilities", POLICY)):
        exact, plain = (stock(model, samples, objective, device) for model in (wide, narrow))
        ours = packed_step(narrow, samples, mesh, objective=objective)
        found[f"gradients of {kind}"], line = ratios(ours, plain, exact)
        print(f"{name}, {kind}: {line}", flush=True)
    wanted, of_stock = values(exact.logits, samples), values(plain.logits, samples)
    for quantity, got in our_values(narrow, samples, device).items():
        a, b = (off(x.to(got.device), wanted[quantity].to(got.device)) for x in (got, of_stock[quantity]))
        found[quantity] = a / b
        print(f"{name}, {quantity}: {a:.2e} / {b:.2e} = {a / b:.2f}", flush=True)
    return found


def main() -> None:
    """All families."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", default=",".join([*FAMILIES, *MEDIA]))
    parser.add_argument("--seeds", type=int, default=1, help="models of a family")
    args = parser.parse_args()
    print("distance from float32 in bfloat16: ours / stock's = ratio")
    for name in args.families.split(","):
        seeds = [compare(name, args.device, seed) for seed in range(args.seeds)]
        means = {key: statistics.geometric_mean([found[key] for found in seeds]) for key in seeds[0]}
        if args.seeds > 1:
            said = ", ".join(f"{key} {mean:.2f}" for key, mean in means.items())
            print(f"{name}, geometric mean of {args.seeds} models: {said}", flush=True)


if __name__ == "__main__":
    main()
