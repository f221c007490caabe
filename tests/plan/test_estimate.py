"""The memory estimate against what torch holds: states to the byte, activations within a quarter."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from seqbraid import Mesh, pack, parallelize
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.estimate import Estimate, memory_estimate
from seqbraid.plan.memory import MemoryOptions
from tests.helpers.ranks import run

TOKENS, VOCABULARY = 768, 512
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
GATED_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def medium(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Wide enough that what grows with the width counts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, **changes,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(dtype)
    return model


class Held(TorchDispatchMode):
    """Remembers the storages that operations made, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self) -> int:
        """Of those that somebody still holds."""
        return sum(size for ref, size in self.made.values() if not ref.expired())


def held_after_forward(model: PreTrainedModel, memory: MemoryOptions, tokens: int = TOKENS) -> int:
    """Bytes that a forward leaves behind for its backward."""
    mesh = Mesh()
    braided = parallelize(model, mesh, memory=memory)
    batch = pack(random_samples([tokens], VOCABULARY), model.config, mesh)
    # Weights that are looked at through views are no activations.
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    with Held() as held:
        out = braided(batch)
        held.made = {key: value for key, value in held.made.items() if key not in parameters}
        found = held.bytes()
    assert out.loss.requires_grad
    return found


def estimated(model: PreTrainedModel, memory: MemoryOptions) -> Estimate:
    precision = "float32" if model.dtype == torch.float32 else "bfloat16"
    return memory_estimate(model, Mesh(), memory, precision, "adamw", TOKENS)  # type: ignore[arg-type]


CASES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_5": ("qwen3_5_text", GATED_DELTA),
    "gemma3": ("gemma3_text", {"sliding_window": 128}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(CASES))
def test_activations_are_near_what_is_kept(family: str, dtype: torch.dtype) -> None:
    model_type, changes = CASES[family]
    model = medium(model_type, dtype, **changes)
    ours = estimated(model, MemoryOptions())
    found = held_after_forward(model, MemoryOptions())
    assert ours["activations"] + ours["loss"] == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize(
    "memory",
    [
        MemoryOptions(mlp_tile=64),
        MemoryOptions("selective"),
        MemoryOptions("full"),
        MemoryOptions("full", mlp_tile=64, loss_chunk=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_options_take_from_activations_what_they_say(family: str, memory: MemoryOptions) -> None:
    model_type, changes = CASES[family]
    model = medium(model_type, **changes)
    ours = estimated(model, memory)
    found = held_after_forward(model, memory)
    assert ours["activations"] + ours["loss"] == pytest.approx(found, rel=0.25)
    assert ours["activations"] < estimated(model, MemoryOptions())["activations"]


def test_offloaded_activations_are_in_host_memory() -> None:
    model = medium("llama")
    there, away = (estimated(model, MemoryOptions("full", offload=offload)) for offload in (False, True))
    layer_input = TOKENS * 256 * 4
    assert there.host_bytes == 0 and away.host_bytes == 3 * layer_input
    assert there["activations"] - away["activations"] == layer_input, "two of three layers are in flight"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_states_are_counted_to_the_byte(precision: str) -> None:
    model = medium("qwen3", torch.float32 if precision == "float32" else torch.bfloat16)
    model.model.embed_tokens.requires_grad_(False)
    ours = memory_estimate(model, Mesh(), None, precision, "adamw", 64)  # type: ignore[arg-type]
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in trained]
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    assert ours["parameters"] == sum(p.nbytes for p in model.parameters())
    assert ours["gradients"] == sum(master.grad.nbytes for master in masters if master.grad is not None)
    own = sum(master.nbytes for master in masters) if precision == "bfloat16" else 0
    assert ours["optimizer"] == sum(x.nbytes for x in moments) + own
    assert not [line for line in ours.lines if "gathered" in line.name], "one process gathers nothing"


def rank_bytes(axes: dict[str, int], family: str) -> tuple[int, int]:
    mesh = Mesh(**axes)
    model = medium(*CASES[family][:1], **CASES[family][1])
    ours = memory_estimate(model, mesh, None, "float32", "adamw", 64)
    braided = parallelize(model, mesh)
    return ours["parameters"], sum(p.to_local().nbytes for p in braided.parameters())  # type: ignore[attr-defined]


def test_a_shard_is_that_of_the_fullest_rank() -> None:
    for family in ("qwen3_5", "gemma3"):
        found = run(rank_bytes, 4, {"dp_shard": 2, "tp": 2}, family)
        assert {estimate for estimate, _ in found} == {max(held for _, held in found)}
    found = run(rank_bytes, 4, {"pp": 2, "dp_shard": 2}, "qwen3_5")
    assert {estimate for estimate, _ in found} == {max(held for _, held in found)}
    found = run(rank_bytes, 3, {"dp_shard": 3}, "llama")
    assert {estimate for estimate, _ in found} == {max(held for _, held in found)}
    assert len({held for _, held in found}) > 1, "256 rows are not a multiple of 3"


def test_a_model_without_memory_is_estimated_and_shown() -> None:
    with torch.device("meta"):
        model = medium("llama")
    mesh = Mesh(ring=2, ulysses=2, dp_shard=2, rank=0, world_size=8)
    ours = memory_estimate(model, mesh, MemoryOptions("full"), "mixed", "adamw", 4096)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert layer > VOCABULARY * 256, "two layers are more than one and the head"
    assert ours["gathered units"] == 2 * layer * 2 and ours["gathered rest"] == 256 * 2, "the last norm"
    alone = memory_estimate(model, Mesh(), MemoryOptions("full"), "mixed", "adamw", 1024)
    assert ours["activations"] == alone["activations"], "a quarter of the row on each of four ranks"
    console = Console(file=io.StringIO(), width=120)
    console.print(ours.table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(line.name in shown for line in ours.lines) and f"{ours.total / 2**30:.2f}" in shown
    loss = ours["loss"] + ours["logits"]
    backward = ours["a layer's backward"]
    assert loss != backward
    always = sum(line.bytes for line in ours.lines) - loss - backward
    assert ours.to_json()["total"] == always + max(loss, backward), "one is over before the other begins"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "'float32', 'mixed' or 'bfloat16'"),
        ({"optimizer": "lion"}, "adamw, sgd"),
        ({"row_tokens": 0}, "row_tokens=0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(changes: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = medium("llama")
    with pytest.raises(ValueError, match=message):
        memory_estimate(model, Mesh(), **changes)
