"""What one rank alone does wrong in `pack`, a step or its backward ends all ranks with the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from tests.helpers import ranks
from tests.models.test_refusals_ranks import packed_and_run, step_on


def dict_on_one_rank() -> None:
    sample = {"input_ids": [1, 2]}
    packed_and_run([sample], sample)


def autocast_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=mesh.rank == 1):
        step_on(mesh, model)


def too_long_for_positions_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    step_on(mesh, sb.parallelize(tiny_model("gpt2", max_position_embeddings=20), mesh))


def second_backward_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    first, second = step_on(mesh, model), step_on(mesh, model)
    first.loss.backward(retain_graph=True)
    (first if mesh.rank else second).loss.backward()


def another_call_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20], 97), model.model.config, mesh)
    out = model(batch)
    if mesh.rank:
        model(batch)
    else:
        out.loss.backward()


def gradients_of_gradients_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    out = step_on(mesh, model)
    out.loss.backward(create_graph=mesh.rank == 1)


def parallelized_twice_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    stock = tiny_model("qwen3_5")
    sb.parallelize(stock, mesh)
    sb.parallelize(stock if mesh.rank else tiny_model("qwen3_5"), mesh)


def head_replaced_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        model.model.lm_head = torch.nn.Linear(32, 97, bias=False)
    step_on(mesh, model)


def lora_on_the_head_of_one_rank() -> None:
    import peft

    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"]), model.model)
    step_on(mesh, model)


def router_loss_unknown_to_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3_moe"), mesh)
    if mesh.rank:
        vars(model.model.config)["router_aux_loss_coef"] = None
    step_on(mesh, model)


def dropout_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("gpt2"), mesh)
    if mesh.rank:
        model.model.transformer.drop.p = 0.1
    step_on(mesh, model)


def loss_of_its_own_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)

    def squares(hidden: torch.Tensor, head: torch.nn.Linear, batch: sb.PackedBatch) -> torch.Tensor:
        return hidden.square().sum()

    batch = sb.pack(random_samples([20], 97), model.model.config, mesh)
    sb.forward_backward(model, [batch], loss=squares if mesh.rank else None)


def count_as_a_tensor_on_one_rank() -> None:
    """Is the same count; the error is that of another one."""
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    step_on(mesh, model, label_tokens=torch.tensor(60) if mesh.rank else 60)
    step_on(mesh, model, label_tokens=torch.tensor(61) if mesh.rank else 60)


def no_batch_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20], 97), model.model.config, mesh)
    sb.forward_backward(model, [] if mesh.rank else [batch])


def no_list_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch: Any = sb.pack(random_samples([20], 97), model.model.config, mesh)
    sb.forward_backward(model, batch if mesh.rank else [batch])


def cast_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        model.model.double()
    step_on(mesh, model)


def saved_by_one_rank() -> None:
    """Nothing is written: the ranks say so before."""
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model.save_pretrained("/proc/none") if mesh.rank else step_on(mesh, model)


def checkpointed_on_one_rank() -> None:
    """Layers that are computed again exchange again."""
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    step_on(mesh, model).loss.backward()


def dropout_that_differs() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("gpt2", resid_pdrop=0.1), mesh)
    if mesh.rank:
        model.model.transformer.h[1].eval()
    step_on(mesh, model, seed=1)


def window_of_a_layer_that_differs() -> None:
    mesh = Mesh(ulysses=2)
    model = sb.parallelize(tiny_model("gemma3"), mesh)
    if mesh.rank:
        model.parts.layers[0].mixer.sliding_window += 1
    step_on(mesh, model)


def adapter_scaled_on_one_rank() -> None:
    import peft

    mesh, stock = Mesh(ring=2), tiny_model("llama")
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), stock)
    model = sb.parallelize(stock, mesh)
    if mesh.rank:
        model.parts.layers[1].mixer.q_proj.set_scale("default", 3.0)
    step_on(mesh, model)


def reduced_once_on_one_rank() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model.reduce_gradients = "once" if mesh.rank else "each"
    step_on(mesh, model)


def chunks_of_shared_logits_on_one_rank() -> None:
    mesh = Mesh(tp=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model.loss_chunk = 8 + mesh.rank
    step_on(mesh, model)


def tiles_of_shared_mlps_on_one_rank() -> None:
    mesh = Mesh(tp=2)
    sb.parallelize(tiny_model("llama"), mesh, memory=sb.MemoryOptions(mlp_tile=8 + mesh.rank))


def divisor_of_one_tensor_rank() -> None:
    mesh = Mesh(tp=2)
    step_on(mesh, sb.parallelize(tiny_model("llama"), mesh), label_tokens=60 + mesh.rank)


def divisor_of_one_stage() -> None:
    mesh = Mesh(pp=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([20], 97), model.model.config, mesh)
    sb.forward_backward(model, [batch], divisor=60 + mesh.rank)


def head_replaced_on_the_last_stage() -> None:
    mesh = Mesh(pp=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        model.model.lm_head = torch.nn.Linear(32, 97, bias=False)
    sb.forward_backward(model, [sb.pack(random_samples([20], 97), model.model.config, mesh)])


def head_of_one_tensor_rank() -> None:
    mesh = Mesh(tp=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    if mesh.rank:
        model.model.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros(97, 32))
    step_on(mesh, model)


def weight_of_the_head_on_one_rank() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model.head_weight() if mesh.rank else step_on(mesh, model)


CASES: list[tuple[Callable[[], None], str]] = [
    (dict_on_one_rank, "a list of samples, not dict; put the one sample into a list"),
    (autocast_on_one_rank, "compute_dtype=torch.bfloat16"),
    (too_long_for_positions_on_one_rank, "21 tokens, but GPT2LMHeadModel has learned positions for 20"),
    (second_backward_on_one_rank, "backward was called a second time"),
    (another_call_on_one_rank, "rank 1 has the call = 'forward' but rank 0 has 'backward'"),
    (gradients_of_gradients_on_one_rank, "backward(create_graph=True)"),
    (parallelized_twice_on_one_rank, "parallelized already"),
    (head_replaced_on_one_rank, "'lm_head' is another module"),
    (lora_on_the_head_of_one_rank, "'lm_head' is another module"),
    (router_loss_unknown_to_one_rank, "has no router_aux_loss_coef"),
    (loss_of_its_own_on_one_rank, "squares' but rank 0 has 'forward_backward'"),
    (count_as_a_tensor_on_one_rank, "rank 1 has label_tokens = 61 but rank 0 has 60"),
    (no_batch_on_one_rank, "the step has no micro-batches"),
    (no_list_on_one_rank, "a step is a list of results of seqbraid.pack, not PackedBatch"),
    (
        cast_on_one_rank,
        "rank 1 has dtypes of parameters = ['torch.float64'] but rank 0 has ['torch.float32']",
    ),
    (saved_by_one_rank, "rank 1 has the call = 'save_pretrained' but rank 0 has 'forward'"),
    (dropout_on_one_rank, "trains with dropout 0.1 at 'drop'"),
    (dropout_that_differs, "rank 1 has dropout of transformer.h.1.attn.resid_dropout = None but rank 0 has"),
    (checkpointed_on_one_rank, "rank 1 has gradient checkpointing of model"),
    (window_of_a_layer_that_differs, "rank 1 has sliding_window of layer 0 = 17 but rank 0 has 16"),
    (adapter_scaled_on_one_rank, "rank 1 has the adapters of model.layers.1.self_attn.q_proj = "),
    (reduced_once_on_one_rank, "rank 1 has reduce_gradients = 'once' but rank 0 has 'each'"),
    (chunks_of_shared_logits_on_one_rank, "rank 1 has loss_chunk = 9 but rank 0 has 8"),
    (tiles_of_shared_mlps_on_one_rank, "rank 1 has memory.mlp_tile = 9 but rank 0 has 8"),
    (divisor_of_one_tensor_rank, "rank 1 has label_tokens = 61 but rank 0 has 60"),
    (divisor_of_one_stage, "divisor=61' but rank 0 has"),
    (head_replaced_on_the_last_stage, "'lm_head' is another module"),
    (head_of_one_tensor_rank, "lm_head.weight' was replaced since it was sharded"),
    (weight_of_the_head_on_one_rank, "rank 1 has the call = 'head_weight' but rank 0 has 'forward'"),
]


@pytest.mark.parametrize(("function", "message"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_refused_on_both_ranks(function: Callable[[], None], message: str) -> None:
    for error in ranks.errors(function, 2, limit=20):
        assert error.kind == "ValueError"
        assert message in error.message
