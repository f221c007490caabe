"""Where metrics may go beside `log.jsonl`: thin adapters to TensorBoard, W&B, MLflow and trackio, and the
sinks of other packages, by entry point.

Each package is imported when it is asked for. A run that is resumed goes on in the same place.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

PROJECT = "seqbraid"
IDS_FILE = "trackers.json"
"""In the run's folder: what services call this run, so that a resumed one is found again."""


class Tracker(Protocol):
    """A place that metrics are sent to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files in `RUN/tensorboard`; what a killed run wrote from the resumed step on is not shown."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = resume_step if (folder / "tensorboard").exists() else None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)
        self.writer.add_text(
            "config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", resume_step
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            group = "eval" if name.startswith("eval_") else "train"
            self.writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases; the step is a metric, since W&B's own counter cannot go back on resume."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        self.run = wandb.init(
            project=PROJECT,
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            id=_run_id(folder, "wandb", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({**metrics, "step": step})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, where `MLFLOW_TRACKING_URI` points."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        import mlflow  # type: ignore[import-not-found, unused-ignore]

        self.mlflow = mlflow
        mlflow.set_experiment(PROJECT)

        def started() -> str:
            run_id: str = mlflow.start_run(run_name=folder.name).info.run_id
            # Parameters cannot be changed later, so they are written once.
            mlflow.log_params({name: str(value)[:500] for name, value in _flat(config).items()})
            mlflow.end_run()
            return run_id

        mlflow.start_run(run_id=_run_id(folder, "mlflow", started))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class Trackio:
    """A run of trackio, found again by its name."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        import trackio  # type: ignore[import-not-found, unused-ignore]

        name = _run_id(folder, "trackio", lambda: f"{folder.name}-{uuid.uuid4().hex[:6]}")
        self.trackio = trackio
        trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self.trackio.finish()


TRACKERS: dict[str, tuple[Callable[[Path, Mapping[str, Any], int], Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "pip install 'seqbraid[train]'"),
    "wandb": (WandB, "wandb", "pip install 'seqbraid[wandb]'"),
    "mlflow": (MLflow, "mlflow", "pip install 'seqbraid[mlflow]'"),
    "trackio": (Trackio, "trackio", "pip install 'seqbraid[trackio]'"),
}
"""Name to adapter, its package, and what to install for it."""


ENTRY_POINTS = "seqbraid.sinks"
"""The group under which a package names its own: each a callable as the classes here, of the run's folder,
the config and the first step that will be logged, that gives a `Tracker`."""


def other_sinks() -> dict[str, EntryPoint]:
    """Sinks of installed packages, by name; our own names stay ours."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in TRACKERS}


def open_tracker(name: str, folder: Path, config: Mapping[str, Any], resume_step: int) -> Tracker:
    """One of ours, or of another package's."""
    make = TRACKERS[name][0] if name in TRACKERS else other_sinks()[name].load()
    found: Tracker = make(folder, config, resume_step)
    return found


def _run_id(folder: Path, service: str, new: Callable[[], str]) -> str:
    path = folder / IDS_FILE
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if service not in known:
        known[service] = new()
        fresh = path.with_name(f"{path.name}.tmp")
        fresh.write_text(json.dumps(known) + "\n", encoding="utf-8")
        fresh.replace(path)
    return known[service]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
