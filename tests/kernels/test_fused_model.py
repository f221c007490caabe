"""Models whose norms, rotations and gates are computed by our kernels equal the stock model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import seqbraid
from seqbraid import Mesh
from seqbraid.models import fused, tower_attention
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_config, tiny_media_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.ops import cross_entropy, cross_entropy_triton, rows_triton, swiglu_triton
from seqbraid.ops.kernels import KernelOptions
from seqbraid.plan.memory import MemoryOptions
from seqbraid.verify.parity import check_parity
from tests.helpers import ranks
from tests.kernels.conftest import interpret

LENGTHS = (1, 40, 2, 23)
FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma3", "deepseek_v3", "qwen3_next", "qwen3_5"]


def count_calls(patch: pytest.MonkeyPatch, calls: Counter[str], module: Any, name: str) -> None:
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[f"{module.__name__.rpartition('.')[2]}.{name}"] += 1
        return function(*args, **kwargs)

    patch.setattr(module, name, call)


def fuse(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Take the kernels for float32 on the CPU, as on a GPU; gives how often each was launched."""
    calls: Counter[str] = Counter()

    for module in (rows_triton, swiglu_triton):
        for name in ("forward", "backward"):
            count_calls(patch, calls, module, name)
    patch.setattr(fused, "takes_triton", lambda op, x, kernels: x.dtype == torch.float32)
    return calls


def model_of(family: str) -> PreTrainedModel:
    """Norms have weights of their own, where tiny models have ones."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_parity(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fuse(monkeypatch)
    parity = check_parity(model_of(family), random_samples(LENGTHS, 97, seed=3))
    assert parity.holds, parity.worst
    assert calls["rows_triton.forward"] and calls["rows_triton.backward"]
    assert (calls["swiglu_triton.backward"] > 0) == (family not in ("gemma3", "qwen3_moe"))


def test_parity_of_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their queries and keys are turned by the kernel too, which takes angles wider than its rows."""
    calls = fuse(monkeypatch)
    count_calls(monkeypatch, calls, tower_attention, "fused_rows")
    parity = check_parity(tiny_media_model("qwen3_vl"), mixed_samples(tiny_media_config("qwen3_vl"))[:3])
    assert parity.holds, parity.worst
    # More than in the trial of each of three layers, which a wrong rotation would not pass.
    assert calls["tower_attention.fused_rows"] > 2 * 3


def verdict(mesh: dict[str, int]) -> tuple[bool, object, Counter[str]]:
    """On one rank: whether parity holds, its worst quantity, and how often kernels were called."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        calls = fuse(patch)
        for name in ("part_sums", "part_gradient", "cross_entropy_rows"):
            count_calls(patch, calls, cross_entropy_triton, name)
        by_triton = lambda x, *_: cross_entropy_triton if x.dtype == torch.float32 else None  # noqa: E731
        patch.setattr(cross_entropy, "fused_kernels", by_triton)
        parity = check_parity(model_of("qwen3_5"), random_samples(LENGTHS, 97, seed=3), Mesh(**mesh))
    return parity.holds, parity.worst, calls


@pytest.mark.parametrize("axis", ["ring", "tp"])
def test_parity_over_ranks(axis: str) -> None:
    """With sharded parameters, and heads and tokens exchanged; with parts of the vocabulary."""
    for holds, worst, calls in ranks.run(verdict, 2, {axis: 2}, limit=300.0):
        assert holds, worst
        assert calls["rows_triton.backward"]
        for name, of_tp in (("part_sums", 1), ("part_gradient", 1), ("cross_entropy_rows", 0)):
            assert (calls[f"cross_entropy_triton.{name}"] > 0) == (of_tp == (axis == "tp")), name


def gradients(
    model: PreTrainedModel, memory: MemoryOptions, kernels: KernelOptions | None = None
) -> dict[str, torch.Tensor]:
    braided = seqbraid.parallelize(model, memory=memory, kernels=kernels)
    batch = seqbraid.pack(random_samples(LENGTHS, 97, seed=3), model.config)
    braided(batch).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    braided.release()
    return found


MEMORY = {
    "full": (MemoryOptions(checkpointing="full"), 2),
    "selective": (MemoryOptions(checkpointing="selective"), 2),
    "offload": (MemoryOptions(checkpointing="full", offload=True), 2),
    "tiles": (MemoryOptions(mlp_tile=10), 1),
}
"""And how often a norm of the decoder's layers is computed in a step."""


@pytest.mark.parametrize("switch", MEMORY)
def test_the_same_gradients_with_less_memory(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fuse(monkeypatch)
    model, (memory, runs) = model_of("qwen3"), MEMORY[switch]
    wanted = gradients(model, MemoryOptions())
    once = calls["rows_triton.forward"]
    assert once == 4 * 2 + 1  # two norms, queries and keys of two layers; the norm before the head
    calls.clear()
    found = gradients(model, memory)
    assert calls["rows_triton.forward"] == runs * (once - 1) + 1
    assert calls["swiglu_triton.backward"] == 2 * (7 if switch == "tiles" else 1)
    assert calls["swiglu_triton.forward"] == 2 * calls["swiglu_triton.backward"]
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_recomputed_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(monkeypatch)
    model = model_of("qwen3")
    wanted = gradients(model, MemoryOptions())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, gradient in gradients(model, MemoryOptions()).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_calls_outside_of_a_step_are_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = fuse(monkeypatch), model_of("qwen3").eval()
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    ids = torch.arange(20)[None] % 97
    with torch.no_grad():
        wanted, said = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)
        braided = seqbraid.parallelize(model)
        assert torch.equal(model(ids).logits, wanted)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), said)
        assert not calls
        braided.logits(seqbraid.pack([{"input_ids": ids[0]}], model.config))
    assert calls["rows_triton.forward"] == 9
    braided.release()
    assert forwards == {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert not [name for name, forward in forwards.items() if forward is not None]


def test_a_model_is_taken_over_again_with_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each time alone, and nothing of them in the modules afterwards."""
    calls, model = fuse(monkeypatch), model_of("qwen3")
    takes = fused.takes_triton
    monkeypatch.setattr(
        fused,
        "takes_triton",
        lambda op, x, kernels: takes(op, x, kernels) and getattr(kernels.options, op.name) != "torch",
    )
    stock = KernelOptions(norm="torch", rotary="torch", swiglu="torch")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    found = []
    for kernels in (KernelOptions(), stock, KernelOptions(swiglu="torch"), KernelOptions()):
        calls.clear()
        found.append(gradients(model, MemoryOptions(), kernels))
        assert (calls["rows_triton.forward"] > 0) == (kernels.norm == "auto")
        assert (calls["swiglu_triton.forward"] > 0) == (kernels.swiglu == "auto")
        after = {name: dict(vars(module)) for name, module in model.named_modules()}
        assert before.keys() == after.keys()
        assert all(before[name].keys() == after[name].keys() for name in before)
    assert all(torch.equal(first, found[3][name]) for name, first in found[0].items())


def rows_without(what: str) -> Callable[..., Any]:
    def wrong(x: torch.Tensor, norm: Any, turn: Any = None, gate: Any = None) -> torch.Tensor:
        if what == "norms of queries":
            norm = None if turn is not None else norm
        elif what == "rotation":
            turn = None
        elif what == "eps" and norm is not None:
            norm = norm._replace(eps=0.3)
        elif what == "gate":
            gate = None
        elif what == "positions" and turn is not None:
            turn = type(turn)(*(t.roll(1, 0) for t in turn))
        return RIGHT(x, norm, turn, gate)

    return wrong


RIGHT = fused.fused_rows


@pytest.mark.parametrize("defect", ["norms of queries", "rotation", "eps", "gate", "positions", "up"])
def test_planted_defects_are_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(monkeypatch)
    if defect == "up":
        right = fused.fused_swiglu
        monkeypatch.setattr(fused, "fused_swiglu", lambda gate, up, in_place: right(gate, gate * 1, in_place))
    else:
        monkeypatch.setattr(fused, "fused_rows", rows_without(defect))
        monkeypatch.setattr(fused._Attention, "rows", None, raising=False)
        wrong, make = rows_without(defect), fused._Attention.__init__

        def made(self: Any, norms: Any, takes: Any, rows: Any = None) -> None:
            make(self, norms, takes, rows or wrong)

        monkeypatch.setattr(fused._Attention, "__init__", made)
    assert not check_parity(model_of("qwen3_5"), random_samples(LENGTHS, 97, seed=3)).holds
