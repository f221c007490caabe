"""Computing in bfloat16 with float32 parameters, on one process and on many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import seqbraid as sb
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, mixed_samples, tiny_media_model
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.verify.reference import stock_step
from tests.helpers import ranks

# Some CPUs claim bf16 products that they then die of. Read at the first such product, here and, since they
# inherit it, in all ranks that are started later; the Makefile sets it for those that were started before.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

FAMILIES = ["llama", "qwen3_5", "qwen3_vl"]


def make(family: str) -> PreTrainedModel:
    return tiny_media_model(family) if _is_media(family) else tiny_model(family)


def _is_media(family: str) -> bool:
    return family in MEDIA_FAMILIES and family != "qwen3_5"


def samples_of(family: str, config: Any) -> list[dict[str, Any]]:
    return mixed_samples(config) if _is_media(family) else random_samples(LENGTHS, 97)


def in_bf16(stock: PreTrainedModel) -> PreTrainedModel:
    """Parameters alone: `from_pretrained` leaves the rotary frequencies wide too."""
    for parameter in stock.parameters():
        parameter.data = parameter.data.bfloat16()
    return stock


def packed(stock: PreTrainedModel, samples: Any, mesh: sb.Mesh, **settings: Any) -> tuple[Tensor, Any]:
    model = sb.parallelize(stock, mesh, **settings)
    batch = sb.pack(samples, stock.config, mesh)
    out = model(batch)
    out.loss.backward()
    # Two micro-batches of the same: the sum is kept in the gradient's own type.
    once = {name: _full(p.grad) for name, p in stock.named_parameters() if p.grad is not None}
    assert out.loss.dtype == torch.float32
    model.release()
    return out.mean_loss, once


def _full(gradient: Any) -> Tensor:
    return gradient.full_tensor().clone() if hasattr(gradient, "full_tensor") else gradient.clone()


def compared(family: str) -> list[str]:
    """On one process: what differs between bf16 compute and bf16 parameters, which should be nothing."""
    stock = make(family)
    samples, mesh = samples_of(family, stock.config), sb.Mesh()
    loss, gradients = packed(stock, samples, mesh, compute_dtype=torch.bfloat16)
    plain_loss, plain = packed(in_bf16(make(family)), samples, mesh)
    assert all(g.dtype == torch.float32 for g in gradients.values())
    assert all(p.dtype == torch.float32 for p in stock.parameters())
    assert gradients.keys() == plain.keys() and len(plain) > 10
    different = [name for name in plain if not torch.equal(gradients[name], plain[name].float())]
    return different if torch.equal(loss, plain_loss) else ["loss", *different]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_compute_is_what_bf16_parameters_would_give(family: str) -> None:
    """A_log, dt_bias, norms and embeddings included, to the bit."""
    assert ranks.run(compared, 1, family) == [[]]


def on_ranks(family: str, settings: dict[str, Any], mesh: dict[str, int]) -> Any:
    stock = make(family)
    return packed(stock, samples_of(family, stock.config), sb.Mesh(**mesh), **settings)


def stock_errors(family: str) -> tuple[float, Any, float]:
    """On one process: the stock model in float32, and how far its bf16 is from it."""
    stock = make(family)
    samples = samples_of(family, stock.config)
    reference = stock_step(stock, samples)
    bf16 = stock_step(in_bf16(make(family)), samples)
    return float(reference.loss), reference.gradients, distance(bf16.gradients, reference.gradients)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the whole gradient."""
    squares = [(found[name].float() - expected[name]).square().sum() for name in expected]
    return float(sum(squares).sqrt() / sum(g.square().sum() for g in expected.values()).sqrt())  # type: ignore[union-attr]


@pytest.mark.parametrize("axis", ["ring", "tp"])
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_bf16_on_ranks_is_as_near_to_float32_as_stock_bf16(family: str, axis: str) -> None:
    [(loss, gradients, floor)] = ranks.run(stock_errors, 1, family)
    assert 1e-3 < floor < 0.1
    on = MemoryOptions("full", offload=True, mlp_tile=37, loss_chunk=64)
    settings = {"compute_dtype": torch.bfloat16, "memory": on}
    for mean_loss, found in ranks.run(on_ranks, 2, family, settings, {axis: 2}):
        assert abs(float(mean_loss) - loss) < 2e-3 * loss
        assert distance(found, gradients) < 1.5 * floor


def accumulated() -> float:
    """On one rank: a gradient of one large and 64 tiny parts; in bf16 the tiny ones would all be lost."""
    stock, mesh = tiny_model("llama"), sb.Mesh(ring=2)
    model = sb.parallelize(stock, mesh, compute_dtype=torch.bfloat16)
    batch = sb.pack(random_samples([40, 30], 97), stock.config, mesh)
    model(batch).loss.backward()
    once = _full(stock.lm_head.weight.grad)
    for _ in range(64):
        model(batch, label_tokens=1024 * batch.label_tokens).loss.backward()
    return float((_full(stock.lm_head.weight.grad) / once - 1).nanmedian())


def test_micro_batches_sum_in_float32() -> None:
    for growth in ranks.run(accumulated, 2):
        assert growth == pytest.approx(64 / 1024, rel=0.02)


def saved(folder: str) -> list[str]:
    """On one process: names of weights that did not come back as they went in."""
    stock = tiny_model("llama")
    before = {name: p.detach().clone() for name, p in stock.named_parameters()}
    model = sb.parallelize(stock, compute_dtype=torch.bfloat16)
    model(sb.pack([{"input_ids": [1, 2, 3]}], stock.config)).loss.backward()
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    after = dict(loaded.named_parameters())
    assert after.keys() == before.keys()
    return [name for name in before if not torch.equal(after[name], before[name])]


def test_what_one_process_saves_is_the_float32_stock_model(tmp_path: Path) -> None:
    assert ranks.run(saved, 1, str(tmp_path)) == [[]]


def test_types_that_cannot_be_kept_exact_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"compute_dtype=torch.float16 is not supported; use one of torch.bf"
    ):
        sb.parallelize(tiny_model("llama"), compute_dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight is torch.bfloat16; load the model with dtype="
    ):
        sb.parallelize(in_bf16(tiny_model("llama")), compute_dtype=torch.bfloat16)
    # float32 parameters in float32 need no sharding, and so no process group.
    sb.parallelize(tiny_model("llama"), compute_dtype=torch.float32)
    assert not torch.distributed.is_initialized()
