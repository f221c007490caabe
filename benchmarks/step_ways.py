"""The ways to run a step that are compared: stock, what a skilled user assembles, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_cases import Case, Row

WAYS = ("stock", "rival", "rival_fa4", "seqbraid")
"""`rival` is stock with Liger's kernels, its fused loss and torch's varlen FlashAttention-2; `rival_fa4` has
FlashAttention-4 instead."""

Step = Callable[[], Tensor]


def make(way: str, case: Case, config: Any, row: Row, checkpointing: str) -> tuple[torch.nn.Module, Step]:
    """The model, and a function that runs forward and backward and gives the mean loss."""
    if way == "seqbraid":
        return _seqbraid(case, config, row, checkpointing)
    return _stock(way, case, config, row, checkpointing)


def _seqbraid(case: Case, config: Any, row: Row, checkpointing: str) -> tuple[torch.nn.Module, Step]:
    import seqbraid as sb
    from seqbraid.plan.memory import MemoryOptions

    mesh = sb.Mesh()
    model = sb.parallelize(case.build(config), mesh, memory=MemoryOptions(checkpointing=checkpointing))  # type: ignore[arg-type]
    batch = sb.pack(row.samples, config, mesh).to("cuda")

    def step() -> Tensor:
        out = model(batch)
        out.loss.backward()
        return out.mean_loss

    return model, step


def _stock(way: str, case: Case, config: Any, row: Row, checkpointing: str) -> tuple[torch.nn.Module, Step]:
    if way != "stock":
        if not case.liger:
            raise ValueError("Liger has no kernels for this family")
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{case.liger}")()
    model = case.build(config)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif checkpointing != "none":
        raise ValueError(f"stock models have no checkpointing={checkpointing!r}")
    if way != "stock":
        name = {"rival": "varlen", "rival_fa4": "varlen_fa4"}[way]
        _register(name, row.lengths)
        text = config.get_text_config()
        model.set_attn_implementation(name if text is config else {"text_config": name})
    inputs = _stock_inputs(row)

    def step() -> Tensor:
        loss: Tensor = model(**inputs, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return model, step


def _stock_inputs(row: Row) -> dict[str, Any]:
    """A text row as stock takes it, packed; a media sample as its processor gives it."""
    if len(row.samples) == 1 and len(row.samples[0]) > 2:
        sample = row.samples[0]
        per_token = ("input_ids", "labels", "mm_token_type_ids")
        inputs = {key: x[None] if key in per_token else x for key, x in sample.items()}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    else:
        first = torch.tensor([-100])
        inputs = {
            "input_ids": torch.cat([sample["input_ids"] for sample in row.samples])[None],
            "position_ids": torch.cat([torch.arange(length) for length in row.lengths])[None],
            "labels": torch.cat([x for s in row.samples for x in (first, s["labels"][1:])])[None],
        }
    return {key: x.cuda() if isinstance(x, Tensor) else x for key, x in inputs.items()}


def _register(name: str, lengths: list[int]) -> None:
    """An attention implementation of transformers for rows of these lengths."""
    from transformers import AttentionInterface

    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    longest = max(lengths)

    def fa2(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0), scale=scale)

    def fa4(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scale, causal=True,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    kernel = fa4 if name.endswith("fa4") else fa2

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        return kernel(*(x[0].transpose(0, 1) for x in (q, k, v)), scaling)[None], None

    AttentionInterface.register(name, attention)
