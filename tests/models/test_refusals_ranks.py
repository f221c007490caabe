"""What is wrong on one rank is refused on all, and nobody hangs (20 s at most)."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from tests.helpers import ranks
from tests.models.test_refusals import build


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


def packed_and_run(first: Any, second: Any) -> None:
    """Each data rank packs what it has; what one cannot pack is heard of in the step."""
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model(sb.pack(second if mesh.rank else first, model.model.config, mesh))


def bad_sample_on_one_rank() -> None:
    packed_and_run([{"input_ids": [1, 2, 3]}], [{"input_ids": [1, 500]}])


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


def step_on(mesh: Mesh, model: sb.BraidedModel, **arguments: Any) -> sb.StepOutput:
    samples = random_samples([20 + mesh.data_rank], 97, ignored="none")
    return model(sb.pack(samples, model.model.config, mesh), **arguments)


def divisor_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    step_on(mesh, sb.parallelize(tiny_model("llama"), mesh), **({"label_tokens": 39} if mesh.rank else {}))


def divisor_of_the_own_data_rank() -> None:
    mesh = Mesh(dp_shard=2)
    step_on(mesh, sb.parallelize(tiny_model("llama"), mesh), label_tokens=60 + mesh.rank)


def divisor_that_is_no_number_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    step_on(mesh, sb.parallelize(tiny_model("llama"), mesh), label_tokens=(float("nan") if mesh.rank else 39))


def ids_on_one_rank(ids: Any) -> None:
    packed_and_run([{"input_ids": [1, 2]}], [{"input_ids": ids}])


def none_on_one_rank() -> None:
    ids_on_one_rank(None)


def words_on_one_rank() -> None:
    ids_on_one_rank(["a", "b"])


def huge_id_on_one_rank() -> None:
    ids_on_one_rank([1, 2**70])


def error_within_pack_on_one_rank() -> None:
    class Broken(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise RuntimeError("the disk is gone")

    sample = {"input_ids": [1, 2]}
    packed_and_run([sample], [Broken(sample)])


def other_kind_of_config_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    rope = {"rope_type": ("default", "dynamic")[mesh.rank], "rope_theta": 1e4, "factor": 2.0}
    sb.parallelize(tiny_model("llama", rope_parameters=rope), mesh)


def other_options_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    memory = MemoryOptions(checkpointing=("none", "full")[mesh.rank])
    sb.parallelize(tiny_model("llama"), mesh, memory=memory)


def option_refused_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    sb.parallelize(tiny_model("llama"), mesh, gated_delta=("auto", "guess")[mesh.rank])


def no_model_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model: Any = tiny_model("llama")
    sb.parallelize(model if mesh.rank else model.lm_head, mesh)


def other_mesh_on_one_rank() -> None:
    sb.parallelize(tiny_model("llama"), Mesh(ring=2) if int(os.environ["RANK"]) else Mesh(ulysses=2))


def frozen_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    next(iter(model.parts.layer_list[0].parameters())).requires_grad_(mesh.rank == 0)
    step_on(mesh, model)


def frozen_on_one_rank_before() -> None:
    mesh = Mesh(ring=2)
    model: Any = tiny_model("llama")
    model.lm_head.weight.requires_grad_(mesh.rank == 0)
    sb.parallelize(model, mesh)


def router_loss_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3_moe"), mesh)
    model.model.config.output_router_logits = mesh.rank == 0
    step_on(mesh, model)


def window_on_one_rank() -> None:
    mesh = Mesh(ulysses=2)
    model = sb.parallelize(tiny_model("gemma3"), mesh)
    model.model.config.sliding_window += mesh.rank
    step_on(mesh, model)


def no_gradient_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    with torch.set_grad_enabled(mesh.rank == 0):
        step_on(mesh, model)


def logits_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20], 97), model.model.config, mesh)
    model(batch) if mesh.rank else model.logits(batch)


def evaluation_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    step_on(mesh, sb.parallelize(tiny_model("llama").train(mesh.rank == 0), mesh))


def tensor_as_batch_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20], 97), model.model.config, mesh)
    model(torch.tensor([[1, 2]]) if mesh.rank else batch)


def resized_on_all_ranks() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3"), mesh)
    model.model.get_input_embeddings().weight = torch.nn.Parameter(torch.randn(101, 32))
    step_on(mesh, model)


def resized(axes: dict[str, int]) -> list[str]:
    """What ranks that share the parameters are told; then a step, and the stock method again."""
    mesh = Mesh(**axes)
    stock = tiny_model("llama")
    model = sb.parallelize(stock, mesh)
    with pytest.raises(ValueError) as refused:
        stock.resize_token_embeddings(101)
    samples = random_samples([20 + mesh.data_rank], 97)
    assert sb.forward_backward(model, [sb.pack(samples, stock.config, mesh)]).mean_loss > 0
    assert model.release().resize_token_embeddings.__func__ is type(stock).resize_token_embeddings
    return [str(refused.value)]


def differentiated_again(axes: dict[str, int]) -> list[str]:
    """What ranks are told that call backward on what `forward_backward` gave, in a step or an evaluation."""
    model = sb.parallelize(tiny_model("llama"), Mesh(**axes))
    batch = sb.pack(random_samples([20, 30], 97), model.config, model.mesh)
    said = []
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            out = sb.forward_backward(model, [batch])
        with pytest.raises(ValueError) as refused:
            out.loss.backward()
        said.append(str(refused.value))
        # Otherwise it is a number like any other.
        half = out.loss / 2
        assert type(half) is torch.Tensor and type(copy.deepcopy(out).loss) is torch.Tensor
        assert pickle.loads(pickle.dumps(out.loss)) == out.loss and f"{out.loss:.3f}" == f"{half * 2:.3f}"
    return said


def weight_replaced_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        head = model.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.zeros(head.weight.shape))
    step_on(mesh, model)


def more_stages_than_layers() -> None:
    sb.parallelize(tiny_model("llama"), Mesh(pp=4))


def window_under_ring_on_one_data_rank() -> None:
    """Of a config that names no kinds of layers."""
    mesh = Mesh(dp_shard=2, ring=2)
    model = sb.parallelize(build("mistral", sliding_window=16), mesh)
    model(sb.pack(random_samples([200 if mesh.data_rank else 8], 97), model.model.config, mesh))


def sparse_gradients() -> None:
    model: Any = tiny_model("llama")
    model.model.embed_tokens.sparse = True
    sb.parallelize(model, Mesh(dp_shard=2))


CASES: list[tuple[Callable[[], None], int, str]] = [
    (heads_that_do_not_divide, 4, "ulysses=4 does not divide 6 query heads; use 1, 2, 3 or 6"),
    (linear_heads_that_do_not_divide, 4, 'use 1 or 2 ranks, or state passing (gated_delta="states")'),
    (unknown_exchange, 2, "gated_delta='guess' is unknown; use one of 'auto', 'states', 'heads'"),
    (other_exchange_on_one_rank, 2, "rank 1 has gated_delta = 'heads' but rank 0 has 'states'"),
    (world_that_is_not_the_product, 2, "needs 3 processes"),
    (other_samples_on_one_rank, 2, "ranks 0 and 1 share a row but packed different samples"),
    (attention_changed_on_one_rank, 2, "changed to 'sdpa'"),
    (bad_sample_on_one_rank, 2, "holds 500, outside the vocabulary"),
    (other_weights_on_one_rank, 2, "weights on ranks [1] differ"),
    (too_small_a_divisor, 2, "label_tokens=25 is less than the 39"),
    (batch_of_another_mesh, 2, "pass the model's mesh to pack"),
    (window_under_ring, 2, "use ulysses instead of ring"),
    (divisor_on_one_rank, 2, "rank 1 has label_tokens = 39 but rank 0 has None"),
    (divisor_of_the_own_data_rank, 2, "rank 1 has label_tokens = 61 but rank 0 has 60"),
    (divisor_that_is_no_number_on_one_rank, 2, "label_tokens=nan is not a whole number"),
    (none_on_one_rank, 2, "sample 0: input_ids is None, not a list of token ids"),
    (words_on_one_rank, 2, "not a list of token ids"),
    (huge_id_on_one_rank, 2, "fit into 64 bits"),
    (other_kind_of_config_on_one_rank, 2, "uses rope_type dynamic"),
    (other_options_on_one_rank, 2, "rank 1 has memory.checkpointing = "),
    (option_refused_on_one_rank, 2, "gated_delta='guess' is unknown"),
    (no_model_on_one_rank, 2, "takes a PreTrainedModel of transformers, not Linear"),
    (other_mesh_on_one_rank, 2, "rank 1 has the mesh = "),
    (frozen_on_one_rank, 2, "rank 1 has requires_grad of model.layers.0"),
    (frozen_on_one_rank_before, 2, "rank 1 has the parameter lm_head.weight"),
    (router_loss_on_one_rank, 2, "rank 1 has config output_router_logits"),
    (window_on_one_rank, 2, "rank 1 has config sliding_window = '17' but rank 0 has '16'"),
    (no_gradient_on_one_rank, 2, "rank 1 has grad mode = False but rank 0 has True"),
    (logits_on_one_rank, 2, "rank 1 has the call = 'forward' but rank 0 has 'logits'"),
    (evaluation_on_one_rank, 2, "rank 1 has training mode = False but rank 0 has True"),
    (tensor_as_batch_on_one_rank, 2, "takes the output of seqbraid.pack, not Tensor"),
    (resized_on_all_ranks, 2, "was of shape [97, 32]"),
    (weight_replaced_on_one_rank, 2, "was replaced since it was sharded"),
    (window_under_ring_on_one_data_rank, 4, "sliding window of 16; use ulysses instead of ring"),
    (sparse_gradients, 2, "model.embed_tokens of LlamaForCausalLM has sparse=True"),
    (more_stages_than_layers, 4, "has 2 layers, too few for 4 stages"),
]


@pytest.mark.parametrize(("function", "size", "message"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_refused_on_every_rank(function: Callable[[], None], size: int, message: str) -> None:
    for error in ranks.errors(function, size, limit=20):
        assert error.kind == "ValueError"
        assert message in error.message


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}], ids=str)
def test_later_calls_of_what_is_done_are_refused(axes: dict[str, int]) -> None:
    """A vocabulary that lies over ranks is not resized; a loss has one backward."""
    for said in ranks.run(resized, 2, axes, limit=20):
        assert "resize_token_embeddings(101) was called on a LlamaForCausalLM that is parallelized" in said[0]
    for said in ranks.run(differentiated_again, 2, axes, limit=20):
        assert all("the loss of forward_backward, which has run the backward already" in one for one in said)


def test_an_unforeseen_error_of_one_rank_ends_the_others() -> None:
    first, second = ranks.errors(error_within_pack_on_one_rank, 2, limit=20)
    assert first == ranks.Raised("ValueError", "rank 1 stopped: RuntimeError: the disk is gone")
    assert second == ranks.Raised("ValueError", "RuntimeError: the disk is gone")


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
