"""`seqbraid chat`: the stock model's answers, in a terminal that obeys nothing of what a model says."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import re
import runpy
import select
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqbraid as sb
from seqbraid.cli import main
from seqbraid.data.tiny import tiny_training_model
from seqbraid.train.after.chat import Attachments, Chat, ChatOptions
from seqbraid.train.after.load import load_usable
from seqbraid.train.after.terminal import HELP
from seqbraid.train.export import export
from tests.helpers.ranks import errors, run
from tests.helpers.runs import config, train

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GREEDY = ["--temperature", "0", "--max-new-tokens", "9"]


@pytest.fixture(scope="module")
def run_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "talks"
    train(config(folder, out, train={"steps": 6, "lr": 1e-2}, evaluated=True))
    return out


@pytest.fixture(scope="module")
def exported(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "talks"
    assert main(["export", str(run_folder), "--out", str(out)]) == 0
    return out


def stock_answers(folder: Path, questions: list[str], system: str | None = None) -> list[str]:
    """By nothing but transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turns: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    answers = []
    for question in questions:
        turns.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        out = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=end)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
        turns.append({"role": "assistant", "content": answers[-1]})
    return answers


def said(arguments: list[str], lines: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is printed for lines that come through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert main(["chat", *arguments]) == 0
    shown: str = capsys.readouterr().out
    return shown.splitlines()


def test_a_run_and_its_export_answer_as_the_stock_model_does(
    run_folder: Path, exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = ["How many are 3 and 4?", "And the colour?"]
    wanted = stock_answers(exported, questions)
    again = stock_answers(exported, questions[1:])
    assert wanted[0] and wanted[1:] != again  # the second turn sees the first
    for place in (run_folder, exported):
        head, *shown = said([str(place), *GREEDY], [*questions, "/reset", questions[1]], capsys, monkeypatch)
        assert "Qwen3ForCausalLM" in head and "/reset" in head
        assert [line.strip() for line in shown if line.strip()] == [*wanted, "forgotten", *again]
    system = "Be brief."
    shown = said([str(exported), *GREEDY, "--system", system], questions[:1], capsys, monkeypatch)
    assert shown[1:] == stock_answers(exported, questions[:1], system)


def test_what_cannot_be_talked_to_is_refused(
    run_folder: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    picture = tmp_path / "a.png"
    Image.new("RGB", (40, 40)).save(picture)
    for arguments, message in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path)], "neither checkpoints (a run's folder) nor a config.json"),
        ([str(exported), "--checkpoint", "best"], "is not a run's folder"),
        ([str(run_folder), "--checkpoint", "3"], "has no checkpoint '3'; it has 6"),
        ([str(exported), "--image", str(picture)], "Qwen3ForCausalLM has no image encoder"),
        ([str(exported), "--audio", str(picture)], "Qwen3ForCausalLM has no audio encoder"),
        ([str(exported), "--temperature", "-1"], "temperature=-1.0 must be"),
        ([str(exported), "--max-new-tokens", "0"], "max_new_tokens=0 must be"),
    ):
        assert main(["chat", *arguments]) == 2
        assert message in capsys.readouterr().err, arguments
    harmed = tmp_path / "run"
    shutil.copytree(run_folder, harmed)
    weights = next((harmed / "checkpoints/step-00000006").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    for command in (["chat", str(harmed)], ["export", str(harmed), "--out", str(tmp_path / "out")]):
        assert main(command) == 2
        assert "does not match; give another one as --checkpoint; it has 6" in capsys.readouterr().err
    (harmed / "checkpoints/last").write_bytes(b"step-\xff9\n")
    assert main(["chat", str(harmed)]) == 2
    assert "which is not there; it has 6" in capsys.readouterr().err
    shown = said([str(exported), *GREEDY], [f"/image {picture}", "/what", "a" * 9000], capsys, monkeypatch)
    assert (
        "has no image encoder" in shown[1]
        and "/what is unknown" in shown[2]
        and "positions; /reset" in shown[3]
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["chat", str(exported)]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_pictures_and_sounds_go_with_a_message(tmp_path: Path) -> None:
    model, processor = tiny_training_model("qwen3_omni", 0)
    export(model, None, tmp_path / "omni", processor)
    for number, name in enumerate(("a.png", "b.png")):
        Image.effect_noise((64, 40 + 40 * number), 60).convert("RGB").save(tmp_path / name)
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(8000) / 5).astype(np.float32), 8000)
    usable = load_usable(tmp_path / "omni", None, CPU)
    chat = Chat(usable, ChatOptions(max_new_tokens=6, temperature=0))
    first = Attachments([chat.load_image(tmp_path / "a.png")], [chat.load_audio(tmp_path / "a.wav")])
    found = chat.ask("What?", first, lambda _: None)
    second = chat.ask("And this?", Attachments([chat.load_image(tmp_path / "b.png")]), lambda _: None)

    parts = [{"type": "image"}, {"type": "audio"}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": found}]
    turns.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]})
    images = [Image.open(tmp_path / name) for name in ("a.png", "b.png")]
    clip = np.interp(np.arange(16000) / 2, np.arange(8000), np.sin(np.arange(8000) / 5)).astype(np.float32)
    assert len(chat.clips[0]) == len(clip) and np.corrcoef(chat.clips[0][:-9], clip[:-9])[0, 1] > 0.99
    for number, answer in ((1, found), (3, second)):
        text = processor.apply_chat_template(turns[:number], tokenize=False, add_generation_prompt=True)
        seen = {"images": images[: (number + 1) // 2], "audio": chat.clips}
        inputs = processor(text=[text], **seen, return_tensors="pt")
        out = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=chat.ends)
        new = out[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(new, skip_special_tokens=True).strip() == answer


def commands(page: str) -> list[list[str]]:
    """The chats that a page shows."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = [line.removeprefix("$ seqbraid chat ") for line in lines if line.startswith("$ seqbraid chat ")]
    return [shlex.split(line, comments=True) for line in found]


def test_the_chats_in_the_docs_run(
    run_folder: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, processor = tiny_training_model("qwen3_vl")
    export(model, None, tmp_path / "vl", processor)
    (tmp_path / "examples" / "shapes" / "media").mkdir(parents=True)
    make_data = runpy.run_path(str(ROOT / "examples" / "make_data.py"))
    make_data["shapes"](tmp_path / "examples" / "shapes", "eval0", random.Random(0))
    places = {"out/run": run_folder, "out/exported": exported, "out/qwen3_vl": tmp_path / "vl"}
    places["out/examples/shapes"] = tmp_path / "examples" / "shapes"
    found = commands("README.md") + commands("docs/training.md")
    assert len(found) == 4
    for arguments in found:
        for shown, there in places.items():
            arguments = [re.sub(rf"^{shown}\b", str(there), argument) for argument in arguments]
        assert len(said([*arguments, "--max-new-tokens", "3"], ["Hello"], capsys, monkeypatch)) >= 2


class Terminal:
    """A process behind a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.shown = b""
        self.pid, self.file = pty.fork()
        if not self.pid:
            # Where the tests run in the background of a script, Ctrl-C is ignored by whatever they start.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            environment = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
            os.execve(sys.executable, [sys.executable, "-m", "seqbraid", *arguments], environment)

    def write(self, text: str) -> None:
        os.write(self.file, text.encode())

    def until(self, pattern: str, limit: float = 120.0) -> str:
        """What is shown up to a match, which is then behind us."""
        end = time.monotonic() + limit
        while not (found := re.search(pattern.encode(), self.shown)):
            ready = select.select([self.file], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"no {pattern!r} in {self.shown!r}"
            try:
                self.shown += os.read(self.file, 4096)
            except OSError:
                raise AssertionError(f"it ended without {pattern!r}: {self.shown!r}") from None
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before.decode()

    def left_by(self, key: str, limit: float = 60.0) -> int:
        """The exit status after a key, pressed again where it came before Python listened at the prompt."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            with suppress(OSError):
                self.write(key)
            for _ in range(400):  # a second one would end an interpreter that is on its way out
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it does not end")


def test_a_terminal_shows_escapes_streams_and_is_left_by_ctrl_c(exported: Path, tmp_path: Path) -> None:
    """The model is made to say nothing but escapes, by its own generation config."""
    folder = tmp_path / "shouts"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    (escape,) = tokenizer("\x1b")["input_ids"]
    assert tokenizer.decode([escape]) == "\x1b"
    folder.mkdir()
    for file in exported.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["sequence_bias"] = [[[escape], 1e4]]
    (folder / "generation_config.json").write_text(json.dumps(settings))

    terminal = Terminal("chat", str(folder), "--temperature", "0", "--max-new-tokens", "400")
    # Broken between words: the terminal would break at its last column.
    first, *more = terminal.until(r"ends\r\n> ").partition("shouts: ")[2].splitlines()[:-1]
    head = ["shouts: " + first, *more]
    assert max(map(len, head)) <= 80 and " ".join(map(str.strip, head)).endswith(HELP)
    terminal.write("hello\n")
    shown = terminal.until(r"(\\x1b){20}")
    assert "hello" in shown and "\x1b" not in shown.replace("\x1b[?2004", "")  # readline's own
    terminal.write("\x03")
    rest = terminal.until(" …\r\n> ")  # the answer is cut, and the conversation goes on
    assert rest.count("\\x1b") < 370
    terminal.write("/reset\n")
    terminal.until("forgotten\r\n> ")
    assert terminal.left_by("\x03") == 0 and b"Traceback" not in terminal.shown


def test_generate_of_a_parallelized_model_is_the_stock_ones_and_saves_its_tokenizer(tmp_path: Path) -> None:
    (ids,) = run(_generate_alone, 1, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("What is it?")["input_ids"] == ids
    for error in errors(_generate_on_two, 2):
        assert error.kind == "ValueError" and "this model is shared by 2; save it" in error.message


def _generate_alone(folder: Path) -> list[int]:
    """Before a step and after one; a sharded model of one rank computes in 16 bits."""
    model, tokenizer = tiny_training_model("qwen3", 0)
    ids = tokenizer("What is it?", return_tensors="pt")["input_ids"]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model.bfloat16().eval().generate(ids, **asked)
    model = tiny_training_model("qwen3", 0)[0].train()
    braided = sb.parallelize(model, compute_dtype=torch.bfloat16)
    assert braided.config is model.config
    for _ in range(2):
        assert torch.equal(braided.generate(ids, **asked), wanted) and model.training
        braided(sb.pack([{"input_ids": ids[0]}], braided.config)).loss.backward()
    braided.save_pretrained(folder, tokenizer=tokenizer)
    return ids[0].tolist()


def _generate_on_two() -> None:
    model = sb.parallelize(tiny_training_model("qwen3", 0)[0], sb.Mesh(ring=2))
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
