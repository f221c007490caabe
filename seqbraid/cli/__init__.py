"""The command line: `seqbraid train | inspect | chat | export | report | verify | layout | bench | …`.

`runs` has the commands of a run, `checks` those that look at rows, models and this machine; what a command
needs is imported when it is run, so that help takes no time.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..printable import PrintableFormatter, printable, show_error
from .checks import add_bench, add_doctor, add_layout, add_verify
from .runs import add_chat, add_demo, add_export, add_inspect, add_report, add_train


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


COMMANDS = (
    add_layout, add_verify, add_demo, add_train, add_inspect, add_chat, add_export, add_report, add_bench,
    add_doctor,
)  # fmt: skip
"""In the order of the help."""
