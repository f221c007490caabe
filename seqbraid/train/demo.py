"""`seqbraid demo`: a tiny hybrid learns text in packed rows, beside the stock model on each sample alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..data.pack import pack
from ..layout.streaming import StreamingPacker
from ..parallelize.api import parallelize

ROW_TOKENS = 1024
SAMPLE_TOKENS = 512
LEARNING_RATE = 1e-3
MAX_NORM = 1.0
HELD_OUT_ROWS = 4

Sample = dict[str, Tensor]


@dataclass
class Curves:
    """Losses of both ways, step by step, and the time each took."""

    packed: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    packed_seconds: float = 0.0
    alone_seconds: float = 0.0

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of the two losses over all steps."""
        return max(abs(a - b) / b for a, b in zip(self.packed, self.alone, strict=True))


def tiny_hybrid() -> PreTrainedModel:
    """Three gated-delta layers to one full-attention layer, over bytes."""
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        max_position_embeddings=ROW_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


def text_samples(seed: int) -> Iterator[Sample]:
    """Paragraphs of Python's own reference, as bytes, in random order, again and again."""
    from pydoc_data.topics import topics

    paragraphs = [
        p.encode()[:SAMPLE_TOKENS] for text in topics.values() for p in text.split("\n\n") if p.strip()
    ]
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.permutation(len(paragraphs)):
            yield {"input_ids": torch.tensor(list(paragraphs[i]))}


def alone_step(model: PreTrainedModel, samples: list[Sample]) -> float:
    """The stock model on each sample by itself: the gradient that packing must reproduce."""
    count = max(1, sum(len(sample["input_ids"]) - 1 for sample in samples))
    total = 0.0
    for sample in samples:
        ids = sample["input_ids"]
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, ids[1:], reduction="sum") / count
        if torch.is_grad_enabled():
            loss.backward()
        total += loss.item()
    return total


def leaky_loss(model: PreTrainedModel, samples: list[Sample]) -> float:
    """The stock model on the joined row, positions reset: what a collator without boundaries trains on."""
    ids = torch.cat([sample["input_ids"] for sample in samples])
    positions = torch.cat([torch.arange(len(sample["input_ids"])) for sample in samples])
    targets = torch.cat([F.pad(sample["input_ids"][1:], (0, 1), value=-100) for sample in samples])
    logits = model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return F.cross_entropy(logits, targets).item()


def train_both(packed: Any, alone: PreTrainedModel, rows: Iterator[list[Sample]], seconds: float) -> Curves:
    """Train both on the same rows, step by step, until the time is up."""
    curves = Curves()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE) for m in (packed, alone)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=seconds, loss="")
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            samples = next(rows)
            start = time.perf_counter()
            out = packed(pack(samples, alone.config))
            out.loss.backward()
            middle = time.perf_counter()
            curves.packed.append(out.mean_loss.item())
            curves.alone.append(alone_step(alone, samples))
            curves.packed_seconds += middle - start
            curves.alone_seconds += time.perf_counter() - middle
            for model, optimizer in zip((packed, alone), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses = f"packed {curves.packed[-1]:.4f}  alone {curves.alone[-1]:.4f}"
            progress.update(task, completed=elapsed, loss=losses)
        progress.update(task, completed=seconds)
    return curves


def run_demo(seconds: float, seed: int) -> int:
    """Train, compare, and say what was seen."""
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    torch.manual_seed(seed)
    console = Console()
    stock = tiny_hybrid()
    alone = copy.deepcopy(stock)
    packed = parallelize(stock)
    packer: StreamingPacker[Sample] = StreamingPacker(
        ROW_TOKENS, lambda s: len(s["input_ids"]), 128, seed=seed
    )
    rows = packer.pack(text_samples(seed))
    held_out = [next(rows) for _ in range(HELD_OUT_ROWS)]
    size = sum(p.numel() for p in stock.parameters())
    console.print(
        f"A hybrid of {size / 1e6:.2f} M parameters (3 gated-delta layers to 1 full-attention layer) learns "
        f"byte-level text in rows of {ROW_TOKENS} tokens: packed, and each sample alone with the stock "
        "model."
    )
    curves = train_both(packed, alone, rows, seconds)
    with torch.no_grad():
        packed_loss = np.mean([packed(pack(row, stock.config)).mean_loss.item() for row in held_out])
        alone_loss = np.mean([alone_step(packed.model, row) for row in held_out])
        leak = np.mean([leaky_loss(packed.model, row) for row in held_out])
    console.print(_curves_table(curves))
    console.print(
        f"{len(curves.packed)} steps. Largest difference between the two loss curves: "
        f"{curves.largest_difference:.1e} relative (rounding, which training amplifies). Packed took "
        f"{curves.packed_seconds:.1f} s, samples alone {curves.alone_seconds:.1f} s.\nHeld-out loss of the "
        f"trained model: packed by seqbraid {packed_loss:.6f}, each sample alone with stock code "
        f"{alone_loss:.6f},\nthe same rows packed with stock code {leak:.6f} (its gated-delta layers let "
        "samples see each other)."
    )
    return 0


def _curves_table(curves: Curves) -> Table:
    table = Table(title="loss per token", title_justify="left")
    for name in ("step", "packed", "alone", "difference"):
        table.add_column(name, justify="right")
    for step in sorted({*np.linspace(0, len(curves.packed) - 1, 9).astype(int).tolist()}):
        a, b = curves.packed[step], curves.alone[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    return table
