"""Experts that cannot lie over ranks are refused on every rank, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqbraid import Mesh, pack, parallelize
from seqbraid.models.expert_kind import expert_kind
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.lora import LoraOptions, add_lora
from tests.helpers import ranks
from tests.models.tiny_types import tiny_type_model


def refuse(model: Any, **axes: int) -> None:
    before = [(name, type(m), "forward" in vars(m)) for name, m in model.named_modules()]
    parameters = list(model.parameters())
    try:
        parallelize(model, Mesh(**axes))
    finally:
        assert [(name, type(m), "forward" in vars(m)) for name, m in model.named_modules()] == before
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def no_experts() -> None:
    refuse(tiny_model("llama"), ring=2, ep=2)


def fewer_experts() -> None:
    refuse(tiny_model("qwen3_moe", num_experts=2), ring=4, ep=4)


def experts_that_do_not_divide() -> None:
    refuse(tiny_model("qwen3_moe", num_experts=6), ring=4, ep=4)


def ranks_that_do_not_divide() -> None:
    refuse(tiny_model("qwen3_moe", num_experts=6), ring=4, ep=3)


def replicas_are_no_ranks_of_it() -> None:
    refuse(tiny_model("qwen3_moe"), dp_replicate=2, ep=2)


def doubled(model: Any) -> Any:
    for layer in model.model.layers:
        stock = type(layer.mlp.experts)

        def twice(self: Any, *args: Any, stock: Any = stock) -> Tensor:
            out: Tensor = 2 * stock.forward(self, *args)
            return out

        layer.mlp.experts.__class__ = type("OtherExperts", (stock,), {"forward": twice})
    return model


def another_kind() -> None:
    refuse(doubled(tiny_model("qwen3_moe")), ring=2, ep=2)


def another_kind_on_one_rank() -> None:
    mesh, model = Mesh(ring=2, ep=2), tiny_model("qwen3_moe")
    parallelize(doubled(model) if mesh.rank else model, mesh)


def shared_by_layers() -> None:
    model: Any = tiny_model("qwen3_moe")
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    refuse(model, ring=2, ep=2)


def adapted() -> None:
    import peft

    model = tiny_model("qwen3_moe")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    peft.inject_adapter_in_model(config, model)
    refuse(model, ring=2, ep=2)


def adapted_beside_tp() -> None:
    """Which peft makes of `all-linear` by itself, for a model of this class."""
    import peft

    model = tiny_model("qwen3_moe")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear"), model)
    refuse(model, tp=2)


CASES: list[tuple[Callable[[], None], int, str]] = [
    (no_experts, 2, "ep=2 shares out experts, and LlamaForCausalLM has none; use ep=1"),
    (fewer_experts, 4, "ep=4 is more than the 2 experts at 'model.layers.0.mlp.experts'"),
    (experts_that_do_not_divide, 4, "ep=4 does not divide the 6 experts"),
    (experts_that_do_not_divide, 4, "use one of 1, 2, 3, 6"),
    (ranks_that_do_not_divide, 4, "ep=3 is carved out of dp_shard × ring × ulysses × tp = 4"),
    (replicas_are_no_ranks_of_it, 2, "ep=2 is carved out of dp_shard × ring × ulysses × tp = 1"),
    (another_kind, 2, "(OtherExperts) of Qwen3MoeForCausalLM are not of a kind that we know"),
    (another_kind_on_one_rank, 2, "are not of a kind that we know"),
    (shared_by_layers, 2, "layers of Qwen3MoeForCausalLM share their experts"),
    (adapted, 2, "'model.layers.0.mlp.experts' of Qwen3MoeForCausalLM have adapters on their own tensors"),
    (adapted_beside_tp, 2, "give adapters to linear layers alone"),
]


@pytest.mark.parametrize(("function", "size", "message"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_refused_on_every_rank(function: Callable[[], None], size: int, message: str) -> None:
    for error in ranks.errors(function, size, limit=60):
        assert error.kind == "ValueError"
        assert message in error.message


def test_what_families_compute_is_recognised() -> None:
    for family, transposed, biased, gated in (
        ("qwen3_moe", False, False, True),
        ("deepseek_v3", False, False, True),
        ("gpt_oss", True, True, False),
    ):
        model: Any = tiny_model(family)
        kind = expert_kind(model.model.layers[1].mlp.experts)
        assert kind is not None
        assert (kind.transposed, kind.biased, kind.silu_gated) == (transposed, biased, gated)
    assert expert_kind(doubled(tiny_model("qwen3_moe")).model.layers[0].mlp.experts) is None


def test_a_kind_is_not_told_by_its_shapes() -> None:
    """As many channels between the projections as outside of them, in either layout."""
    for family in ("mixtral", "gpt_oss"):
        model: Any = tiny_type_model(family, torch.float32, hidden_size=32, intermediate_size=32)
        kind = expert_kind(model.model.layers[0].mlp.experts)
        assert kind is not None and kind.transposed == (family == "gpt_oss")


def beside_steps() -> tuple[list[Tensor], Tensor, Tensor]:
    """A model with adapters on linear layers: its gradients, and what it gives outside of a step."""
    mesh, model = Mesh(ring=2, ep=2), tiny_model("qwen3_moe")
    add_lora(model, LoraOptions(rank=2, targets=["q_proj"]))
    sample = random_samples([12], 97)
    wanted = model(input_ids=sample[0]["input_ids"][None]).logits.detach()
    braided = parallelize(model, mesh)
    braided(pack(sample, model.config, mesh)).loss.backward()
    frozen = [p for name, p in model.named_parameters() if "experts" in name]
    assert frozen and all(p.grad is None for p in frozen)
    gradients = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    whole: Any = braided
    whole.unshard()  # what is in no unit of its own
    with torch.no_grad():
        found = model(input_ids=sample[0]["input_ids"][None]).logits
    return gradients, wanted, found


def test_frozen_experts_and_calls_outside_of_a_step() -> None:
    for gradients, wanted, found in ranks.run(beside_steps, 2):
        assert len(gradients) == 4 and all(g.isfinite().all() for g in gradients)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
