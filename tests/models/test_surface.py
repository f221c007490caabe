"""The public surface in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import seqbraid as sb
from seqbraid.layout import samples_from_dense
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.plan.memory import MemoryOptions
from tests.helpers import ranks


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_step_output_is_on_one_footing() -> None:
    stock = tiny_model("qwen3")
    samples = random_samples(LENGTHS, 97)
    model = sb.parallelize(stock)
    batch = sb.pack(samples, stock.config)
    out = model(batch)
    logits = model.logits(batch)
    assert [len(x) for x in logits] == list(LENGTHS)
    shifted = [torch.cat([s["labels"][1:], torch.tensor([-100])]) for s in samples]
    expected = sum(F.cross_entropy(x, t, reduction="sum") for x, t in zip(logits, shifted, strict=True))
    count = sum(int((t != -100).sum()) for t in shifted)
    correct = sum(int((x.argmax(-1) == t).sum()) for x, t in zip(logits, shifted, strict=True))
    assert out.label_tokens == count and int(out.correct_tokens) == correct
    torch.testing.assert_close(out.loss_sum, expected)
    torch.testing.assert_close(out.mean_loss, expected / count)
    assert not out.mean_loss.requires_grad and out.aux_loss is None and out.mtp_loss is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_accumulated_batches_give_the_gradient_of_one(family: str) -> None:
    stock = tiny_model(family, output_router_logits=False) if family == "qwen3_moe" else tiny_model(family)
    samples = random_samples([30, 5, 1, 64, 40, 17], 97, ignored="whole")
    model = sb.parallelize(stock)
    model(sb.pack(samples, stock.config)).loss.backward()
    whole = gradients(model)
    model.zero_grad()
    batches = [sb.pack(part, stock.config) for part in (samples[:2], samples[2:3], samples[3:])]
    total = sum(batch.label_tokens for batch in batches)
    for batch in batches:
        model(batch, label_tokens=total).loss.backward()
    for name, gradient in gradients(model).items():
        assert (gradient - whole[name]).norm() <= 1e-4 * whole[name].norm(), name


def test_router_loss_of_accumulated_batches_keeps_one_coefficient() -> None:
    stock = tiny_model("qwen3_moe")
    sample = random_samples([40], 97)
    model = sb.parallelize(stock)
    batch = sb.pack(sample, stock.config)
    once = model(batch)
    halves = [model(batch, label_tokens=2 * batch.label_tokens) for _ in range(2)]
    torch.testing.assert_close(once.loss, halves[0].loss + halves[1].loss)
    assert once.aux_loss is not None and once.aux_loss > 0.5


def test_a_batch_without_labels_is_an_exact_zero() -> None:
    stock = tiny_model("llama")
    model = sb.parallelize(stock)
    out = model(sb.pack([{"input_ids": [1, 2, 3], "labels": [-100] * 3}], stock.config))
    out.loss.backward()
    assert out.loss == 0 and out.label_tokens == 0
    assert all((g == 0).all() for g in gradients(model).values())


def test_a_batch_comes_to_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it must where the model is on a GPU: `meta` takes its place, which the loss cannot be asked of."""
    model = sb.parallelize(tiny_model("llama"), sb.Mesh())
    batch = sb.pack(random_samples([9, 4], 97), model.config, sb.Mesh())
    model.model.to("meta")
    monkeypatch.setattr(type(model), "gathered", lambda self, function, given, *_: [given.input_ids])
    assert model.logits(batch)[0].is_meta
    monkeypatch.setattr(
        type(model), "local_loss", lambda self, given, *_: pytest.fail(str(given.input_ids.device))
    )
    with pytest.raises(pytest.fail.Exception, match="meta"):
        model(batch)


def test_too_small_a_divisor_is_refused() -> None:
    stock = tiny_model("llama")
    model = sb.parallelize(stock)
    with pytest.raises(ValueError, match="label_tokens=1 is less than the 2"):
        model(sb.pack([{"input_ids": [1, 2, 3]}], stock.config), label_tokens=1)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_stock_model_goes_on_working(family: str) -> None:
    """Generation and a padded batch give what they gave before, and `release` leaves no trace."""
    stock = tiny_model(family).eval()
    before = copy.deepcopy(stock)
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = {
        "input_ids": torch.tensor([[0, 5, 6], [1, 2, 3]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
    }
    model = sb.parallelize(stock)
    model.logits(sb.pack([{"input_ids": [1, 2, 3]}], stock.config))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(stock.generate(ids, **settings), before.generate(ids, **settings))
    torch.testing.assert_close(stock(**padded).logits[:, -1], before(**padded).logits[:, -1])
    assert model.release() is stock
    assert stock.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in stock.modules())
    torch.testing.assert_close(stock(ids).logits, before(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_what_we_save_stock_transformers_loads(family: str, tmp_path: Path) -> None:
    stock = tiny_model(family)
    model = sb.parallelize(stock)
    samples = [{"input_ids": [3, 1, 4, 1, 5]}, {"input_ids": [9, 2]}]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    for sample, logits in zip(samples, model.logits(sb.pack(samples, stock.config)), strict=True):
        expected = loaded(torch.tensor([sample["input_ids"]])).logits[0]
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    stock = tiny_model("qwen3_5")
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    model = sb.parallelize(stock)
    batch, other = (sb.pack(random_samples(n, 97), stock.config) for n in ([40, 70, 3], [9, 100]))
    model(batch).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    out = model(batch)
    with torch.no_grad():
        model(other)
    out.loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def evaluate_in_inference_mode(family: str) -> bool:
    mesh = sb.Mesh(dp_shard=-1)
    stock = tiny_model(family)
    model = sb.parallelize(stock, mesh)
    with torch.inference_mode():
        batch = sb.pack(random_samples([23, 6], 97), stock.config, mesh)
        assert all(not logits.is_inference() for logits in model.logits(batch))
        expected = [model(batch).mean_loss, sb.forward_backward(model, [batch]).mean_loss]
    out = model(batch)
    assert torch.equal(out.mean_loss, expected[0]) and torch.equal(out.mean_loss, expected[1])
    out.loss.backward()
    return all(p.grad is not None for p in stock.parameters())


@pytest.mark.parametrize(("family", "size"), [("llama", 1), ("qwen3_5", 1), ("qwen3_5", 2)])
def test_evaluation_in_inference_mode_leaves_nothing_that_a_backward_refuses(family: str, size: int) -> None:
    assert all(ranks.run(evaluate_in_inference_mode, size, family))


def test_another_default_device_reaches_no_index() -> None:
    """As `torch.set_default_device("cuda")` would; on "meta" every tensor that it reaches fails."""
    stock = tiny_model("qwen3_5")
    samples, memory = random_samples([23, 6], 97), MemoryOptions(checkpointing="full")
    expected = sb.parallelize(stock)(sb.pack(samples, stock.config)).mean_loss
    again = tiny_model("qwen3_5")
    with torch.device("meta"):
        model = sb.parallelize(again, memory=memory)
        out = sb.forward_backward(model, [sb.pack(samples, again.config)])
    assert torch.equal(out.mean_loss, expected)
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in again.parameters())


def test_a_dense_batch_enters_by_the_same_door() -> None:
    stock = tiny_model("llama").eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 8, 9, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    expected = stock(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    ).logits
    model = sb.parallelize(stock)
    logits = model.logits(sb.pack(samples_from_dense(ids, mask), stock.config))
    torch.testing.assert_close(torch.cat(logits), expected[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": []}, "sample 1 is empty"),
        ({"labels": [1]}, "no input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 input_ids"),
        ({"input_ids": [1, 97]}, "holds 97, outside the vocabulary of 97"),
        ({"input_ids": [1, -3]}, "holds -3, outside"),
        ({"input_ids": [1, 2], "labels": [1, 400]}, "labels holds 400"),
        ({"input_ids": [[1, 2], [3, 4]]}, r"shape \(2, 2\)"),
        ({"input_ids": [0.5, 1.0]}, "integers"),
        ({"input_ids": [1], "pixel_values": [1]}, "'pixel_values' is not known for llama"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask must be 1"),
    ],
)
def test_bad_samples_are_refused_by_number(sample: dict[str, Any], message: str) -> None:
    config = tiny_model("llama").config
    with pytest.raises(ValueError, match=message):
        sb.pack([{"input_ids": [1, 2]}, sample], config)


def test_other_refusals_of_pack() -> None:
    config = tiny_model("llama").config
    for arguments, message in (
        ({"samples": []}, "at least one sample"),
        ({"samples": [{"input_ids": [1, 2, 3]}], "pad_to": 2}, "pad_to=2 is too small"),
        ({"samples": [{"input_ids": [1]}], "policy": "spiral"}, "'spiral' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            sb.pack(config=config, **arguments)  # type: ignore[arg-type]
