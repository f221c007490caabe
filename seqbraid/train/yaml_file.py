"""A look at a YAML file before it is read: what a parser takes in silence is refused."""

from __future__ import annotations

from pathlib import Path


def check_yaml(path: Path) -> None:
    """Refuse a key that is given twice, and aliases, of which a few lines can fill the memory."""
    import yaml  # jsonargparse brings it

    try:
        text = path.read_text(encoding="utf-8")
        for event in yaml.parse(text):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise ValueError(f"{path}:{line} has the alias *{event.anchor}; write its value out")
        waiting = [yaml.compose(text)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set[str]()
            for key, value in node.value:
                if str(key.value) in seen:
                    raise ValueError(f"{path}:{key.start_mark.line + 1} has {key.value!r} twice; keep one")
                seen.add(str(key.value))
                waiting.append(value)
