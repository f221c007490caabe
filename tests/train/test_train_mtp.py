"""Runs that train multi-token prediction: their curve on any mesh, resumed, exported."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqbraid.models.mtp_weights import read_mtp
from seqbraid.train.after.export import export_checkpoint
from seqbraid.train.config import CheckpointConfig, LogConfig, LoraConfig, MeshConfig, StepConfig
from seqbraid.train.mtp_config import MtpConfig
from seqbraid.train.setup import make_model
from tests.helpers.ranks import errors, run
from tests.train.test_train import (  # noqa: F401  the fixture is found by its name
    _train_and_stop,
    _weights,
    config,
    furthest,
    logged,
    losses,
    shapes,
    train,
)


def test_the_curve_is_that_of_one_process_and_a_run_resumes_and_is_exported(
    shapes: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    common: dict[str, Any] = {
        "model": "tiny:qwen3_5",
        "mtp": MtpConfig(depth=2, fresh=True),
        "train": StepConfig(steps=4, batch_tokens=512, lr=1e-3),
        "checkpoint": CheckpointConfig(every=2),
        "log": LogConfig(sinks=[], every=1000),
    }
    alone, whole, begun = (tmp_path / name for name in ("alone", "whole", "begun"))
    run(train, 1, config(shapes, alone, **common))
    run(train, 2, config(shapes, whole, **common, mesh=MeshConfig(ring=2)), limit=240.0)
    assert furthest(losses(whole), losses(alone)) < 1e-5
    for step, one in zip(logged(whole), logged(alone), strict=True):
        assert step["mtp_loss"] == pytest.approx(one["mtp_loss"], rel=1e-5)
        assert step["mtp_label_tokens_2"] == one["mtp_label_tokens_2"] > 0
        assert 0 <= step["mtp_acceptance_1"] <= 1
    assert logged(alone)[-1]["mtp_loss"] < logged(alone)[0]["mtp_loss"]

    run(_train_and_stop, 2, config(shapes, begun, **common, mesh=MeshConfig(ring=2)), 2, limit=240.0)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(begun, elsewhere)
    run(train, 2, config(shapes, begun, **common, mesh=MeshConfig(ring=2)), limit=240.0)
    assert losses(begun) == losses(whole) and _weights(begun) == _weights(whole)
    run(train, 2, replace(config(shapes, elsewhere, **common), mesh=MeshConfig(pp=2)), limit=240.0)
    assert furthest(losses(elsewhere), losses(whole)) < 1e-5
    (error,) = errors(train, 1, replace(config(shapes, alone, **common), mtp=MtpConfig()))
    assert "was trained with mtp=" in error.message

    export_checkpoint(alone, "last", tmp_path / "exported")
    assert {name.split(".")[1] for name in read_mtp(tmp_path / "exported")} == {
        "fc", "layers", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden",
    }  # fmt: skip


def test_the_module_alone_learns_where_the_configuration_says_so(tmp_path: Path) -> None:
    alone = MtpConfig(depth=1, fresh=True, only=True)
    model = make_model(config(tmp_path, tmp_path / "out", model="tiny:qwen3_5", mtp=alone))
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns and learns == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    for settings, what in (
        (MtpConfig(only=True), "mtp.depth=0"),
        (MtpConfig(depth=-1), "mtp.depth=-1"),
        (MtpConfig(depth=1, loss_factor=0.0, only=True), "train nothing"),
    ):
        with pytest.raises(ValueError, match=what):
            settings.check()
    base = config(tmp_path, tmp_path / "out", mtp=MtpConfig(depth=1, only=True))
    with pytest.raises(ValueError, match="freezes all but"):
        replace(base, freeze=["head"]).check()
    with pytest.raises(ValueError, match="random weights frozen"):
        replace(base, mtp=MtpConfig(depth=1, fresh=True), lora=LoraConfig(rank=2)).check()
