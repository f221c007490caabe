"""The configuration: YAML, dotted overrides, and refusals that name what was meant."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from seqbraid.cli import main
from seqbraid.train import changes
from seqbraid.train.config import StepConfig, keys
from seqbraid.train.config_file import load_config, parse_config, to_yaml
from seqbraid.train.schedule import learning_rate

YAML = """\
model: tiny:llama
out: runs/a
data:
  train: [a.jsonl, b.jsonl]
  row_tokens: 128
train:
  steps: 10
  batch_tokens: 256
  lr: 1.0e-4
memory:
  checkpointing: full
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "config.yaml"
    found.write_text(YAML)
    return found


def test_overrides_come_after_the_file_and_a_saved_config_reads_the_same(path: Path, tmp_path: Path) -> None:
    config, dry_run = parse_config([str(path), "--train.lr=2e-5", "--mesh.ring=2", "--freeze=[vision]"])
    assert (config.train.lr, config.mesh.ring, config.freeze, dry_run) == (2e-5, 2, ["vision"], False)
    assert (config.train.steps, config.data.train, config.memory.checkpointing) == (
        10,
        ["a.jsonl", "b.jsonl"],
        "full",
    )
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "saved.yaml") == config
    assert parse_config([str(path), "--dry-run"])[1]
    twice = replace(config, data=replace(config.data, eval=config.data.train))
    (tmp_path / "saved.yaml").write_text(to_yaml(twice))
    assert load_config(tmp_path / "saved.yaml") == twice


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--train.lrr=1", "train.lr"),
        ("--trian.steps=3", "train.steps"),
        ("--train.learning_rate=3", "train.lr"),
        ("--data.rowtokens=3", "data.row_tokens"),
        ("--checkpointing=full", "memory.checkpointing"),
        ("--qqq=1", "valid are model, out"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(path: Path, option: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown.*{meant}"):
        parse_config([str(path), option])


@pytest.mark.parametrize(
    ("line", "meant"),
    [("stepz: 3", "train.steps"), ("warm_up: 3", "train.warmup"), ("qqqqq: 1", "train.qqqqq is unknown")],
)
def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_name(
    path: Path, line: str, meant: str
) -> None:
    path.write_text(YAML.replace("  steps: 10", f"  steps: 10\n  {line}"))
    with pytest.raises(ValueError, match=meant):
        parse_config([str(path)])
    path.write_text(YAML + "modle: x\n")
    with pytest.raises(ValueError, match="modle is unknown; did you mean model"):
        parse_config([str(path)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.steps=null"], "exactly one"),
        (["--train.epochs=1"], "exactly one"),
        (["--train.batch_tokens=300"], "use 256 or 384"),
        (["--train.batch_tokens=0"], "train.batch_tokens=0"),
        (["--train.lr=.inf"], "train.lr=inf"),
        (["--train.lr=fast"], "train.lr=fast cannot be used; give a number$"),
        (["--data.min_pixels=x"], "data.min_pixels=x cannot be used; give a whole number or null$"),
        (["--train.schedule=step"], "^train.schedule=step is unknown; use one of cosine, linear, constant$"),
        (["--precision=bf16"], "^precision=bf16 is unknown; use one of float32, mixed, bfloat16$"),
        (["--train.clip_norm=0"], "clip_norm"),
        (["--train.eval_every=5"], "data.eval"),
        (["--memory.offload=true", "--memory.checkpointing=none"], "offload"),
        (["--memory.mlp_tile=0"], "mlp_tile=0"),
        (["--lora.rank=4", "--freeze=[vision]"], "lora"),
        (["--model="], "model is empty"),
        (["--train.steps=null", "--train.epochs=1", "--train.warmup=5"], "fraction below 1"),
        (["--train.lr=-1e-5"], "train.lr=-1e-05"),
        (["--train.warmup=-1"], "train.warmup=-1"),
        (["--train.final_lr=1.5"], "train.final_lr=1.5"),
        (["--train.weight_decay=-0.1"], "train.weight_decay=-0.1"),
        (["--train.beta1=1"], "beta1=1"),
        (["--train.beta2=-0.5"], "beta2=-0.5"),
        (["--lora.rank=-1"], "lora.rank=-1"),
        (["--log.every=0"], "log.every=0"),
        (["--checkpoint.every=0"], "checkpoint.every=0"),
        (["--checkpoint.keep=0"], "checkpoint.keep=0"),
        (["--data.prefetch_steps=0"], "data.prefetch_steps=0"),
        (["--seed=-5"], "seed=-5 must be at least 0"),
        (["--seed=9223372036854775808"], "seed=9223372036854775808 must be at least 0 and below"),
        (["--train.eps=0"], "train.eps=0.0 must be"),
        (["--train.eps=1e-60"], "train.eps=1e-60 must be"),
        (["--resume=latest"], "resume='latest' is unknown; use auto, never, must, latest-intact or step:N"),
        (["--resume=step:last"], "resume='step:last' is unknown"),
    ],
)
def test_what_cannot_be_meant_is_refused(path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config([str(path), *options])


def test_the_command_says_errors_without_a_traceback(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(path), "--train.lrr=1"]) == 2
    assert "did you mean train.lr?" in capsys.readouterr().err
    assert main(["train", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for key in keys():
        assert f"--{key}" in text, key
    assert "Global batch size: tokens of an optimizer step over the whole job" in " ".join(text.split())


def test_print_config_shows_what_would_be_used(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(path), "--train.lr=5e-6", "--print_config"])
    shown = capsys.readouterr().out
    assert "lr: 5.0e-06" in shown and "row_tokens: 128" in shown


def test_rates_rise_and_fall() -> None:
    config = StepConfig(steps=100, lr=1.0, warmup=0.1, schedule="cosine", final_lr=0.1)
    rates = [learning_rate(config, step / 100, (step + 1) / 100) for step in range(100)]
    assert rates[:9] == pytest.approx([0.1 * (step + 1) for step in range(9)])
    assert rates[9] == rates[10] == 1.0 and all(a > b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.55) and 0.1 < rates[-1] < 0.101
    steps = StepConfig(steps=100, lr=1.0, warmup=10, schedule="cosine", final_lr=0.1)
    assert [learning_rate(steps, step / 100, (step + 1) / 100) for step in range(100)] == pytest.approx(rates)
    linear = StepConfig(steps=4, lr=1.0, warmup=0, schedule="linear", final_lr=0.2)
    assert [learning_rate(linear, step / 4, (step + 1) / 4) for step in range(4)] == pytest.approx(
        [1.0, 0.8, 0.6, 0.4]
    )
    longer = StepConfig(steps=4, lr=1.0, warmup=8)  # a warm-up ends with the run, if not before
    assert [learning_rate(longer, step / 4, (step + 1) / 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    constant = StepConfig(steps=4, lr=3.0, warmup=0, schedule="constant")
    assert learning_rate(constant, 0, 0.25) == learning_rate(constant, 0.75, 1.0) == 3.0


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvw"))


@pytest.mark.parametrize("before", [[], ["--config"]], ids=["first argument", "--config"])
def test_a_key_given_twice_and_an_alias_are_refused(tmp_path: Path, before: list[str]) -> None:
    cases = {
        YAML + "  checkpointing: none\n": r"config.yaml:12 has 'checkpointing' twice",
        YAML + "out: runs/b\n": r"config.yaml:12 has 'out' twice",
        BOMB: r"config.yaml:2 has the YAML alias \*a",
        "a: [": "config.yaml cannot be read",
        "- a": r"config.yaml has no settings: .* `key: value`",
        "": "config.yaml has no settings",
        "\udcff": "not UTF-8 text",
    }
    for text, message in cases.items():
        (tmp_path / "config.yaml").write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=message):
            parse_config([*before, str(tmp_path / "config.yaml")])


def test_what_options_hold_is_looked_at_as_files_are(path: Path, tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("train: [x]\ntrain: [y]\n")
    for value in (str(tmp_path / "data.yaml"), "{train: [x], train: [y]}"):
        with pytest.raises(ValueError, match="has 'train' twice"):
            parse_config([str(path), f"--data={value}"])
    with pytest.raises(ValueError, match="has 'out' twice"):
        parse_config([f"--config={YAML}out: runs/b"])
    assert parse_config([str(path), "--data.train=*.jsonl"])[0].data.train == "*.jsonl"  # a glob, no alias


def test_what_is_said_of_a_changed_setting_is_of_one_that_exists() -> None:
    for group in (changes.SILENT, changes.NO_GRADIENT, changes.SCHEDULE, changes.LENGTH):
        for start in group:
            assert any(name.startswith(start) for name in keys()), start
