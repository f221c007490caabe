"""FLOPs of a step against what torch counts on stock models: matrices and towers exactly, masks by pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from seqbraid.models.parts import towers_of
from seqbraid.models.tiny.decoders import FAMILIES, GATED_DELTA, tiny_config, tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, tiny_media_model
from seqbraid.plan.flops import MediaSizes, ModelFlops, peak_flops, peak_of, seen_keys
from tests.models.test_decoders import EXACT, build

TOKENS = 40


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Torch's count of a call and of its backward, by operation."""
    with FlopCounterMode(display=False) as counter:
        call().sum().backward()
    return {str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()}


def decoder_count(model: Any) -> dict[str, int]:
    model.set_attn_implementation("eager")  # its products are counted as products, over all pairs
    if getattr(model.config, "num_experts_per_tok", None):
        model.set_experts_implementation("eager")
    model.config.output_router_logits = False
    ids = torch.arange(TOKENS)[None] % 97
    return counted(lambda: model(input_ids=ids, use_cache=False).logits)


def products_beside_pairs(model: Any) -> tuple[int, int]:
    """None, or positions times frequencies: some versions of transformers make that a product of matrices."""
    sizes = [
        x.numel() for name, x in model.named_buffers() if name.endswith("inv_freq") and "original" not in name
    ]
    return 0, 2 * TOKENS * sum(sizes)


@pytest.mark.parametrize("family", [*FAMILIES, *EXACT])
def test_every_matrix_is_counted_as_torch_counts_it(family: str) -> None:
    model = tiny_model(family) if family in FAMILIES else build(family, EXACT[family])
    found, ours = decoder_count(model), ModelFlops.of(model)
    linear = (ours.token + ours.label) * TOKENS
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        # Torch counts the chunked form's own products (bmm), and a convolution in one of many possible ways.
        heads, size = GATED_DELTA["linear_num_value_heads"], GATED_DELTA["linear_value_head_dim"]
        channels, width = 2 * 2 * size + heads * size, GATED_DELTA["linear_conv_kernel_dim"]
        linear -= 3 * 3 * (6 * heads * size * size + 2 * channels * width) * TOKENS
    else:
        assert found["bmm"] - sum(ours.pair.values()) * TOKENS**2 in products_beside_pairs(model)
    assert linear == found["mm"] + found.get("addmm", 0)


def test_frozen_matrices_have_no_gradient_of_their_own() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" not in name and "layers.1.self_attn.q_proj" not in name
    found, ours = decoder_count(model), ModelFlops.of(model)
    assert (ours.token + ours.label) * TOKENS == found["mm"]
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    found, ours = decoder_count(model), ModelFlops.of(model)
    assert ours.step([[TOKENS]]) - sum(ours.pair.values()) * seen_keys(TOKENS) == found["mm"]
    assert found["bmm"] - sum(ours.pair.values()) * TOKENS**2 in products_beside_pairs(model)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_omni"])
@pytest.mark.parametrize("freeze", ["nothing", "all but mergers", "all"])
def test_towers_are_counted_as_torch_counts_them(family: str, freeze: str) -> None:
    model = tiny_media_model(family)
    model.set_attn_implementation("eager")
    towers = towers_of(model)
    for name, parameter in towers.visual.named_parameters():
        parameter.requires_grad = freeze == "nothing" or (freeze == "all but mergers" and "merger" in name)
    grids = [(1, 4, 6), (2, 8, 4)]
    pixels = torch.randn(88, 3 * 2 * 4 * 4)

    def see() -> torch.Tensor:
        out = towers.visual(pixels, grid_thw=torch.tensor(grids), return_dict=True)
        levels = getattr(out, "deepstack_features", None) or []
        seen = torch.cat([out.pooler_output, *levels])
        return seen if seen.requires_grad else seen.requires_grad_()

    ours = ModelFlops.of(model)
    found = sum(counted(see).values())
    with_images = ours.step([[9]], media=MediaSizes(grids)) - ours.step([[9]])
    assert with_images == found
    if ours.audio is not None and freeze == "nothing":
        for frames in ([400], [900], [300, 200]):
            mel, lengths = torch.randn(16, sum(frames)), torch.tensor(frames)
            found = sum(
                counted(
                    lambda mel=mel, lengths=lengths: (
                        towers.audio_tower(mel, feature_lens=lengths, return_dict=True).last_hidden_state
                    )
                ).values()
            )
            assert ours.step([[9]], media=MediaSizes(mel_frames=frames)) - ours.step([[9]]) == found


@given(st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)))
def test_pairs_are_those_of_the_mask(length: int, window: int | None) -> None:
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    mask = (k <= q) & (q - k < (length + 1 if window is None else window))
    assert seen_keys(length, window) == int(mask.sum())


def test_a_step_is_the_sum_of_its_sequences_however_packed() -> None:
    ours = ModelFlops.of(tiny_config("gemma3"))
    assert set(ours.pair) == {None, 16}
    apart = sum(ours.step([[n]]) for n in (30, 5, 17))
    assert ours.step([[30, 5], [17]]) == apart < ours.step([[52]])
    assert ours.step([[30, 5, 17]], label_tokens=10) == apart - 42 * ours.label
    assert ours.step([]) == 0


@pytest.mark.parametrize("family", sorted(MEDIA_FAMILIES))
def test_a_config_alone_is_counted_as_its_model(family: str) -> None:
    model = tiny_media_model(family)
    rows, media = [[20, 9]], MediaSizes([(1, 4, 4)], [300] if "omni" in family else [])
    assert ModelFlops.of(model.config).step(rows, media=media) == ModelFlops.of(model).step(rows, media=media)


def test_media_without_a_tower_is_refused() -> None:
    with pytest.raises(ValueError, match="no tower"):
        ModelFlops.of(tiny_config("llama")).step([[4]], media=MediaSizes([(1, 2, 2)]))


def test_peaks_are_known_or_not_given() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "Some GPU": None,
    }
    assert {name: peak_of(name, torch.bfloat16) for name in names} == names
    assert peak_of("NVIDIA H200", torch.float32) is None
    assert peak_flops("cpu", torch.bfloat16) is None
