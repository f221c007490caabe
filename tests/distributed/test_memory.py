"""The memory switches leave loss and gradients as they are, and do save memory."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

import seqbraid as sb
from seqbraid.distributed import offload
from seqbraid.models import attention
from seqbraid.models.braided import BraidedModel
from seqbraid.models.parts import ModelParts
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, mixed_samples, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.plan.memory import MemoryOptions
from tests.helpers import ranks

FAMILIES = ["llama", "qwen3_vl", "qwen3_5", "qwen3_moe"]
SAME_ARITHMETIC = [
    MemoryOptions("full"),
    MemoryOptions("selective"),
    MemoryOptions("full", offload=True),
    MemoryOptions("selective", offload=True),
]
OTHER_ORDER = [
    MemoryOptions(mlp_tile=37),
    MemoryOptions(loss_chunk=11),
    MemoryOptions("full", offload=True, mlp_tile=37, loss_chunk=11),
    MemoryOptions("selective", offload=True, mlp_tile=37, loss_chunk=11),
]


class Step:
    """Loss and gradients of two batches; their sums are what a step of two micro-batches gives."""

    def __init__(self, model: BraidedModel, batches: list[Any], disturb: Callable[[], object] = int) -> None:
        # Data ranks, where there are any, have the same samples here.
        total = sum(batch.label_tokens for batch in batches) * model.mesh.data_world_size
        outputs = [model(batch, label_tokens=total, seed=1) for batch in batches]
        disturb()
        for output in outputs:
            output.loss.backward()
        self.losses = [output.mean_loss for output in outputs]
        self.gradients = gradients(model)


def gradients(model: BraidedModel) -> dict[str, Tensor]:
    found = ((name, p.grad) for name, p in model.model.named_parameters() if p.grad is not None)
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found}


def make(family: str, **settings: Any) -> PreTrainedModel:
    if family in MEDIA_FAMILIES and family != "qwen3_5":
        return tiny_media_model(family, **settings)
    # Four layers, of which the first two are let go by the time that an offloaded forward ends.
    return tiny_model(family, num_hidden_layers=4, **settings)


def samples_of(family: str, stock: PreTrainedModel) -> list[list[dict[str, Any]]]:
    """Two micro-batches."""
    if stock.config is stock.config.get_text_config():
        return [random_samples(LENGTHS, 97), random_samples([90, 31, 8], 97, seed=1)]
    return [mixed_samples(stock.config), mixed_samples(stock.config, seed=1)[:3]]


def step(family: str, memory: MemoryOptions | None, mesh: dict[str, int], **settings: Any) -> Any:
    """On one rank: two batches, both forwards and an evaluation of a third before the first backward."""
    stock, on = make(family, **settings), sb.Mesh(**mesh)
    keys = list(stock.state_dict())
    model = sb.parallelize(stock, on, memory=memory)
    assert list(stock.state_dict()) == keys
    batches = [sb.pack(samples, stock.config, on) for samples in samples_of(family, stock)]
    other = sb.pack([{"input_ids": [5, 6, 7, 8, 9] * 9}], stock.config, on)

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()
            model(other)
            model.train()

    done = Step(model, batches, evaluate)
    sent = {axis: sum(group.sent.values()) for axis, group in model.groups.items()}
    return done.losses, done.gradients, sent


def assert_same(found: Any, expected: Any, tolerance: float, case: Any) -> None:
    assert found[1].keys() == expected[1].keys(), case
    pairs = [("loss", *pair) for pair in zip(found[0], expected[0], strict=True)]
    pairs += [(name, found[1][name], gradient) for name, gradient in expected[1].items()]
    for name, ours, theirs in pairs:
        if tolerance:
            assert (ours - theirs).norm() <= tolerance * theirs.norm(), (name, case)
        else:
            assert torch.equal(ours, theirs), (name, case)


def fitting(family: str, options: MemoryOptions) -> MemoryOptions:
    """Without tiles where all MLPs are routed experts."""
    return replace(options, mlp_tile=None) if "moe" in family else options


@pytest.mark.parametrize("family", FAMILIES)
def test_switches_change_nothing_in_one_process(family: str) -> None:
    expected = step(family, None, {})
    for options in SAME_ARITHMETIC:
        assert_same(step(family, options, {}), expected, 0.0, options)
    # Where the order of sums is another one, float64 tells rounding from a mistake; experts have no float64.
    dtype, tolerance = (torch.float32, 2e-6) if "moe" in family else (torch.float64, 1e-13)
    expected = step(family, None, {}, dtype=dtype)
    for options in OTHER_ORDER:
        found = step(family, fitting(family, options), {}, dtype=dtype)
        assert_same(found, expected, tolerance, options)


def steps(family: str, options: list[MemoryOptions | None], mesh: dict[str, int]) -> list[Any]:
    """On one rank; tiles are of another size on every rank, so their number is another one too."""
    own = [
        o if o is None or o.mlp_tile is None else replace(o, mlp_tile=7 + 6 * sb.Mesh(**mesh).rank)
        for o in options
    ]
    return [step(family, o, mesh) for o in own]


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", {"dp_shard": 2}),
        ("qwen3_moe", {"ring": 2}),
        ("qwen3_vl", {"ring": 2, "ulysses": 2}),
        ("qwen3_5", {"ring": 2, "ulysses": 2}),
    ],
)
def test_switches_change_nothing_on_ranks(family: str, mesh: dict[str, int]) -> None:
    full, selective, tiled = SAME_ARITHMETIC[2], SAME_ARITHMETIC[3], fitting(family, OTHER_ORDER[2])
    world_size = 4 if len(mesh) == 2 else 2
    for none, kept, recomputed, all_on in ranks.run(
        steps, world_size, family, [None, selective, full, tiled], mesh
    ):
        assert_same(kept, none, 0.0, selective)
        assert_same(recomputed, none, 0.0, full)
        assert_same(all_on, none, 5e-6, tiled)
        assert kept[2] == none[2], "a selective checkpoint sends nothing twice"
        assert len(mesh) == 1 or sum(recomputed[2].values()) > sum(none[2].values())


def bytes_of(memory: MemoryOptions | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a forward leaves behind, what of it is on the host's side, and the peak of a whole step."""
    stock = tiny_model("llama", num_hidden_layers=6, intermediate_size=512)
    model = sb.parallelize(stock, memory=memory)
    batch = sb.pack(random_samples([700, 300], 97), stock.config)
    model(batch).loss.backward()  # makes the gradients, which are no activations
    hosted: list[int] = []
    copy = offload._Saved._copy

    def counted(self: Any, source: Tensor, target: Tensor) -> Any:
        hosted.append(source.nbytes)
        return copy(self, source, target)

    monkeypatch.setattr(offload._Saved, "_copy", counted)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        out = model(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        out.loss.backward()
    monkeypatch.undo()
    left, forward_peak = _net_and_peak(forward)
    backward_peak = left + _net_and_peak(backward)[1]
    return {"left": left, "host": sum(hosted), "peak": max(forward_peak, backward_peak)}


def _net_and_peak(found: Any) -> tuple[int, int]:
    events = found.profiler.kineto_results.events()
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    net = peak = 0
    for _, size in sizes:
        net += size
        peak = max(peak, net)
    return net, peak


def test_switches_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, tokens = tiny_model("llama"), 1000
    hidden = tokens * stock.config.hidden_size * 4
    none, selective, full = (
        bytes_of(MemoryOptions(kind), monkeypatch) for kind in ("none", "selective", "full")
    )  # type: ignore[arg-type]
    assert none["left"] > 3 * selective["left"] and selective["left"] > 2 * full["left"]
    # Six layers' inputs, and what surrounds the layers.
    assert 6 * hidden <= full["left"] <= 14 * hidden
    hosted = bytes_of(MemoryOptions("full", offload=True), monkeypatch)
    # On a CPU both sides are one memory. The last two layers' originals are still there.
    assert hosted["host"] == 6 * hidden
    assert hosted["left"] - hosted["host"] <= full["left"] - 3 * hidden
    kept = bytes_of(MemoryOptions("selective", offload=True), monkeypatch)
    assert kept["left"] - kept["host"] < 0.6 * selective["left"]
    # Of 512 intermediate channels a layer keeps at least four tensors, or nothing; with full checkpoints the
    # last word have the four of one layer, or of one tile.
    tiled = bytes_of(MemoryOptions(mlp_tile=64), monkeypatch)
    assert none["left"] - tiled["left"] >= 6 * 3 * tokens * 512 * 4
    both = bytes_of(MemoryOptions("full", mlp_tile=64), monkeypatch)
    assert full["peak"] - both["peak"] >= 2 * tokens * 512 * 4
    assert both["peak"] < 0.25 * none["peak"]


def test_the_mixers_of_a_selective_checkpoint_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    right = attention.softmax_attention
    monkeypatch.setattr(attention, "softmax_attention", lambda *args: calls.append(1) or right(*args))
    counts = []
    for kind in ("selective", "full"):
        model = sb.parallelize(tiny_model("llama"), memory=MemoryOptions(kind))  # type: ignore[arg-type]
        model(sb.pack([{"input_ids": [1, 2, 3]}], model.model.config)).loss.backward()
        counts.append(len(calls))
        calls.clear()
    assert counts == [2, 4]


def test_shared_experts_are_tiled_and_routed_ones_are_not() -> None:
    assert not ModelParts.of(tiny_model("qwen3_moe")).layers[0].dense
    stock = tiny_model("qwen3_5_moe")
    names = {id(module): name for name, module in stock.named_modules()}
    assert [names[id(m)] for m in ModelParts.of(stock).layers[1].dense] == [
        "model.layers.1.mlp.shared_expert"
    ]


def test_tiles_are_computed_twice_and_not_three_times() -> None:
    stock, calls = tiny_model("llama"), []
    for layer in stock.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    model = sb.parallelize(stock, memory=MemoryOptions("full", mlp_tile=8))
    model(sb.pack([{"input_ids": list(range(40))}], stock.config)).loss.backward()
    assert len(calls) == 2 * 2 * 5


class LoRA(nn.Module):
    """A frozen linear layer and a learned product beside it, with dropout in front."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 8)
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.a.T @ self.b.T


def adapted(memory: MemoryOptions | None, dropout: float, mesh: dict[str, int]) -> Any:
    """On one rank: the gradients of adapters in the MLPs of a model that is frozen but for them."""
    stock, on = tiny_model("llama").requires_grad_(False), sb.Mesh(**mesh)
    torch.manual_seed(0)
    for layer in stock.model.layers:
        for name in ("gate_proj", "down_proj"):
            setattr(layer.mlp, name, LoRA(getattr(layer.mlp, name), dropout))
    model = sb.parallelize(stock, on, memory=memory)
    done = Step(model, [sb.pack(random_samples([60, 30, 41], 97), stock.config, on)])
    return done.losses, done.gradients


def test_adapters_in_tiles_get_their_gradients() -> None:
    expected = adapted(None, 0.0, {})
    assert len(expected[1]) == 2 * 2 * 2
    on = MemoryOptions("full", offload=True, mlp_tile=16)
    assert_same(adapted(on, 0.0, {}), expected, 2e-6, on)
    for found in ranks.run(adapted, 2, on, 0.0, {"ring": 2}):
        assert_same(found, expected, 2e-6, on)


def test_dropout_in_tiles_draws_what_it_draws_without() -> None:
    """In both runs of a tile, whatever its size, and on any mesh."""
    expected = adapted(None, 0.5, {})
    assert (expected[0][0] - adapted(None, 0.0, {})[0][0]).abs() > 1e-4
    for tile, tolerance in ((500, 0.0), (16, 2e-6), (1, 2e-6)):
        assert_same(adapted(MemoryOptions(mlp_tile=tile), 0.5, {}), expected, tolerance, tile)
    for found in ranks.run(adapted, 2, MemoryOptions("full", mlp_tile=16), 0.5, {"ring": 2}):
        assert_same(found, expected, 2e-6, "ring")


def frozen(memory: MemoryOptions | None, mesh: dict[str, int]) -> Any:
    """On one rank: a tower and embeddings that do not learn, and a row of which one rank has no image."""
    stock, on = tiny_media_model("qwen3_vl"), sb.Mesh(**mesh)
    stock.model.visual.requires_grad_(False)
    stock.get_input_embeddings().requires_grad_(False)
    parts = [(["image"], [2, 3]), ([], [61]), ([], [50])]
    samples = [
        media_sample(stock.config, items, 7, text, max_side=1, encoder_inputs=True) for items, text in parts
    ]
    model = sb.parallelize(stock, on, memory=memory)
    done = Step(model, [sb.pack(samples, stock.config, on)])
    return done.losses, done.gradients


def test_frozen_parts_get_no_gradient_and_the_rest_theirs() -> None:
    expected = frozen(None, {})
    assert not any("visual" in name or "embed_tokens" in name for name in expected[1])
    assert any("layers.0" in name for name in expected[1])
    for on in (None, MemoryOptions("full", True, 16, 32), MemoryOptions("selective")):
        for found in ranks.run(frozen, 2, on, {"ring": 2}):
            assert_same(found, expected, 2e-6, on)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"checkpointing": "some"},
            "checkpointing='some' is unknown; use one of 'none', 'selective', 'full'",
        ),
        ({"offload": True}, "checkpointing='none' keeps none"),
        ({"checkpointing": "full", "offload": "yes"}, "must be True or False"),
        ({"mlp_tile": 0}, "mlp_tile=0 must be a number of tokens"),
        ({"mlp_tile": True}, "mlp_tile=True"),
        ({"loss_chunk": 1.5}, "loss_chunk=1.5"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryOptions(**options)


def test_what_does_not_go_together_is_refused_and_leaves_no_trace() -> None:
    experts, checkpointed = tiny_model("qwen3_moe"), tiny_model("llama")
    checkpointed.gradient_checkpointing_enable()
    for stock, options, message in (
        (experts, MemoryOptions("full", mlp_tile=8), "Qwen3MoeForCausalLM has no dense MLP"),
        (checkpointed, MemoryOptions("full"), "its own gradient checkpointing on; call (.*)\\(\\) on it"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            sb.parallelize(stock, memory=options)
        if advice := re.search(r"call (\w+)\(\)", str(raised.value)):
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # not the name that is on its way out
                getattr(stock, advice[1])()
        assert stock.config._attn_implementation == "sdpa"
        assert not any("forward" in module.__dict__ for module in stock.modules())


def disagreeing() -> None:
    mesh = sb.Mesh(ring=2)
    sb.parallelize(tiny_model("llama"), mesh, memory=MemoryOptions(("none", "full")[mesh.rank]))  # type: ignore[arg-type]


def test_ranks_that_differ_are_refused() -> None:
    for raised in ranks.errors(disagreeing, 2):
        assert raised.kind == "ValueError" and "memory.checkpointing" in raised.message


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_vl"])
def test_release_throws_the_switches_back(family: str) -> None:
    stock = make(family)
    model = sb.parallelize(stock, memory=MemoryOptions("full", offload=True, mlp_tile=8))
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = stock(ids).logits
    assert model.release() is stock
    assert not any("forward" in module.__dict__ for module in stock.modules())
    torch.testing.assert_close(stock(ids).logits, logits)
