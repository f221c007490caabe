"""A run's configuration from YAML and dotted overrides, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ..data.records.unpack import LINES, TABLES, suffixes
from .config import TrainConfig, as_dict, keys
from .option_errors import explain
from .yaml_file import use_checked_yaml


def parse_config(
    arguments: Sequence[str], complete: Callable[[TrainConfig], TrainConfig] | None = None
) -> tuple[TrainConfig, bool]:
    """`config.yaml --train.lr=1e-5 …` to a checked configuration, and whether only a dry run is asked for.

    Before it is checked it is given to `complete`.
    """
    try:
        from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
    except ImportError:
        raise ValueError("seqbraid train needs more packages: pip install 'seqbraid[train]'") from None
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="seqbraid train",
        description="Train on packed conversations, on any mesh.",
        exit_on_error=False,
        parser_mode=use_checked_yaml(),
    )
    parser.add_argument(
        "--config", action="config", help=("a YAML file; may also be given as the first argument")
    )
    parser.add_class_arguments(TrainConfig, None)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=("check model, mesh, data and memory, and print the plan of a batch"),
    )
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        if not Path(arguments[0]).is_file():
            raise ValueError(f"no such config file: {arguments[0]!r}")
        if suffixes(arguments[0])[0] in (*LINES, *TABLES, ".parquet"):
            raise ValueError(
                f"{arguments[0]!r} is a file of data, not a configuration; give it as "
                f"--data.train={arguments[0]}"
            )
        arguments.insert(0, "--config")
    try:
        found = parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(explain(str(error), keys())) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"a config file is not UTF-8 text: {error.reason} at byte {error.start}") from None
    found.pop("config", None)
    dry_run = bool(found.pop("dry_run"))
    values = parser.instantiate_classes(found)
    config = TrainConfig(**values.as_dict() if hasattr(values, "as_dict") else values)
    return (config if complete is None else complete(config)).check(), dry_run


def load_config(path: Path) -> TrainConfig:
    """The configuration that a run saved."""
    return parse_config([str(path)])[0]


def to_yaml(config: TrainConfig) -> str:
    """The configuration as `parse_config` reads it."""
    import yaml  # jsonargparse brings it

    values = json.loads(json.dumps(as_dict(config)))  # a list that is there twice would become an alias
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
