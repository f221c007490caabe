"""What `seqbraid layout --model` says: which exchange a model's gated-delta layers take on a row, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..layout import SequenceLayout
from ..models.router import stock_num_experts
from ..models.stock import read_config
from ..models.tiny.decoders import FAMILIES, tiny_config
from ..sequence_parallel.gated_delta_bytes import HeadSizes, choose_method, heads_bytes, states_bytes

LABELS = {"states": "state passing", "heads": "head all-to-all"}


def config_of(name: str) -> Any:
    """The config of a tiny family, or of a checkpoint in a folder; no weights are read."""
    if name in FAMILIES:
        return tiny_config(name)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"--model {name!r} is neither a tiny model ({', '.join(FAMILIES)}) nor a folder with a "
            "config.json"
        )
    return read_config(Path(name))


def head_sizes(config: Any) -> HeadSizes | None:
    """The heads of a text config's gated-delta layers; None where it has no such layer."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    if not hasattr(config, "linear_num_key_heads"):  # linear attention of another kind
        return None
    return HeadSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


def exchange_report(layout: SequenceLayout, name: str, tp: int = 1) -> Group:
    """The bytes that each rank sends in one gated-delta layer's forward by both methods; which is used; and
    what a layer sends between tensor parallel ranks.
    """
    text = config_of(name).get_text_config()
    shown = _gated_delta_report(layout, name, tp)
    if tp == 1:
        return shown
    dtype = text.dtype or torch.bfloat16
    sent = tensor_bytes(layout.num_local_tokens, int(text.hidden_size), dtype.itemsize, tp)
    words = (
        f"tp={tp}: each rank sends {sent:,} bytes in a layer's forward, and as many in its backward: it "
        f"gathers {layout.num_local_tokens:,} tokens in front of mixer and MLP, and sums up behind them"
    )
    return Group(shown, Text(words))


def tensor_bytes(tokens: int, hidden: int, itemsize: int, tp: int) -> int:
    """What a rank sends in a layer's forward: to each other tp rank its own tokens, in front of mixer and
    MLP, and that rank's tokens behind them.

    >>> tensor_bytes(8192, 4096, 2, tp=2) == 4 * 4096 * 4096 * 2
    True
    """
    return 4 * (tp - 1) * (tokens // tp) * hidden * itemsize


def stage_report(layout: SequenceLayout, name: str, pp: int, tp: int = 1) -> Text:
    """What a rank sends from one pipeline stage to the next for this row."""
    text = config_of(name).get_text_config()
    dtype = text.dtype or torch.bfloat16
    experts = stock_num_experts(text) if getattr(text, "output_router_logits", False) else None
    sent = stage_bytes(layout.num_local_tokens // tp, int(text.hidden_size), dtype.itemsize, experts)
    return Text(
        f"pp={pp}: each rank sends {sent:,} bytes to the next stage for this row, and gets as many back as "
        "gradients"
    )


def stage_bytes(
    tokens: int, hidden: int, itemsize: int, num_experts: int | None = None, mtp: bool = False
) -> int:
    """The hidden states of a rank's tokens; with a router's loss, its two sums in float32 or wider; with
    multi-token prediction, what the first layer was given.

    >>> stage_bytes(8192, 4096, 2) == 8192 * 4096 * 2
    True
    """
    return (1 + mtp) * tokens * hidden * itemsize + 2 * (num_experts or 0) * max(4, itemsize)


def _gated_delta_report(layout: SequenceLayout, name: str, tp: int) -> Group:
    config = config_of(name)
    text = config.get_text_config()
    sizes = head_sizes(text)
    if sizes is not None:
        keys, values = sizes.num_key_heads // tp, sizes.num_value_heads // tp
        sizes = sizes._replace(num_key_heads=keys, num_value_heads=values)
    if sizes is None:
        return Group(Text(f"{name} has no gated-delta layers, so there is no exchange to choose"))
    dtype = text.dtype or config.dtype or torch.bfloat16
    taken = choose_method(layout, sizes, dtype.itemsize)
    sent = {"states": states_bytes(layout, sizes, dtype.itemsize)}
    refusal = ""
    try:
        sent["heads"] = heads_bytes(layout, sizes, dtype.itemsize)
    except ValueError as error:
        refusal = str(error)

    num_layers = text.layer_types.count("linear_attention")
    title = (
        f"{name}: bytes a rank sends in one layer's forward\n"
        f"{num_layers} gated-delta layers · {sizes.num_key_heads} × {sizes.key_dim} keys, "
        f"{sizes.num_value_heads} × {sizes.value_dim} values · {str(dtype).removeprefix('torch.')}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("rank", justify="right")
    for method, label in LABELS.items():
        table.add_column(label, justify="right", style="bold" if method == taken else "")
    for rank in range(layout.num_ranks):
        cells = (f"{sent[method][rank]:,}" if method in sent else "–" for method in LABELS)
        table.add_row(str(rank), *cells)
    reason = _reason(sent, taken, refusal)
    return Group(Text(title, style="italic"), table, Text(f"{LABELS[taken]} is used: {reason}"))


def expert_report(layout: SequenceLayout, name: str, ep: int, tp: int = 1) -> Group:
    """The bytes that each rank sends to the experts of other ranks in one layer's forward, where routers are
    level, and at most; tensor parallel ranks send tokens of their own.
    """
    config = config_of(name)
    text = config.get_text_config()
    experts, picks = stock_num_experts(text), getattr(text, "num_experts_per_tok", None)
    if experts is None or picks is None:
        return Group(Text(f"{name} has no experts that its config describes: use --ep 1"))
    if ep < 1 or experts % ep:
        choices = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(f"--ep {ep} does not divide the {experts} experts of {name}; use one of {choices}")
    dtype = text.dtype or config.dtype or torch.bfloat16
    row = text.hidden_size * dtype.itemsize
    title = (
        f"{name}: bytes a rank sends to experts in one layer's forward where routers are level\n"
        f"{experts} experts over {ep} ranks, {picks} for each token · {text.hidden_size} channels · "
        f"{str(dtype).removeprefix('torch.')}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("rank", "tokens", "to experts", "at most"):
        table.add_column(column, justify="right")
    for rank in range(layout.num_ranks * tp):
        real = layout.shard(torch.ones(layout.num_tokens), rank // tp)
        tokens = int(real.chunk(tp)[rank % tp].sum())
        there = tokens * picks * row
        table.add_row(str(rank), f"{tokens:,}", f"{there * (ep - 1) // ep:,}", f"{there:,}")
    return Group(
        Text(title, style="italic"),
        table,
        Text("The outputs come back, as many bytes; gradients go both ways again."),
    )


def _reason(sent: dict[str, list[int]], taken: str, refusal: str) -> str:
    if not any(sent["states"]):
        return "no sequence is split, so nothing is sent"
    if refusal:
        return refusal
    other = "heads" if taken == "states" else "states"
    return (
        f"its busiest rank sends {max(sent[taken]):,} bytes, against {max(sent[other]):,} by {LABELS[other]}"
    )
