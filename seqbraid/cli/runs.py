"""Commands of a run: before it (inspect), itself (train, demo), and after it (chat, export, report)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..printable import printable
from .checks import Commands


def add_demo(commands: Commands) -> None:
    """`seqbraid demo`."""
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
    from ..train.demo.run import run_demo

    return run_demo(args.steps, args.out, args.seed, args.processes)


def add_train(commands: Commands) -> None:
    """`seqbraid train`."""
    parser = commands.add_parser(
        "train", help="train on conversations: seqbraid train config.yaml --train.lr=1e-5 …", add_help=False
    )
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    _say_loading(args.rest)
    from ..train.run import train

    return train(args.rest)


def add_inspect(commands: Commands) -> None:
    """`seqbraid inspect`."""
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
    from ..train.inspect.run import inspect

    found = inspect(args.rest, args.html, args.samples, args.row)
    return 1 if any(notice.stops for notice in found.notices) else 0


def _say_loading(arguments: Sequence[str]) -> None:
    """What the first seconds are spent on, before anything else can say so; on the first rank alone."""
    shows = any(argument in arguments for argument in ("-h", "--help", "--print_config"))
    if "torch" not in sys.modules and not shows and os.environ.get("RANK", "0") == "0":
        print("   0.0 s  loading PyTorch and transformers", file=sys.stderr, flush=True)


def add_chat(commands: Commands) -> None:
    """`seqbraid chat`."""
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
    _say_loading(())
    from ..train.after.chat import ChatOptions
    from ..train.after.terminal import talk

    options = ChatOptions(args.max_new_tokens, args.temperature, args.system, args.seed)
    return talk(args.folder, args.checkpoint, args.image, args.audio, options)


def add_export(commands: Commands) -> None:
    """`seqbraid export`."""
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
    _say_loading(())
    import torch

    from ..train.after.export import export_checkpoint

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    report = export_checkpoint(args.run_folder, args.checkpoint, args.out, dtype)
    print(printable(report.text()))
    return 0


def add_report(commands: Commands) -> None:
    """`seqbraid report`."""
    parser = commands.add_parser("report", help="draw the curves of one or more runs into one HTML file")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE")
    parser.add_argument(
        "--force", action="store_true", help=("replace a file that is not a report without asking")
    )
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from ..train.report.page import is_report, write_report

    force = args.force
    if not force and args.out.is_file() and not is_report(args.out) and sys.stdin.isatty():
        answer = input(f"{args.out} exists and is not a seqbraid report. Replace it? [y/N] ")
        force = answer.strip().lower() in ("y", "yes")
    write_report(args.runs, args.out, force)
    print(printable(f"wrote {args.out}"))
    return 0
