"""Fields follow their labels, a loss of the user's own is divided as asked, and what is none is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from tests.helpers import ranks
from tests.models.test_step import gradients

LENGTHS = (30, 7, 1, 64)


def samples(**fields: Any) -> list[dict[str, Any]]:
    """Each field is made of a sample's number and length."""
    made = random_samples(LENGTHS, 97, seed=2)
    return [
        {**s, "fields": {name: f(i, len(s["input_ids"])) for name, f in fields.items()}}
        for i, s in enumerate(made)
    ]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


# --- fields


def test_a_field_belongs_to_its_label() -> None:
    """`[T, …]` of any type, shifted as the targets are, beside numbers of samples."""
    ids = [[5, 6, 7], [8, 9]]
    made = [
        {"input_ids": x, "fields": {"own": x, "wide": torch.tensor(x)[:, None].expand(-1, 2), "n": len(x)}}
        for x in ids
    ]
    batch = sb.pack(made, tiny_model("llama").config)
    assert batch.targets.tolist() == [6, 7, -100, 9, -100]
    assert batch.fields["own"].tolist() == [6, 7, 0, 9, 0]
    assert batch.fields["own"].dtype == torch.int64 and batch.scalars["n"].tolist() == [3, 2]
    assert torch.equal(batch.fields["wide"][:, 1], batch.fields["own"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([{"a": [1.0, 2.0]}, {}], r"sample 0: field 'a' has 2 entries for 3 input_ids"),
        ([{"a": [1.0] * 3}, {}], r"sample 1: it has the fields none, the first sample .* has a"),
        ([{"a": [1.0] * 3}, {"a": 2.0}], r"sample 1: its field 'a' is one number in some samples"),
        ([{"a": [[1.0]] * 3}, {"a": [1.0] * 2}], "fields of other shapes"),
        ([{"a": "words"}, {"a": "words"}], "sample 0: field 'a' cannot be made a tensor of"),
        ([{"weights": [1.0, -1.0, 2.0]}, {}], "numbers of 0 and above"),
        ([{"weights": 2.0}, {}], "must be"),
        ([[1, 2, 3], {}], "fields is a list"),
    ],
)
def test_fields_that_are_none_are_refused(fields: list[Any], message: str) -> None:
    made = [{"input_ids": [5, 6, 7], "fields": fields[0]}, {"input_ids": [8, 9], "fields": fields[1]}]
    with pytest.raises(ValueError, match=message):
        sb.pack(made, tiny_model("llama").config)


# --- values in an own loop


def own_loop(axes: dict[str, int]) -> tuple[list[Tensor], float, float]:
    """Of a rank: its samples' log-probabilities off from plain code, and the gradient's error."""
    mesh, stock = Mesh(**axes), tiny_model("qwen3")
    all_samples = samples(advantages=lambda i, n: torch.arange(n) / n + i)
    mine = all_samples[mesh.data_rank :: mesh.data_world_size]
    total, plain = torch.zeros(()), []
    for s in all_samples:
        logits = stock(input_ids=s["input_ids"][None], use_cache=False).logits[0, :-1] / 0.7
        every, labels = logits.log_softmax(-1), s["labels"][1:]
        own = every.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
        entropy = -(every.exp() * every).sum(-1) * (labels != -100)
        plain.append(torch.cat([own.new_zeros(1), own]).detach())
        total = total + (s["fields"]["advantages"][1:] * own).sum() + entropy.sum() + own.sum() ** 2 / 99
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in stock.parameters() if p.grad is not None])
    stock.zero_grad()
    model = sb.parallelize(stock, mesh)
    batch = sb.pack(mine, stock.config, mesh, policy="zigzag")
    found = model.token_logprobs(batch, temperature=0.7, entropy=True)
    assert found.entropy is not None and not found.logprobs[~found.labelled].any()
    loss = (found.logprobs * found.fields["advantages"]).sum() + found.entropy.sum()
    (loss + (found.sample_sums(found.logprobs) ** 2).sum() / 99).backward()
    with torch.no_grad():
        lists = model.token_logprobs(batch, temperature=0.7).per_sample()
    for again, first in zip(lists, found.per_sample(), strict=True):
        torch.testing.assert_close(again, first)
    error = relative(torch.cat([g.flatten() for g in gradients(model).values()]), wanted)
    mine_of_plain = plain[mesh.data_rank :: mesh.data_world_size]
    return lists, error, max(float((a - b).abs().max()) for a, b in zip(lists, mine_of_plain, strict=True))


@pytest.mark.parametrize(
    "axes", [{}, {"ring": 2, "ulysses": 2}, {"tp": 2, "dp_shard": 2}, {"ring": 2, "tp": 2}], ids=str
)
def test_log_probabilities_in_an_own_loop_equal_plain_code(axes: dict[str, int]) -> None:
    for lists, error, furthest in ranks.run(own_loop, sb.mesh.prod(axes.values()), axes):
        assert furthest < 2e-5 and error < 1e-5
        assert max(float(x.abs().max()) for x in lists) > 1


def as_a_reference(axes: dict[str, int]) -> list[Tensor]:
    """Of a rank: log-probabilities and entropies of all samples, without a gradient."""
    model = sb.parallelize(tiny_model("qwen3"), Mesh(**axes))
    batch = sb.pack(samples(), model.model.config, model.mesh, policy="zigzag")
    with torch.inference_mode():
        found = model.token_logprobs(batch, temperature=0.7, entropy=True)
    assert found.entropy is not None
    return [*found.per_sample(), *found.per_sample(found.entropy)]


def test_a_reference_in_stages_gives_all_ranks_its_values() -> None:
    (alone,) = ranks.run(as_a_reference, 1, {})
    for axes in ({"pp": 2, "ring": 2}, {"pp": 2, "tp": 2}):
        for found in ranks.run(as_a_reference, 4, axes):
            for ours, theirs in zip(found, alone, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_reference_in_inference_mode_leaves_nothing_that_a_backward_refuses() -> None:
    model = sb.parallelize(tiny_model("llama"))
    batch = sb.pack(samples(reward=lambda i, n: float(i)), model.model.config)
    with torch.inference_mode():
        found = model.token_logprobs(batch)
        before = found.sample_sums(found.logprobs * found.fields["reward"])
        batch = batch.with_fields(reference=found.logprobs)

    def loss(tokens: sb.LocalTokens) -> Tensor:
        both = tokens.logprobs() * tokens.fields["reference"]
        return tokens.sample_sums(both * tokens.fields["reward"]).sum()

    out = sb.forward_backward(model, [batch], loss)
    assert before.shape == (4,) and out.mean_loss > 1
    assert all(p.grad is not None for p in model.model.parameters())


def in_bfloat16() -> tuple[float, float]:
    """Off from the built-in loss, which makes its gradients in the forward."""
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh, compute_dtype=torch.bfloat16)
    batch = sb.pack(samples(), model.model.config, mesh)
    built_in = sb.forward_backward(model, [batch])
    wanted = torch.cat([g.flatten() for g in gradients(model).values()])
    own = sb.forward_backward(model, [batch], lambda tokens: -tokens.logprobs().sum())
    got = torch.cat([g.flatten() for g in gradients(model).values()])
    return abs(float(own.mean_loss / built_in.mean_loss) - 1), relative(got, wanted)


def test_bfloat16_is_as_near_as_the_built_in_loss() -> None:
    for loss_off, gradient_off in ranks.run(in_bfloat16, 2):
        assert loss_off < 1e-5 and gradient_off < 1e-2


# --- divisors, weights


def minus_logprobs(tokens: sb.LocalTokens) -> tuple[Tensor, dict[str, Any]]:
    """Cross entropy, with its own count beside it; on a rank without labels it is a constant."""
    if not tokens.labelled.any():
        return torch.zeros(()), {"tokens": 0}
    return -tokens.logprobs().sum(), {"tokens": tokens.labelled.sum()}


def divided(axis: str) -> None:
    """Of two data ranks, one of which has a row with few tokens, so that some ranks see no label."""
    mesh = Mesh(**{"dp_shard": 2, axis: 2})
    model = sb.parallelize(tiny_model("llama"), mesh)
    rows = [samples()[2 * mesh.data_rank :], [{"input_ids": [1, 2]}]]
    batches = [sb.pack(row, model.model.config, mesh) for row in rows]
    step = sb.Step(batches, {"rollouts": 3})
    plain = sb.forward_backward(model, step)
    wanted = gradients(model)
    with_label = sum(bool((s["labels"][1:] != -100).any()) for r in (0, 1) for s in samples()[2 * r :]) + 2
    for divisor, number in (
        (None, plain.label_tokens),
        ("tokens", plain.label_tokens),
        ("samples", with_label),
        ("pairs", with_label / 2),
        ("rollouts", 6),
        (2.5, 2.5),
    ):
        out = sb.forward_backward(model, step, minus_logprobs, divisor)
        assert out.divisor == number and out.metrics["tokens"] == out.label_tokens == plain.label_tokens
        torch.testing.assert_close(out.mean_loss * number, plain.mean_loss * plain.label_tokens)
        for name, gradient in gradients(model).items():
            assert relative(gradient * number, wanted[name] * plain.label_tokens) < 1e-5, name


@pytest.mark.parametrize("axis", ["ring", "pp"])
def test_a_sum_is_divided_by_what_is_asked_for(axis: str) -> None:
    ranks.run(divided, 4, axis)


def weighted() -> None:
    """Half of the samples have weights; 0 is as no label."""
    mesh, stock = Mesh(dp_shard=2, ring=2), tiny_model("llama")
    made = samples(weights=lambda i, n: (torch.arange(n) % 3) / 2)
    total, count = torch.zeros(()), 0.0
    made[1] = {key: value for key, value in made[1].items() if key != "fields"}
    for s in made:
        logits = stock(input_ids=s["input_ids"][None], use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, s["labels"][1:], reduction="none")
        weights = s.get("fields", {}).get("weights", torch.ones(len(s["labels"])))[1:]
        total, count = total + (losses * weights).sum(), count + float(weights[s["labels"][1:] != -100].sum())
    (total / count).backward()
    wanted = torch.cat([p.grad.flatten() for p in stock.parameters() if p.grad is not None])
    stock.zero_grad()
    model = sb.parallelize(stock, mesh)
    mine = made[mesh.data_rank :: 2]
    out = sb.forward_backward(model, [sb.pack([s], stock.config, mesh) for s in mine])
    assert out.divisor == count != out.label_tokens
    torch.testing.assert_close(out.mean_loss, total.detach() / count)
    assert relative(torch.cat([g.flatten() for g in gradients(model).values()]), wanted) < 1e-5
    whole = sb.pack(mine, stock.config, mesh)
    model(whole).loss.backward()
    assert relative(torch.cat([g.flatten() for g in gradients(model).values()]), wanted) < 1e-5
    with pytest.raises(ValueError, match="cannot divide the losses of labels with weights"):
        model(whole, label_tokens=500)


def test_weights_of_labels_are_those_of_the_loss_and_of_its_divisor() -> None:
    ranks.run(weighted, 4)


# --- refusals, on every rank


def step_with(loss: Any, axes: dict[str, int] | None = None, fields: Any = None, **arguments: Any) -> None:
    mesh = Mesh(**({"ring": 2} if axes is None else axes))
    model = sb.parallelize(tiny_model("llama"), mesh)
    made = samples(**({} if fields is None else fields(mesh)))
    sb.forward_backward(model, [sb.pack(made, model.model.config, mesh)], loss, **arguments)


def mean_of_none(tokens: sb.LocalTokens) -> Tensor:
    return tokens.logprobs()


def float_of(tokens: sb.LocalTokens) -> float:
    return float(tokens.logprobs().sum())


def detached(tokens: sb.LocalTokens) -> Tensor:
    return tokens.logprobs().detach().sum()


def on_one_rank(tokens: sb.LocalTokens) -> Tensor:
    if tokens.group.rank:
        raise KeyError("advantages")
    return tokens.logprobs().sum()


def before_a_sum_on_one_rank(tokens: sb.LocalTokens) -> Tensor:
    """The other one asks for two."""
    if tokens.group.rank:
        raise KeyError("advantages")
    gain = tokens.sample_sums(tokens.logprobs()).sum()
    return gain + tokens.sums_at_tokens(tokens.logprobs()).sum()


def other_sums(tokens: sb.LocalTokens) -> Tensor:
    logprobs = tokens.logprobs()
    return (tokens.sums_at_tokens if tokens.group.rank else tokens.sample_sums)(logprobs).sum()


def fewer_sums(tokens: sb.LocalTokens) -> Tensor:
    values = tokens.logprobs()
    for _ in range(1 + tokens.group.rank):
        values = tokens.sums_at_tokens(values)
    return values.sum()


def other_metrics(tokens: sb.LocalTokens) -> Any:
    return tokens.logprobs().sum(), {f"of_{tokens.group.rank}": 1.0}


def field_of_one_rank(mesh: Mesh) -> Any:
    return {"advantages": lambda i, n: torch.ones(n + mesh.rank)}


def fields_that_differ(mesh: Mesh) -> Any:
    return {"advantages": lambda i, n: torch.full((n,), float(mesh.rank))}


def reference_on_another_mesh() -> None:
    mesh, other = Mesh(ring=2), Mesh(dp_shard=2)
    model, reference = (sb.parallelize(tiny_model("llama"), m) for m in (mesh, other))
    with torch.no_grad():
        reference.token_logprobs(sb.pack(samples(), model.model.config, mesh))


def values_of_stages(name: str) -> None:
    mesh = Mesh(pp=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    getattr(model, name)(sb.pack(samples(), model.model.config, mesh))


def temperature_of_one_rank(value: Any) -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    model.token_logprobs(
        sb.pack(samples(), model.model.config, mesh), temperature=value if mesh.rank else 1.0
    )


def second_backward() -> None:
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    found = model.token_logprobs(sb.pack(samples(), model.model.config, mesh)).logprobs.sum()
    found.backward(retain_graph=True)
    found.backward()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (step_with, (mean_of_none,), r"torch.float32 of shape \(\d+,\): call .sum\(\) on it"),
        (step_with, (float_of,), "this one returned a float"),
        (step_with, (detached,), "this one has none: make it of tokens.logprobs"),
        (step_with, (on_one_rank,), "advantages"),
        (step_with, (before_a_sum_on_one_rank,), "advantages"),
        (step_with, (before_a_sum_on_one_rank, {"pp": 2, "ring": 2}), "advantages"),
        (step_with, (other_sums,), "called sample_sums and sums_at_tokens in different orders"),
        (step_with, (fewer_sums,), "or some of them more often"),
        (step_with, (other_metrics,), r"the metrics of the loss = \['of_1'\] but rank 0 has \['of_0'\]"),
        (step_with, (mean_of_none, {"tp": 2}), r"call .sum\(\) on it"),
        (step_with, (None, None, field_of_one_rank), "field 'advantages' has 31 entries for 30"),
        (step_with, (None, None, fields_that_differ), "share a row but packed different samples"),
        (step_with, (mean_of_none, {"pp": 2}), r"call .sum\(\) on it"),
        (values_of_stages, ("token_logprobs",), "with a gradient, unlike .* is not supported with pp=2"),
        (values_of_stages, ("hidden_states",), "hidden_states is not supported with pp=2"),
        (reference_on_another_mesh, (), "pass the model's mesh to pack"),
        (temperature_of_one_rank, (0.0,), "temperature=0.0 is not a number above 0"),
        (temperature_of_one_rank, (0.5,), "temperature=0.5"),
        (second_backward, (), "backward was called a second time"),
    ],
)
def test_refused_on_every_rank(function: Any, arguments: tuple[Any, ...], message: str) -> None:
    size = 4 if {"pp": 2, "ring": 2} in arguments else 2
    for error in ranks.errors(function, size, *arguments):
        assert re.search(message, error.message), error


def test_an_unknown_divisor_is_refused() -> None:
    model = sb.parallelize(tiny_model("llama"))
    batch = sb.pack(samples(), model.model.config)
    with pytest.raises(ValueError, match="divisor='rollouts' is not known; use 'tokens', 'samples', 'pairs'"):
        sb.forward_backward(model, [batch], divisor="rollouts")
    with pytest.raises(ValueError, match="this rank's tokens are"):
        batch.with_fields(reference=torch.zeros(3))
