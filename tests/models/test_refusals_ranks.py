"""What is wrong on one rank is refused on all, and nobody hangs (20 s at most)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.verify.samples import random_samples
from seqbraid.verify.tiny import tiny_model
from tests import ranks


def heads_that_do_not_divide() -> None:
    sb.parallelize(
        tiny_model("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2), Mesh(ulysses=4)
    )


def linear_heads_that_do_not_divide() -> None:
    sb.parallelize(tiny_model("qwen3_5"), Mesh(ring=2, ulysses=2), gated_delta="heads")


def unknown_exchange() -> None:
    sb.parallelize(tiny_model("llama"), Mesh(ring=2), gated_delta="guess")


def other_exchange_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3_5"), mesh, gated_delta=("states", "heads")[mesh.rank])
    model(sb.pack(random_samples([20, 30], 97), model.model.config, mesh))


def world_that_is_not_the_product() -> None:
    Mesh(ring=3)


def other_samples_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model(sb.pack(random_samples([20, 30], 97, seed=mesh.rank), model.model.config, mesh))


def attention_changed_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20, 30], 97), model.model.config, mesh)
    if mesh.rank == 1:
        model.model.set_attn_implementation("sdpa")
    model(batch)


def bad_sample_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    config = tiny_model("llama").config
    sb.pack([{"input_ids": [1, 2, 3] if mesh.rank == 0 else [1, 500]}], config, mesh)


def other_weights_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    sb.parallelize(tiny_model("llama", seed=mesh.rank), mesh)


def too_small_a_divisor() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20 + mesh.rank], 97, ignored="none"), model.model.config, mesh)
    model(batch, label_tokens=25)  # more than either data rank has, less than both


def batch_of_another_mesh() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model(sb.pack(random_samples([20, 30], 97), model.model.config, Mesh(rank=0, world_size=1)))


def window_under_ring() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("gemma3"), mesh)
    model(sb.pack(random_samples([200, 30], 97), model.model.config, mesh))


def an_axis_to_come() -> None:
    sb.parallelize(tiny_model("llama"), Mesh(tp=2))


CASES: list[tuple[Callable[[], None], int, str]] = [
    (heads_that_do_not_divide, 4, "ulysses=4 does not divide 6 query heads; use 1, 2, 3 or 6"),
    (linear_heads_that_do_not_divide, 4, 'use 1 or 2 ranks, or state passing (gated_delta="states")'),
    (unknown_exchange, 2, "gated_delta='guess' is unknown; use one of 'auto', 'states', 'heads'"),
    (other_exchange_on_one_rank, 2, "or with other settings, or differ in gated_delta"),
    (world_that_is_not_the_product, 2, "needs 3 processes"),
    (other_samples_on_one_rank, 2, "ranks 0 and 1 share a row but packed different samples"),
    (attention_changed_on_one_rank, 2, "changed to 'sdpa'"),
    (bad_sample_on_one_rank, 2, "holds 500, outside the vocabulary"),
    (other_weights_on_one_rank, 2, "weights on ranks [1] differ"),
    (too_small_a_divisor, 2, "label_tokens=25 is less than the 39"),
    (batch_of_another_mesh, 2, "pass the model's mesh to pack"),
    (window_under_ring, 2, "use ulysses instead of ring"),
    (an_axis_to_come, 2, "tp=2 is not supported yet"),
]


@pytest.mark.parametrize(("function", "size", "message"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_refused_on_every_rank(function: Callable[[], None], size: int, message: str) -> None:
    for error in ranks.errors(function, size, limit=20):
        assert error.kind == "ValueError"
        assert message in error.message


def two_meshes() -> list[float]:
    """Two models with different meshes in one process, their steps interleaved."""
    samples = random_samples([64, 130, 5, 1], 97)
    meshes = [Mesh(ring=4), Mesh(ring=2, ulysses=2), Mesh(ulysses=4), Mesh(dp_shard=4)]
    models = [sb.parallelize(tiny_model("llama"), mesh) for mesh in meshes]
    outs = []
    for model, mesh in zip(models, meshes, strict=True):
        own = samples if mesh.sequence_size > 1 else samples[mesh.data_rank : mesh.data_rank + 1]
        outs.append(model(sb.pack(own, model.model.config, mesh)))
    for out in reversed(outs):
        out.loss.backward()
    norms = []
    for model in models:
        total = torch.zeros(())
        for parameter in model.parameters():
            total += parameter.grad.full_tensor().norm() ** 2  # type: ignore[union-attr,operator]
        norms.append(float(total.sqrt()))
    return norms


def test_models_with_different_meshes_live_in_one_process() -> None:
    for norms in ranks.run(two_meshes, 4):
        assert max(norms) - min(norms) < 1e-5 * norms[0]


def saved(folder: str) -> list[torch.Tensor]:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3"), mesh)
    model.save_pretrained(folder)
    return model.logits(
        sb.pack([{"input_ids": [3, 1, 4, 1, 5]}, {"input_ids": [9, 2]}], model.model.config, mesh)
    )


def test_sharded_weights_are_saved_as_a_stock_checkpoint(tmp_path: object) -> None:
    from transformers import AutoModelForCausalLM

    for logits in ranks.run(saved, 2, str(tmp_path)):
        loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path)).eval()
        for ids, found in zip(([3, 1, 4, 1, 5], [9, 2]), logits, strict=True):
            expected = loaded(torch.tensor([ids])).logits[0]
            assert (found - expected).norm() <= 1e-5 * expected.norm()
