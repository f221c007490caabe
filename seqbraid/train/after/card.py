"""The model card of an export: what the model was trained from, on what and how, and its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.records.mix import parse_specs
from ...models.families import family_of
from ..config import DataConfig, TrainConfig
from ..report.data import RunLog, read_run
from ..report.page import CHARTS, chart_plot
from ..report.plot import HEIGHT, WIDTH
from ..run_folder import versions
from ..setup import TINY
from ..weights import split_revision
from .load import Trained

CARD, CURVES = "README.md", "curves.svg"
DRAWN = ("loss", "accuracy", "grad_norm", "lr")
HUB = "hf:"


def write_card(folder: Path, run_folder: Path, trained: Trained) -> None:
    """Write the card of a run's checkpoint into the folder of its export."""
    try:
        log = read_run(run_folder)
    except (OSError, ValueError):  # a run whose log is lost still has a model
        log = None
    picture = None if log is None else _curves(log)
    if picture is not None:
        (folder / CURVES).write_text(picture, encoding="utf-8")
    text = card_text(folder, trained, log, picture is not None)
    (folder / CARD).write_text(text, encoding="utf-8", errors="replace")


def card_text(folder: Path, trained: Trained, log: RunLog | None, has_picture: bool) -> str:
    """The whole card: the header that the Hub reads, and Markdown."""
    run, state = trained.run, trained.state
    base, revision = _base(run.model)
    header: dict[str, Any] = {"library_name": "transformers"}
    if base is not None:
        header |= {"base_model": base, "base_model_relation": "finetune"}
    if datasets := _hub_datasets(run.data):
        header["datasets"] = datasets
    header |= {"pipeline_tag": _task(trained), "tags": ["seqbraid"]}
    # JSON is YAML, and quotes whatever a name may hold.
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items())]
    lines += ["---", "", f"# {_plain(folder.name.partition('.tmp-')[0])}", ""]
    shown = f"[{base}](https://huggingface.co/{base})" if base else f"`{_plain(_local(run.model))}`"
    shown += f" at revision `{_plain(revision)}`" if revision else ""
    lines += [f"Trained with seqbraid from {shown}, {_how_long(state, trained.path)}.", ""]
    tables = {
        "Training data": _data(run.data),
        "How it was trained": _training(run, state),
        "Result": _results(log, state),
        "Versions": _versions(state),
    }
    for title, rows in tables.items():
        if rows:
            lines += [f"## {title}", "", "| | |", "|---|---|"]
            lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()] + [""]
        if title == "Result" and has_picture:
            lines += [f"![Curves of the run]({CURVES})", ""]
    return "\n".join(lines)


def _curves(log: RunLog) -> str | None:
    """Plots below each other on white, so that the picture can be read anywhere."""
    charts = [chart for chart in CHARTS if chart.metric in DRAWN]
    plots = [plot for chart in charts if (plot := chart_plot(chart, [log], legend=True))]
    if not plots:
        return None
    height = HEIGHT * len(plots)
    places = (f'<svg x="0" y="{HEIGHT * i}" width="{WIDTH}" height="{HEIGHT}" ' for i in range(len(plots)))
    inner = (plot.replace("<svg ", place, 1) for plot, place in zip(plots, places, strict=True))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" color="#1b2430">'
    return (
        f'{head}\n<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(inner)
        + "\n</svg>\n"
    )


def _base(model: str) -> tuple[str | None, str | None]:
    """The name and the revision on the Hub; None where a model is of this machine alone."""
    name, revision = split_revision(model)
    on_hub = not model.startswith(TINY) and name.count("/") == 1 and not Path(name).expanduser().exists()
    return (name, revision) if on_hub and not name.startswith(("/", ".", "~")) else (None, None)


def _local(model: str) -> str:
    """Without the folders around it, which are nobody's business."""
    return model if model.startswith(TINY) else Path(model).name


def _hub_datasets(data: DataConfig) -> list[str]:
    paths = _paths(data)
    names = [
        path.removeprefix(HUB).partition("@")[0].partition(":")[0] for path in paths if path.startswith(HUB)
    ]
    return list(dict.fromkeys(names))


def _paths(data: DataConfig) -> list[str]:
    found = ([spec.path] if isinstance(spec.path, str) else spec.path for spec in parse_specs(data.train))
    return [path for paths in found for path in paths]


def _task(trained: Trained) -> str:
    config = trained.model.config
    if config is config.get_text_config() or family_of(config) is None:
        return "text-generation"
    return "any-to-any" if hasattr(config, "audio_config") else "image-text-to-text"


def _how_long(state: Mapping[str, Any], path: Path) -> str:
    step = state.get("step")
    return f"{step:,} optimizer steps" if isinstance(step, int) else path.name


def _data(data: DataConfig) -> dict[str, str]:
    rows = {}
    for spec in parse_specs(data.train):
        for path in [spec.path] if isinstance(spec.path, str) else spec.path:
            name = path if path.startswith(HUB) else Path(path).name
            weight = "" if spec.weight is None else f", weight {spec.weight:g}"
            rows[f"source {len(rows) + 1}"] = f"`{name}`{weight}"
    rows["maximum sequence length"] = f"{data.row_tokens:,} tokens"
    if data.over_long != "error":
        rows["longer samples"] = data.over_long
    if data.system is not None:
        rows["system prompt"] = data.system
    return rows


def _training(run: TrainConfig, state: Mapping[str, Any]) -> dict[str, str]:
    step = run.train
    mesh = state.get("mesh") or {}
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    rows = {
        "global batch size": f"{step.batch_tokens:,} tokens",
        "optimizer": f"`{step.optimizer}`" + (f" {step.optimizer_options}" if step.optimizer_options else ""),
        "peak learning rate": f"{step.lr:g}",
        "schedule": f"{step.schedule}, warm-up {step.warmup:g}, final rate {step.final_lr:g} × the peak",
        "weight decay": f"{step.weight_decay:g}",
        "gradient clipping": "none" if step.clip_norm is None else f"norm {step.clip_norm:g}",
        "precision": run.precision,
        "trained": _what(run),
        "mesh": axes or "one process",
        "seed": str(run.seed),
    }
    if step.groups:
        rows["groups"] = "; ".join(json.dumps(group) for group in step.groups)
    return rows


def _what(run: TrainConfig) -> str:
    if run.lora.rank:
        return f"LoRA of rank {run.lora.rank}, alpha {run.lora.alpha:g}, merged into the weights"
    return f"all but {', '.join(run.freeze)}" if run.freeze else "all parameters"


def _results(log: RunLog | None, state: Mapping[str, Any]) -> dict[str, str]:
    """At the step of the checkpoint."""
    rows: dict[str, str] = {}
    last = state.get("step")
    for metric, name in (("loss", "training loss"), ("eval_loss", "loss on held-out data"),
                         ("eval_accuracy", "next-token accuracy on held-out data")):  # fmt: skip
        if log is None or not isinstance(last, int):
            continue
        curve = log.curves[metric]
        before = [(x, y) for x, y in zip(curve.steps, curve.values, strict=True) if x <= last]
        if before:
            rows[name] = f"{before[-1][1]:.4f} (step {int(before[-1][0]):,})"
    best = state.get("best") or {}
    metric = next((name for name in best if name != "step"), None)
    if metric is not None:
        rows["best"] = f"{metric} {best[metric]:.4f} at step {best['step']:,}"
    return rows


def _versions(state: Mapping[str, Any]) -> dict[str, str]:
    """Of the run where it says so, else of this export."""
    return dict(state.get("versions") or versions())


def _plain(text: str) -> str:
    """On one line, and without what Markdown would read."""
    return "".join(" " if c in "\r\n\t" else c for c in str(text) if c not in "`|<>[]")


def _cell(text: str) -> str:
    """As it is, in a table's cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
