"""What `seqbraid doctor` says of a machine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from seqbraid import doctor
from seqbraid.cli import main
from seqbraid.ops.table import TABLE


def test_it_prints_the_table_of_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for words in ("transformers", "open files", "flash_attention_4", "its kernels need a GPU", "[cuda]"):
        assert words in shown


def test_json_has_one_kernel_in_use_for_each_op_and_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    used = [(k["op"], k["dtype"]) for k in found["kernels"] if k["used"]]
    assert sorted(used) == sorted((op.name, dtype) for op in TABLE for dtype in ("bfloat16", "float32"))
    assert len(found["kernels"]) == 2 * sum(len(op.candidates) for op in TABLE)
    packages = {p["name"]: p for p in found["packages"]}
    assert packages["torch"]["version"] == torch.__version__
    assert re.fullmatch(r"takes <5\.\d+,>=5\.9\.0", packages["transformers"]["note"])


@pytest.mark.parametrize(
    ("installed", "advice"),
    [
        ("5.8.1", "transformers 5.8.1 is outside of the tested versions"),
        ("99.0", "99.0 is outside"),
        ("5.10.2", None),
    ],
)
def test_a_release_outside_the_window_is_named(
    installed: str, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"transformers": installed, "torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise doctor.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)
    lines = [line for line in doctor.examine().advice if "transformers" in line]
    assert (advice in lines[0]) if advice else not lines


def test_a_package_of_an_extra_has_a_window_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", dict.fromkeys(doctor.PACKAGES, "0.1").__getitem__)
    assert any("peft 0.1 is outside of the tested versions" in line for line in doctor.examine().advice)


def test_few_open_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(files: int) -> Any:
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (files, files))
        return [line for line in doctor.examine().advice if "open files" in line]

    assert limit(1024) and not limit(65536)


@pytest.mark.parametrize(("shared", "gpus", "said"), [(64 << 20, 8, True), (64 << 20, 1, False)])
def test_little_shared_memory_between_gpus_is_said(shared: int, gpus: int, said: bool) -> None:
    assert bool(doctor._limits(65536, shared, gpus)) == said
    assert not doctor._limits(65536, 8 << 30, gpus) and not doctor._limits(65536, None, gpus)


def test_every_extra_has_a_package_that_is_looked_for() -> None:
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    trackers, ours = {"wandb", "mlflow", "trackio"}, {"demo", "dev"}
    named = set(re.findall(r"seqbraid\[(\w+)\]", " ".join(doctor.PACKAGES.values())))
    assert named == extras.keys() - trackers - ours
    for note in doctor.PACKAGES.values():
        for extra in re.findall(r"seqbraid\[(\w+)\]", note):
            assert any(Requirement(line).name in doctor.PACKAGES for line in extras[extra])
