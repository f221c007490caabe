"""`seqbraid bench max-length`."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..comm.gpus import own_gpu
from ..models.stock import read_config
from ..models.tiny.decoders import tiny_config
from ..models.tiny.media import MEDIA_FAMILIES, TEXT_MODELS, tiny_media_config
from ..plan.memory import MemoryOptions
from ..train.weights import config_folder
from .max_length import GIB, Limits, Longest, MaxLength, switches

RESERVE = 0.03
"""Share of a device's free memory that is left to fragmentation."""


def max_length(args: argparse.Namespace) -> int:
    """Search for each setting, and print a table."""
    console = Console()
    gpu = own_gpu()
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is None and args.device_gib is None:
        raise ValueError(
            "there is no GPU here; say with --device-gib what a step may take of the CPU's memory"
        )
    if min(args.step, args.most) < 1 or args.step > args.most:
        raise ValueError(f"--step {args.step} and --most {args.most}: give whole numbers, 1 ≤ step ≤ most")
    limits = Limits(
        int(args.device_gib * GIB) if args.device_gib is not None else _free(device),
        int(args.host_gib * GIB) if args.host_gib is not None else _free(torch.device("cpu")),
        args.most,
        args.step,
    )
    search = MaxLength(
        _config(args.model),
        getattr(torch, args.dtype),
        device,
        _depths(args.layers),
        limits,
        lambda line: console.print(f"  {line}", highlight=False),
    )
    offload = {"no": [False], "yes": [True], "both": [False, True]}[args.offload]
    found: list[Longest] = []
    for memory in switches(args.checkpointing.split(","), offload, args.mlp_tile):
        console.print(_name(memory), highlight=False)
        found.append(search.find(memory))
    console.print(table(args.model, found, limits))
    if args.json:
        args.json.write_text(json.dumps([one.to_json() for one in found], indent=1) + "\n", encoding="utf-8")
    return 0 if any(one.tokens for one in found) else 1


def table(model: str, found: list[Longest], limits: Limits) -> Table:
    """One line for each setting."""
    shown = Table(
        title=f"{model}, {found[0].depth} layers: the longest sequence in {limits.device / GIB:.4g} GiB "
        "(forward and backward, no optimizer)",
        title_justify="left",
    )
    shown.add_column("memory")
    for name in ("tokens", "GiB", "host GiB", "s a step", "tok/s", "check"):
        shown.add_column(name, justify="right")
    for one in found:
        if one.tokens is None:
            shown.add_row(_name(one.memory), f"< {limits.step:,}", "", "", "", "", "")
            continue
        check = "" if one.checked is None else f"{one.checked[0]:+.1%} GiB, {one.checked[1]:+.1%} s"
        shown.add_row(
            _name(one.memory),
            f"{one.tokens:,}" + (" (all that was asked for)" if one.tokens >= limits.most else ""),
            f"{one.peak / GIB:.4g}",
            f"{one.host_bytes / GIB:.4g}",
            f"{one.seconds:.2f}",
            f"{one.tokens / one.seconds:,.0f}",
            check,
        )
    depths = found[0].trials
    if len(depths) > 1:
        shown.caption = f"run with {', '.join(str(trial.layers) for trial in depths)} layers"
    return shown


def _name(memory: MemoryOptions) -> str:
    parts = [memory.checkpointing, *(["offload"] if memory.offload else [])]
    return " + ".join(parts + ([f"MLP tiles of {memory.mlp_tile}"] if memory.mlp_tile else []))


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * (1 - RESERVE))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _config(name: str) -> Any:
    if name in MEDIA_FAMILIES:
        return tiny_media_config(name)
    return tiny_config(TEXT_MODELS[name]) if name in TEXT_MODELS else read_config(config_folder(name))


def _depths(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"--layers {text!r} is not a list of depths such as 2,4,8") from None
