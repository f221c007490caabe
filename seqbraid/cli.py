"""The command line: `seqbraid train | inspect | chat | export | report | verify | layout | bench | …`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Any, NoReturn

from .printable import PrintableFormatter, printable, show_error

Commands = Any
"""Where argparse keeps subcommands; the class has no public name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a `ValueError` is the user's to read, not a traceback."""
    if isinstance(logging.lastResort, logging.Handler):  # prints what loggers say where nobody set them up
        logging.lastResort.setFormatter(PrintableFormatter())
    parser = argparse.ArgumentParser(
        prog="seqbraid",
        description=(
            "Train on long packed sequences over many devices, with the loss and gradients of one process."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for add in COMMANDS:
        add(commands)
    args, rest = parser.parse_known_args(argv)
    if args.command in ("train", "inspect"):
        args.rest = rest  # its options are those of the configuration
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = args.run(args)
    except ValueError as error:
        print(printable(f"seqbraid {args.command}: {error}"), file=sys.stderr)
        return 2
    return status


def entry() -> NoReturn:
    """`main` as a process of its own."""
    sys.excepthook = show_error
    sys.exit(main())


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token counts such as 900,300,40"
        ) from None


def _add_layout(commands: Commands) -> None:
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

    from .layout import SequenceLayout
    from .layout.render import layout_svg, layout_table

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
        from .verify.exchange import exchange_report, expert_report, stage_report

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


def _add_verify(commands: Commands) -> None:
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

    from .comm.rendezvous import join_on_cpu
    from .mesh import Mesh
    from .verify.report import print_mutants, print_parity
    from .verify.run import load_model, verify_model, verify_mutants

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


def _add_train(commands: Commands) -> None:
    parser = commands.add_parser(
        "train", help="train on conversations: seqbraid train config.yaml --train.lr=1e-5 …", add_help=False
    )
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    _say_loading(args.rest)
    from .train.run import train

    return train(args.rest)


def _add_inspect(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a run would be trained on: a packed row and its labels, statistics, steps",
        usage="seqbraid inspect config.yaml [--html FILE] [--samples N] [--row N] [--data.row_tokens=… …]",
        epilog="All options of `seqbraid train` can be given as well.",
        allow_abbrev=False,
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one HTML page into this file")
    parser.add_argument(
        "--samples", type=int, default=2000, help="look at so many samples, spread evenly over an epoch"
    )
    parser.add_argument("--row", type=int, default=0, help="the row that is shown, counted from 0")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    _say_loading(args.rest)
    from .train.inspect.run import inspect

    found = inspect(args.rest, args.html, args.samples, args.row)
    return 1 if any(notice.stops for notice in found.notices) else 0


def _say_loading(arguments: Sequence[str]) -> None:
    """What the first seconds are spent on, before anything else can say so; on the first rank alone."""
    shows = any(argument in arguments for argument in ("-h", "--help", "--print_config"))
    if "torch" not in sys.modules and not shows and os.environ.get("RANK", "0") == "0":
        print("   0.0 s  loading PyTorch and transformers", file=sys.stderr, flush=True)


def _add_export(commands: Commands) -> None:
    parser = commands.add_parser(
        "export", help=("write a run's checkpoint in the format that stock transformers loads")
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder (`out` of its config)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--checkpoint", default="last", help="last, best or a step")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help=("dtype of the weights; by default that of the original checkpoint"),
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    import torch

    from .train.after.export import export_checkpoint

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    report = export_checkpoint(args.run_folder, args.checkpoint, args.out, dtype)
    print(printable(report.text()))
    return 0


def _add_chat(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat", help="talk to a run's checkpoint, or to an exported folder, in the terminal"
    )
    parser.add_argument("folder", type=Path, metavar="RUN_OR_FOLDER", help="a run's folder, or an export's")
    parser.add_argument("--checkpoint", help="of a run: last (the default), best or a step")
    for kind, what in (("image", "a picture"), ("audio", "a sound")):
        parser.add_argument(
            f"--{kind}", type=Path, action="append", default=[], metavar="FILE",
            help=f"{what} that goes with the first message; may be given several times",
        )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="the most an answer may have")
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 takes the most likely token; by default as the model's config says",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    from .train.after.chat import ChatOptions
    from .train.after.terminal import talk

    options = ChatOptions(args.max_new_tokens, args.temperature, args.system, args.seed)
    return talk(args.folder, args.checkpoint, args.image, args.audio, options)


def _add_doctor(commands: Commands) -> None:
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

    from .doctor import examine

    report = examine()
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(report.as_text())
    return 0


def _add_bench(commands: Commands) -> None:
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
    from .bench.command import max_length

    return max_length(args)


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser("report", help="draw the curves of one or more runs into one HTML file")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE")
    parser.add_argument(
        "--force", action="store_true", help=("replace a file that is not a report without asking")
    )
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from .train.report.page import is_report, write_report

    force = args.force
    if not force and args.out.is_file() and not is_report(args.out) and sys.stdin.isatty():
        answer = input(f"{args.out} exists and is not a seqbraid report. Replace it? [y/N] ")
        force = answer.strip().lower() in ("y", "yes")
    write_report(args.runs, args.out, force)
    print(printable(f"wrote {args.out}"))
    return 0


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help=("train a tiny Qwen3.5 to read digits on CPU ranks and in one process, and write a report"),
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="folder for report.html"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=4, help=("number of ranks; 4 means ring 2 × ulysses 2")
    )
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from .train.demo.run import run_demo

    return run_demo(args.steps, args.out, args.seed, args.processes)


COMMANDS = (
    _add_layout, _add_verify, _add_demo, _add_train, _add_inspect, _add_chat, _add_export, _add_report,
    _add_bench, _add_doctor,
)  # fmt: skip
"""In the order of the help."""


if __name__ == "__main__":
    entry()
