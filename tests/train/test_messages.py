"""What the command line says of a run that is finished, of one that was, and of an export."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seqbraid.cli import main
from seqbraid.data.tiny import tiny_training_model
from seqbraid.train.config import DataConfig, LogConfig, MeshConfig, StepConfig, TrainConfig
from seqbraid.train.config_file import to_yaml
from seqbraid.train.log import read_log
from seqbraid.train.setup import check_launcher
from tests.data.chat.test_chat import QWEN3
from tests.helpers import ranks
from tests.helpers.runs import train
from tests.train.test_run_export import config, examples  # noqa: F401


def test_a_run_says_how_it_ended_and_that_it_was_finished(
    examples: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config(examples, out, "tiny:qwen3")))
    assert main(["train", str(path)]) == 0
    said = capfd.readouterr().err
    assert "finished after step 2; the last checkpoint is step-00000002" in said
    assert f"seqbraid export {out} --out DIR" in said and "already finished" not in said
    assert re.search(r"\nloss \d+\.\d{4}, \d:\d\d:\d\d in all\n", said)
    assert f"checkpoint: {out / 'checkpoints' / 'step-00000002'}\n" in said
    assert "loading the model tiny:qwen3" in said
    with monkeypatch.context() as on_a_terminal:
        on_a_terminal.setenv("FORCE_COLOR", "1")
        assert main(["train", str(path)]) == 0
    said = capfd.readouterr().err
    assert "It was already finished: nothing was trained" in said
    assert said.index("preparing the samples of step 3") < said.index("━"), "no line within the bar"
    assert main(["export", str(out), "--out", str(tmp_path / "model")]) == 0
    printed = capfd.readouterr().out
    assert f"wrote {tmp_path / 'model'}: " in printed and "float32, in 1 file\n" in printed
    assert main(["train", str(path), "--dry-run", "--log.sinks=wandbb"]) == 2
    assert "unknown sink 'wandbb'" in capfd.readouterr().err


@pytest.mark.parametrize("sink", ["wandb", "mlflow", "trackio"])
def test_a_sink_without_its_package_is_refused_before_anything_is_made(
    sink: str,
    examples: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, sink, None)  # as where it is not installed
    settings = replace(config(examples, tmp_path / "run", "tiny:qwen3"), log=LogConfig(sinks=sink))
    (tmp_path / "run.yaml").write_text(to_yaml(settings))
    for more in ([], ["--dry-run"]):
        assert main(["train", str(tmp_path / "run.yaml"), *more]) == 2
        (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqbraid")]
        assert f"the sink {sink!r} needs its package" in said
        assert said.endswith(f"pip install 'seqbraid[{sink}]'") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"RANK": "1"}, "has RANK='1' but no WORLD_SIZE; start with torchrun"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE='2' but no RANK; start with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0 to WORLD_SIZE"),
        ({"RANK": "", "WORLD_SIZE": "two"}, "not whole numbers"),
    ],
)
def test_half_of_what_a_launcher_sets_is_refused_in_one_line(
    known: dict[str, str],
    message: str,
    examples: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    settings = config(examples, tmp_path / "run", "tiny:qwen3", mesh=MeshConfig(dp_shard=-1))
    (tmp_path / "run.yaml").write_text(to_yaml(settings))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqbraid")]
    assert said.startswith("seqbraid train: the environment has ") and message in said
    assert not (tmp_path / "run").exists()


def test_processes_that_know_nothing_of_each_other_are_refused() -> None:
    for name, what in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")):
        with pytest.raises(ValueError, match=rf"{what} has started 8 processes \({name}=8\), .* torchrun"):
            check_launcher({name: "8"})
        check_launcher({name: "8", "RANK": "3", "WORLD_SIZE": "8"})  # of a torchrun that srun has started
        check_launcher({name: "1"})


def test_reasoning_that_the_template_leaves_out_is_said_once_with_a_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On any mesh, by a dry run too; tokenizers of Qwen3 keep what is behind the last question alone."""
    model, tokenizer = tiny_training_model("qwen3")
    tokenizer.chat_template = QWEN3
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    first, second = ({"role": "user", "content": f"Which is {n}?"} for n in (1, 2))
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThis."}
    records = [{"messages": [first, thought, second, thought]} for _ in range(5)]
    records += [{"messages": [first, thought]}] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = TrainConfig(
        model=str(tmp_path / "model"), out=str(tmp_path / "alone"), precision="float32",
        log=LogConfig(sinks=[]),
        data=DataConfig(train=str(tmp_path / "data.jsonl"), row_tokens=128, workers=0),
        train=StepConfig(steps=3, batch_tokens=256),
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(to_yaml(settings))
    for more, times in ([], 1), (["--dry-run"], 1):
        assert main(["train", str(tmp_path / "run.yaml"), *more]) == 0
        said = " ".join("".join(capfd.readouterr()).split())
        assert said.count("leaves out the reasoning of 5 assistant turns") == times
        assert more or "5 assistant turns were read without their reasoning" in said
    for axis in ("ring", "dp_shard"):
        many = replace(settings, out=str(tmp_path / axis), mesh=MeshConfig(**{axis: 2}))
        ranks.run(train, 2, many)
        events = [r for r in read_log(Path(many.out) / "log.jsonl") if r.get("event") == "reasoning left out"]
        assert [event["turns"] for event in events] == [5]
