"""The attention of media towers is packed: a call a layer, and nothing of the stock model is left changed.

That it gives what the stock towers give is looked at by every parity test with media.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqbraid as sb
from seqbraid.models import tower_attention
from seqbraid.models.tiny.media import mixed_samples, tiny_media_config, tiny_media_model
from seqbraid.models.tower_attention import TowerKernels, pack_towers

ONE = sb.Mesh(rank=0, world_size=1)


def attention_of(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith(("VisionAttention", "AudioAttention"))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts of the rows in each call of attention in a tower."""
    found: list[int] = []
    attend = tower_attention.ring_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, plan: Any, *args: Any, **kwargs: Any) -> Tensor:
        found.append(len(plan.local.blocks))
        return attend(q, k, v, plan, *args, **kwargs)

    monkeypatch.setattr(tower_attention, "ring_attention", counted)
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni"])
def test_a_layer_calls_attention_once(family: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Tensor] = []
    whole = tower_attention.BlockPlan.whole
    monkeypatch.setattr(tower_attention.BlockPlan, "whole", lambda parts: reads.append(parts) or whole(parts))
    model = tiny_media_model(family)
    braided = sb.parallelize(model, ONE)
    modules = attention_of(model)
    assert len(modules) >= 3 and all("forward" in vars(module) for module in modules)
    reads.clear()  # those of the trial
    calls.clear()
    braided(sb.pack(mixed_samples(tiny_media_config(family)), model.config, ONE)).loss.backward()
    # The audio tower is called for each length of short clips.
    assert len(calls) == len(modules) if family != "qwen3_omni" else len(calls) > len(modules)
    assert max(calls) > 3 and len(reads) < len(calls)
    braided.release()
    assert not any("forward" in vars(module) for module in modules)


def test_attention_that_does_something_else_stays_as_it_is() -> None:
    model = tiny_media_model("qwen3_vl")
    stock = attention_of(model)[0]
    names = dict(type(stock).forward.__globals__)
    eager = names["eager_attention_forward"]
    names["eager_attention_forward"] = lambda *args, scaling, **kwargs: eager(
        *args, scaling=2 * scaling, **kwargs
    )
    forward = type(stock).forward
    softer = type(forward)(forward.__code__, names, "forward", forward.__defaults__, forward.__closure__)
    stock.__class__ = type("SofterAttention", (type(stock),), {"forward": softer})
    others = [module for module in attention_of(model) if module is not stock]
    assert pack_towers([model], TowerKernels()) == others and "forward" not in vars(stock)


def test_what_no_kernel_takes_is_computed_part_by_part(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_media_model("qwen3_vl")
    batch = sb.pack(mixed_samples(tiny_media_config("qwen3_vl")), model.config, ONE)
    losses = []
    for has_kernel in (True, False):
        monkeypatch.setattr(tower_attention, "_has_kernel", lambda query, value, found=has_kernel: found)
        braided = sb.parallelize(model, ONE)
        calls.clear()
        losses.append(braided(batch).mean_loss)
        assert bool(calls) == has_kernel
        braided.release()
    assert losses[0] == pytest.approx(float(losses[1]), rel=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_boundaries_that_change_in_place_are_read_again(mode: Callable[[], Any]) -> None:
    model = tiny_media_model("qwen3_vl")
    attend = attention_of(model)[0]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, attend.dim, generator=random)  # type: ignore[call-overload]
    angles = torch.randn(2, 8, attend.head_dim, generator=random).unbind()  # type: ignore[call-overload]
    with mode():

        def outs() -> list[Tensor]:
            cu, found = torch.tensor([0, 4, 8], dtype=torch.int32), []
            for cut in (4, 2):
                cu[1] = cut
                found.append(attend(hidden, cu_seqlens=cu, position_embeddings=angles))
            return found

        stock = outs()
        braided = sb.parallelize(model, ONE)
        ours = outs()
    braided.release()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, stock, strict=True))


@pytest.mark.parametrize("bounds", [[0, 4, 6], [1, 8], [0, 4, 9], [0, 5, 4, 8]])
def test_boundaries_that_do_not_cut_all_rows_are_refused(bounds: list[int]) -> None:
    model = tiny_media_model("qwen3_vl")
    attend = attention_of(model)[0]
    hidden, angles = torch.zeros(8, attend.dim), torch.zeros(2, 8, attend.head_dim)  # type: ignore[call-overload]
    braided = sb.parallelize(model, ONE)
    with pytest.raises(ValueError, match=r"cu_seqlens .* 8 rows"):
        attend(hidden, cu_seqlens=torch.tensor(bounds), position_embeddings=angles.unbind())
    braided.release()


def test_taking_over_draws_no_random_numbers() -> None:
    model = tiny_media_model("qwen3_omni")
    before = torch.get_rng_state()
    braided = sb.parallelize(model, ONE)
    braided(sb.pack(mixed_samples(tiny_media_config("qwen3_omni")), model.config, ONE))
    braided.release()
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_dropout_is_refused() -> None:
    model = tiny_media_model("qwen3_vl")
    attention_of(model)[0].attention_dropout = 0.1  # type: ignore[assignment]
    braided = sb.parallelize(model, ONE)
    batch = sb.pack(mixed_samples(tiny_media_config("qwen3_vl")), model.config, ONE)
    with pytest.raises(ValueError, match=r"attention dropout 0\.1 or a mask of its own; only "):
        braided(batch)
    braided.release()
