"""Commands that look at rows, models and this machine: layout, verify, bench, doctor."""

from __future__ import annotations

import argparse
import json
from math import lcm
from pathlib import Path
from typing import Any

from ..printable import printable

Commands = Any
"""Where argparse keeps subcommands; the class has no public name."""


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token counts such as 900,300,40"
        ) from None


def add_layout(commands: Commands) -> None:
    """`seqbraid layout`."""
    parser = commands.add_parser("layout", help="show which rank holds which tokens of a row")
    parser.add_argument("--lengths", type=_lengths, required=True, help="sequence lengths, e.g. 900,300,40")
    parser.add_argument("--ring", type=int, default=1)
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a rank's tokens and heads")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages of --model")
    parser.add_argument("--policy", default="balanced", help="balanced, zigzag or contiguous")
    parser.add_argument(
        "--multiple-of", type=int, default=1, help="round a rank's tokens up to a multiple of this"
    )
    parser.add_argument("--pad-to", type=int, help="pad the whole row to this many tokens")
    parser.add_argument("--fp8", action="store_true", help="round a rank's tokens to 16 as well")
    parser.add_argument("--svg", type=Path, metavar="FILE", help=("draw the placement as SVG into this file"))
    parser.add_argument(
        "--model",
        help=(
            "a tiny model (qwen3_5, …) or a checkpoint's folder: also show what its gated-delta layers, its "
            "experts, its tensor parallel ranks and its pipeline stages send"
        ),
    )
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts of --model")
    parser.set_defaults(run=_layout)


def _layout(args: argparse.Namespace) -> int:
    from rich.console import Console, RenderableType

    from ..layout import SequenceLayout
    from ..layout.render import layout_svg, layout_table

    layout = SequenceLayout(
        args.lengths,
        args.ring,
        args.ulysses,
        args.policy,
        lcm(args.multiple_of, args.tp),
        args.pad_to,
        args.fp8,
    )
    shown: list[RenderableType] = [layout_table(layout)]
    if args.model:
        # Imports transformers, which takes a while.
        from ..verify.exchange import exchange_report, expert_report, stage_report

        shown.append(exchange_report(layout, args.model, args.tp))
        if args.pp > 1:
            shown.append(stage_report(layout, args.model, args.pp, args.tp))
        if args.ep > 1:
            shown.append(expert_report(layout, args.model, args.ep, args.tp))
    Console().print(*shown)
    if args.svg:
        args.svg.write_text(layout_svg(layout), encoding="utf-8")
        print(printable(f"wrote {args.svg}"))
    return 0


def add_verify(commands: Commands) -> None:
    """`seqbraid verify`."""
    parser = commands.add_parser(
        "verify", help="compare packed training with the stock model, sample by sample"
    )
    parser.add_argument(
        "--model", required=True, help="a tiny model (qwen3_5, llama, …) or a checkpoint's folder"
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        help=("sequence length of each sample; by default a mix of short and long ones"),
    )
    parser.add_argument("--policy", default="balanced", help="balanced, zigzag or contiguous")
    for axis in ("ring", "ulysses", "tp", "dp_shard", "pp"):
        flag = "--" + axis.replace("_", "-")
        parser.add_argument(flag, type=int, default=1, help=f"ranks on the {axis} axis, under torchrun")
    parser.add_argument(
        "--ep", type=int, default=1, help="ranks that share the experts, among those of all axes"
    )
    parser.add_argument(
        "--gated-delta", default="auto", help="what gated-delta layers exchange: auto, states or heads"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mtp", type=int, default=0, metavar="DEPTH", help="with multi-token prediction of this many depths"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every error and its noise floor to this file"
    )
    parser.add_argument(
        "--mutants", action="store_true", help="also plant known bugs and check that each one is caught"
    )
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from ..comm.rendezvous import join_on_cpu
    from ..mesh import Mesh
    from ..verify.report import print_mutants, print_parity
    from ..verify.run import load_model, verify_model, verify_mutants

    axes = ("pp", "dp_shard", "ring", "ulysses", "tp", "ep")
    mesh = Mesh(**{axis: getattr(args, axis) for axis in axes})
    model = load_model(args.model, args.seed, args.mtp)
    if mesh.world_size > 1:
        join_on_cpu("verify")
    parity = verify_model(model, args.model, args.lengths, args.policy, args.seed, mesh, args.gated_delta)
    result = parity.to_json()
    holds = parity.holds
    caught = {}
    if args.mutants:
        if mesh.world_size > 1:
            raise ValueError("--mutants runs in one process only; leave out torchrun")
        caught = verify_mutants(args.seed)
        result["mutants"] = {name: not verdict.holds for name, verdict in caught.items()}
        holds = holds and not any(verdict.holds for verdict in caught.values())
    if mesh.rank == 0:
        print_parity(parity)
        if caught:
            print_mutants(caught)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if holds else 1


def add_bench(commands: Commands) -> None:
    """`seqbraid bench`."""
    parser = commands.add_parser("bench", help="find by trying what this machine can do with a model")
    kinds = parser.add_subparsers(dest="bench", required=True)
    parser = kinds.add_parser(
        "max-length",
        help="the longest sequence that a model trains on this device, per setting of the memory switches",
    )
    parser.add_argument(
        "--model", required=True, help="a checkpoint's folder or name on the Hub, of which the config is read"
    )
    parser.add_argument(
        "--layers", help="depths to run, e.g. 2,4,8: two give the whole model's peak, a third checks"
    )
    parser.add_argument("--checkpointing", default="full", help="one or more of none,selective,full")
    parser.add_argument("--offload", choices=("no", "yes", "both"), default="no")
    parser.add_argument("--mlp-tile", type=int, help="tokens per tile of the MLPs")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--device-gib", type=float, help="what a step may take; by default the GPU's free memory"
    )
    parser.add_argument("--host-gib", type=float, help="what offload may take; by default the free memory")
    parser.add_argument("--most", type=int, default=1 << 22, help="tokens beyond which nothing is tried")
    parser.add_argument("--step", type=int, default=1024, help="lengths are multiples of this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from ..bench.command import max_length

    return max_length(args)


def add_doctor(commands: Commands) -> None:
    """`seqbraid doctor`."""
    parser = commands.add_parser(
        "doctor",
        help=(
            "show packages, GPUs and limits of this machine, which kernels are used, and why not the others"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..doctor import examine

    report = examine()
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(report.as_text())
    return 0
