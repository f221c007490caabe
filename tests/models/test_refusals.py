"""What a step could not keep exact is refused in words, in one process; ranks are in test_refusals_ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import seqbraid as sb
from seqbraid.models.agreement import config_values
from seqbraid.models.attention import no_mask
from seqbraid.models.tiny.decoders import COMMON, tiny_model
from seqbraid.models.tiny.samples import random_samples
from tests.helpers import ranks

SAMPLE = [{"input_ids": [1, 2, 3]}]


def build(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(COMMON | changes))).train()


def step(model: PreTrainedModel, samples: list[dict[str, Any]] = SAMPLE) -> sb.StepOutput:
    return sb.parallelize(model)(sb.pack(samples, model.config))


# Attention that masks in a way of its own.


def test_a_window_that_attention_does_not_get_is_refused() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    samples = random_samples([40, 5], 97)
    with pytest.raises(ValueError, match="sliding_window=8 in its config but does not pass its window"):
        step(build("phimoe", sliding_window=8, **experts).eval(), samples)
    assert step(build("phimoe", sliding_window=None, **experts).eval(), samples).loss > 0


def test_a_mask_of_the_familys_own_is_refused() -> None:
    with pytest.raises(ValueError, match="its own masking rules would not hold"):
        step(build("doge", num_key_value_heads=4), random_samples([40, 5], 97))


def test_whether_all_tokens_are_attended_to_may_be_asked() -> None:
    """As gated-delta families of transformers 5.9 do, in every forward."""
    mask = no_mask(torch.device("cpu"))
    assert torch.all(mask == 1)
    for uses_it in (lambda: torch.any(mask == 1), lambda: mask + 1, lambda: (mask == 0).logical_not()):
        with pytest.raises(ValueError, match="its own masking rules would not hold"):
            uses_it()


# What changes after parallelize.


def resized(model: Any) -> None:
    model.resize_token_embeddings(101)


def another_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 97, bias=False)


def another_embedding(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(97, 32))


def another_weight(model: Any) -> None:
    model.model.embed_tokens.weight = nn.Parameter(torch.randn(101, 32))


def another_norm(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32)


def lora_on(target: str) -> Callable[[Any], None]:
    def add(model: Any) -> None:
        import peft

        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[target]), model)

    return add


def hook_on_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


CHANGES = {
    "resized": (resized, "'lm_head' is another module"),
    "weight": (another_weight, "'model.embed_tokens.weight' was of shape .97, 32. .* is of shape .101, 32."),
    "head": (another_head, "'lm_head' is another module"),
    "embedding": (another_embedding, r"'model.embed_tokens' is another module"),
    "norm": (another_norm, r"'model.norm' is another module"),
    "LoRA on the head": (lora_on("lm_head"), "'lm_head' is another module"),
    "LoRA on a layer": (lora_on("q_proj"), r"q_proj' is another module \(Linear\)"),
    "hook": (hook_on_the_head, "has forward hooks"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_parallelize_is_refused(change: str) -> None:
    make, message = CHANGES[change]
    stock = tiny_model("llama")
    model = sb.parallelize(stock)
    batch = sb.pack(SAMPLE, stock.config)
    assert model(batch).loss > 0
    make(stock)
    for call in (model, model.logits):
        with pytest.raises(ValueError, match=message):
            call(batch)


def test_a_head_with_a_forward_of_its_own_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model: Any = tiny_model("llama")
    model.lm_head = Scaled(32, 97, bias=False)
    with pytest.raises(ValueError, match="forward of its own"):
        sb.parallelize(model)


def test_a_head_whose_weight_is_computed_is_refused() -> None:
    model: Any = tiny_model("llama")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(ValueError, match="weight of the head of LlamaForCausalLM is computed"):
        sb.parallelize(model)


def test_a_head_that_is_given_another_class_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model: Any = tiny_model("llama")
    braided = sb.parallelize(model)
    model.lm_head.__class__ = Scaled
    with pytest.raises(ValueError, match="forward of its own"):
        braided(sb.pack(SAMPLE, model.config))


@pytest.mark.parametrize(("option", "value"), [("scale_grad_by_freq", True), ("max_norm", 1.0)])
def test_embeddings_that_look_at_the_batch_are_refused(option: str, value: Any) -> None:
    model: Any = tiny_model("llama")
    braided = sb.parallelize(model)
    setattr(model.model.embed_tokens, option, value)
    with pytest.raises(ValueError, match=f"embed_tokens .*{option}"):
        braided(sb.pack(SAMPLE, model.config))
    with pytest.raises(ValueError, match=f"embed_tokens .*{option}"):
        sb.parallelize(braided.release())


def test_parallelized_twice_is_refused() -> None:
    for family in ("llama", "qwen3_5"):
        stock = tiny_model(family)
        first = sb.parallelize(stock)
        with pytest.raises(ValueError, match="parallelized already"):
            sb.parallelize(stock)
        assert first(sb.pack(SAMPLE, stock.config)).loss > 0
        assert sb.parallelize(first.release())(sb.pack(SAMPLE, stock.config)).loss > 0


# The backward.


def test_gradients_of_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="create_graph=True"):
        step(tiny_model("llama")).loss.backward(create_graph=True)


def test_a_second_backward_is_refused() -> None:
    out = step(tiny_model("llama"))
    out.loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="backward was called a second time"):
        out.loss.backward()


# Random numbers.


def with_lora_dropout() -> PreTrainedModel:
    from seqbraid.train.lora import LoraOptions, add_lora

    model = tiny_model("llama")
    add_lora(model, LoraOptions(rank=2, alpha=4, targets=["q_proj"]))
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.1)
    return model


RANDOM: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "module": (lambda: tiny_model("gpt2", resid_pdrop=0.1), "dropout 0.1 at 'h.0.*model.batch, seed="),
    "embedding": (lambda: tiny_model("gpt2", embd_pdrop=0.1), "dropout 0.1 at 'drop'"),
    "attention": (lambda: tiny_model("gpt2", attn_pdrop=0.1), "attn_pdrop=0.1"),
    "function": (
        lambda: build("seed_oss", residual_dropout=0.1, attention_dropout=0.0),
        "draws random numbers.*residual_dropout=0.1",
    ),
    "jitter": (
        lambda: build("mixtral", num_local_experts=4, router_jitter_noise=0.1),
        "draws random numbers.*router_jitter_noise=0.1",
    ),
    "sampled routes": (lambda: build("phimoe", num_local_experts=4), "draws random numbers in training"),
    "LoRA": (with_lora_dropout, "dropout 0.1 at .*lora_dropout"),
}


@pytest.mark.parametrize("case", RANDOM)
def test_random_numbers_are_refused_in_training_alone(case: str) -> None:
    make, message = RANDOM[case]
    model = sb.parallelize(make())
    batch = sb.pack(SAMPLE, model.model.config)
    with pytest.raises(ValueError, match=message):
        model(batch)
    model.eval()
    assert model(batch).loss > 0


def test_layers_that_are_skipped_are_refused_and_those_that_might_be_are_not() -> None:
    for layerdrop in (0.0, 0.5):
        model = sb.parallelize(build("biogpt", layerdrop=layerdrop, attention_probs_dropout_prob=0.0,
                                     hidden_dropout_prob=0.0, activation_dropout=0.0))  # fmt: skip
        batch = sb.pack(SAMPLE, model.model.config)
        if layerdrop:
            with pytest.raises(ValueError, match=r"layerdrop=0\.5"):
                model(batch)
        else:
            assert model(batch).loss > 0


# Routers.


def test_routers_whose_loss_is_unknown_are_refused_by_name() -> None:
    model = build(
        "glm4_moe", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, moe_intermediate_size=16, output_router_logits=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"no router_aux_loss_coef.*output_router_logits=False"):
        step(model)


@pytest.mark.parametrize("axes", [{}, {"ring": 2}], ids=str)
def test_a_router_loss_whose_gradient_is_lost_is_refused(axes: dict[str, int]) -> None:
    """Reentrant checkpoints run their layers without a graph, and hooks see routers in that run."""
    assert ranks.run(router_loss_beside_checkpoints, 1 + len(axes), axes) == [None] * (1 + len(axes))


def router_loss_beside_checkpoints(axes: dict[str, int]) -> None:
    mesh, stock = sb.Mesh(**axes), tiny_model("qwen3_moe")
    model = sb.parallelize(stock, mesh)
    batch = sb.pack(random_samples([20], 97), stock.config, mesh)
    stock.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="pass use_reentrant=False to it"):
        model(batch)
    with torch.no_grad():
        assert model(batch).aux_loss is not None
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    model(batch).loss.backward()
    stock.requires_grad_(False)
    stock.get_output_embeddings().weight.requires_grad_()  # what routers say is given
    stock.gradient_checkpointing_enable({"use_reentrant": True})
    assert model(batch).aux_loss is not None
    stock.requires_grad_()
    stock.config.output_router_logits = False
    model(batch).loss.backward()


# Words for what used to be an error of torch or Python.


def test_autocast_is_refused() -> None:
    model = tiny_model("llama")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"compute_dtype=torch\.bfloat16"),
    ):
        step(model)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    model = tiny_model("gpt2", max_position_embeddings=16)
    assert step(model, random_samples([16, 3], 97)).loss > 0
    with pytest.raises(ValueError, match=r"17 tokens, but .* learned positions for 16"):
        step(tiny_model("gpt2", max_position_embeddings=16), random_samples([17], 97))


def test_the_models_own_mode_is_kept() -> None:
    assert not sb.parallelize(tiny_model("llama").eval()).training
    assert sb.parallelize(tiny_model("llama")).training
    model = sb.parallelize(tiny_model("llama", attention_dropout=0.1).eval())
    assert model(sb.pack(SAMPLE, model.model.config)).loss > 0


def test_what_is_no_packed_batch_is_refused() -> None:
    model = sb.parallelize(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"takes the output of seqbraid.pack, not Tensor; .* is .model"):
        model(torch.tensor([[1, 2, 3]]))
    config = model.model.config
    for given, message in (
        ({"input_ids": [1, 2]}, "a list of samples, not dict; put the one sample into a list"),
        (7, "a list of samples, not int"),
        (torch.tensor([[1, 2]]), "a list of samples, not Tensor"),
        ([[1, 2, 3]], "sample 0 is a list; a sample is a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            sb.pack(given, config)  # type: ignore[arg-type]


def test_a_wrapper_is_refused_with_what_to_give_instead() -> None:
    import peft

    adapted = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped = nn.Module()
    wrapped.module = tiny_model("llama")
    for model, advice in (
        (adapted, r"not PeftModel; give model.get_base_model\(\)"),
        (wrapped, "not Module; give model.module"),
        (sb.parallelize(tiny_model("llama")), r"call release\(\) on it first"),
        (None, "not NoneType$"),
    ):
        with pytest.raises(ValueError, match=advice):
            sb.parallelize(model)  # type: ignore[arg-type]
    assert sb.parallelize(adapted.get_base_model())(sb.pack(SAMPLE, adapted.config)).loss > 0


@pytest.mark.parametrize("ids", [None, "a few words", ["a", "b"], [1, 2**70], [[1, 2], [3]], [{}]])
def test_ids_that_are_no_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="sample 0: input_ids"):
        sb.pack([{"input_ids": ids}], tiny_model("llama").config)


@pytest.mark.parametrize("count", [float("nan"), 12.5, "12", torch.tensor(float("nan"))])
def test_a_divisor_that_is_no_count_is_refused(count: Any) -> None:
    model = sb.parallelize(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"label_tokens=.* is not a whole number"):
        model(sb.pack(SAMPLE, model.model.config), label_tokens=count)


def test_numbers_that_no_step_can_have_are_refused() -> None:
    model = sb.parallelize(tiny_model("llama"))
    batch = sb.pack(SAMPLE, model.model.config)
    for numbers in ({"label_tokens": 10**30}, {"label_tokens": -1}, {"seed": 2**70}):
        with pytest.raises(ValueError, match="is not between"):
            model(batch, **numbers)
    for divisor in (0, -5):
        with pytest.raises(ValueError, match=f"divisor={divisor} is not a number above 0"):
            sb.forward_backward(model, [batch], divisor=divisor)
    expected = model(batch, label_tokens=4).mean_loss
    assert torch.equal(model(batch, label_tokens=torch.tensor([4])).mean_loss, expected)  # type: ignore[arg-type]


def test_sets_of_a_config_read_the_same_in_every_process() -> None:
    """A set of strings has another order in each process; one of these numbers by the order of insertion."""
    found = []
    for values in ({0, 8}, {8, 0}):
        config = AutoConfig.for_model("llama", **COMMON)
        config.kinds, config.by_layer = values, {"a": frozenset(values)}
        found.append(config_values(config))
    assert repr({0, 8}) != repr({8, 0})
    assert found[0] == found[1] and found[0]["kinds"] == "{0, 8}"
