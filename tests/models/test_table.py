"""A slice of docs/models.md: types in which every mechanism occurs that makes a type exact, or refused."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.models_page import statuses, table
from tests.models.table import Line, examine

TENSOR = {"deepseek_v2", "gpt_bigcode", "jetmoe", "moshi", "phi3"}
"""Those of them that `tp` cannot share."""

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
README = PAGE.parents[1] / "README.md"

EXACT = {
    "deepseek_v2": "latent attention, experts",
    "ernie4_5_moe": "router loss",
    "gemma3_text": "windows and full layers",
    "gpt_bigcode": "one key head, learned positions",
    "jetmoe": "experts that get tokens sorted, attention heads among them",
    "moshi": "a window in the config that nothing masks by",
    "phi3": "a window that may be set",
    "phimoe": "random numbers that are drawn and not used",
    "qwen3_next": "gated delta layers",
}

REFUSED = {
    "bart": "is the decoder of an encoder-decoder pair",
    "bert": "is built as an encoder",
    "bloom": "does not use transformers' attention interface",
    "blt": "is made of several models (patcher_config",
    "cohere": "changes hidden states before its head or logits after it",
    "doge": "its own masking rules would not hold",
    "falcon_mamba": "FalconMambaBlock at 'layers.0' that carries state between tokens",
    "fuyu": "has unknown parts besides its text decoder",
    "llama4_text": "layers of kind chunked_attention",
    "longcat_flash": "no list of that many layers",
    "minimax": "MiniMaxLightningAttention at 'layers.1.self_attn' that carries state",
    "modernbert-decoder": "changes hidden states before its head or logits after it",
    "mllama": "base_model does not find it",
    "opt": "keeps its layers in a part of its decoder ('decoder.layers')",
    "phi4_multimodal": "an image or audio encoder",
    "stablelm": "does not pass keyword arguments down",
    "xlstm": "changes hidden states before its head",
}


RELEASE = re.search(r"Transformers ([0-9.]+):", PAGE.read_text(encoding="utf-8"))
of_this_release = pytest.mark.skipif(
    RELEASE is None or RELEASE[1] != version("transformers"), reason="the page is of another release"
)


@of_this_release
@pytest.mark.parametrize("model_type", EXACT)
def test_exact_on_every_mesh(model_type: str) -> None:
    line = examine(model_type)
    assert line.status == "exact", line
    assert {status for status, _ in line.variants.values()} <= {"exact", "refused"}, line
    assert line.tensor[0] == ("refused" if model_type in TENSOR else "exact"), line


@of_this_release
@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_in_words(model_type: str) -> None:
    line = examine(model_type)
    assert line.status == "refused" and REFUSED[model_type] in line.detail, line


@of_this_release
def test_the_page_has_every_type() -> None:
    said = statuses(PAGE)
    assert set(said) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {said[model_type] for model_type in EXACT} == {"exact"}
    assert {said[model_type] for model_type in REFUSED} == {"refused"}
    count = sum(status == "exact" for status in said.values())
    assert f"the {count} of the {len(said)} causal language model types" in README.read_text(encoding="utf-8")


def test_the_page_is_of_the_newest_release_that_is_supported() -> None:
    project = (PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    below = re.search(r"transformers>=[0-9.]+,<5\.([0-9]+)", project)
    assert RELEASE and below and RELEASE[1].startswith(f"5.{int(below[1]) - 1}.")


def test_a_row_says_what_was_found() -> None:
    lines = [
        Line(
            "a",
            "AForCausalLM",
            "exact",
            windowed=True,
            variants={"output_router_logits": ("exact", "")},
            tensor=(
                "refused",
                "tp=2: the attention of layer 0 of AForCausalLM (A) has b of shape (8,), which "
                "tp=2 does not know to share among heads; use tp=1",
            ),
        ),
        Line(
            "b", "BForCausalLM", "refused", "ring=2: BForCausalLM (model_type 'b') is odd; supported are even"
        ),
        Line("c", "CForCausalLM", "wrong", "lm_head.weight", 0.5),
    ]
    rows = table(lines).splitlines()
    why = "refused: the attention (A) has b of shape (8,), which tp=2 does not know to share among heads"
    assert f"| a | AForCausalLM | {why} | sliding windows; `output_router_logits`: exact |" in rows
    assert "| b | BForCausalLM | is odd |" in rows
    assert "| c | CForCausalLM | wrong: lm_head.weight |" in rows
