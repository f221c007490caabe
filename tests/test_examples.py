"""Every example runs as it is written, on a tiny model, in one process and over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seqbraid.cli import main
from seqbraid.train.config import MeshConfig, TrainConfig
from seqbraid.train.config_file import load_config
from tests.helpers.ranks import run
from tests.train.test_train import furthest, losses, train

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted(path.parent.name for path in EXAMPLES.glob("*/config.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples' data has been made, as their README says."""
    found = tmp_path_factory.mktemp("examples")
    subprocess.run([sys.executable, EXAMPLES / "make_data.py"], cwd=found, check=True, capture_output=True)
    return found


def _train_in(folder: str, config: TrainConfig) -> None:
    """The configs name their files from the folder that the commands are given in."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        train(config)
    finally:
        os.chdir(before)


def test_the_commands_that_show_data_run_as_they_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(folder)
    pages = (EXAMPLES.parent / name for name in ("README.md", "docs/training.md"))
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    commands = [line.split("#")[0].split()[2:] for line in lines if line.startswith("$ seqbraid inspect")]
    assert len(commands) >= 3
    for command in commands:
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert "steps of an epoch" in shown and "It is a" in shown
    assert "<img" in (folder / "out/data.html").read_text(encoding="utf-8")


def test_there_are_examples_of_all_kinds() -> None:
    assert {"qwen3_vl", "qwen3_5_documents", "qwen3_omni_audio", "lora"} <= set(CONFIGS)
    for name in CONFIGS:
        assert f"examples/{name}/config.yaml" in (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_example_learns_alike_alone_and_over_ranks(folder: Path, name: str) -> None:
    config = load_config(EXAMPLES / name / "config.yaml")
    config = replace(config, train=replace(config.train, steps=3, eval_every=None))
    curves = []
    for world_size in (1, 2):
        out = f"out/runs/{name}_{world_size}"
        run(_train_in, world_size, str(folder), replace(config, out=out, mesh=MeshConfig(ring=world_size)))
        curves.append(losses(folder / out))
    assert len(curves[0]) == 3 and curves[0][-1] < curves[0][0]
    assert furthest(curves[1], curves[0]) < 1e-5


def test_the_manifest_names_its_own_pods_and_volumes() -> None:
    """Two pods, the first of which is the rendezvous by the name that a JobSet gives it."""
    import yaml

    job = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (hosts,) = job["spec"]["replicatedJobs"]
    pods = hosts["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    options = dict(part.split("=") for part in container["command"] if part.startswith("--") and "=" in part)
    name = job["metadata"]["name"]
    assert options["--rdzv-endpoint"] == f"{name}-{hosts['name']}-0-0.{name}:29400"
    assert int(options["--nnodes"]) == pods["parallelism"] == pods["completions"]
    assert int(options["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    volumes = {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pods["completionMode"] == "Indexed" and job["spec"]["network"]["enableDNSHostnames"]
