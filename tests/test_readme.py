"""The README's examples run as they stand, over ranks, and give what it says they give."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import seqbraid
from seqbraid import Mesh
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.tiny.samples import random_samples
from tests.helpers.ranks import run

README = Path(__file__).parent.parent / "README.md"
LENGTHS = (5, 70, 3, 41)


def examples() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    found = [example for example in found if "integrations" not in example]  # tests/integrations has those
    assert len(found) == 3
    return found


def samples() -> list[dict[str, Any]]:
    """With a field that only a loss of one's own reads."""
    found = random_samples(LENGTHS, 97)
    for sample in found:
        sample["fields"] = {"advantages": torch.linspace(-1, 2, len(sample["input_ids"]))}
    return found


def num_labels() -> int:
    return sum(int((sample["labels"][1:] != -100).sum()) for sample in samples())


def on_a_rank(folder: str) -> tuple[float, float, float, dict[str, torch.Tensor]]:
    model, tokenizer = tiny_training_model("qwen3_5_text", seed=0)
    first, second, third = (example.replace('"out/"', repr(folder)) for example in examples())
    scope: dict[str, Any] = {"hf_model": model, "samples": samples(), "tokenizer": tokenizer}
    exec(first, scope)
    own, mean_loss = scope["model"], scope["out"].mean_loss.item()
    assert scope["out"].label_tokens == num_labels()  # no sample was given to two data ranks
    gradients = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in own.model.named_parameters()
    }
    scope["micro_batches"] = [[sample] for sample in scope["mine"]]
    exec(second, scope)
    assert scope["out"].label_tokens == num_labels()
    of_micro_batches = scope["out"].mean_loss.item()
    exec(third, scope)
    return mean_loss, of_micro_batches, scope["out"].mean_loss.item(), gradients


def alone() -> tuple[float, float, dict[str, torch.Tensor]]:
    """The stock model on each sample alone: its loss with gradients, and the loss of the third example."""
    model, _ = tiny_training_model("qwen3_5_text", seed=0)
    count, total, gained = num_labels(), 0.0, 0.0
    for sample in samples():
        logits = model(input_ids=sample["input_ids"][None], use_cache=False).logits[0]
        losses = cross_entropy(logits[:-1], sample["labels"][1:], ignore_index=-100, reduction="none")
        gained += float((losses.detach() * sample["fields"]["advantages"][1:]).sum()) / len(LENGTHS)
        loss = losses.sum() / count
        loss.backward()
        total += loss.item()
    return total, gained, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_examples_give_the_loss_and_gradients_of_the_stock_model(tmp_path: Path) -> None:
    loss, gained, wanted = alone()
    for mean_loss, of_micro_batches, own_loss, gradients in run(on_a_rank, 8, str(tmp_path)):
        assert abs(mean_loss - loss) < 1e-5 * loss
        assert abs(of_micro_batches - loss) < 1e-5 * loss
        assert abs(own_loss - gained) < 1e-5 * abs(gained)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).norm() < 1e-3 * wanted[name].norm(), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3_5_text"
    assert AutoTokenizer.from_pretrained(tmp_path)("What is it?")["input_ids"]


def test_one_process_takes_the_example_with_another_mesh(tmp_path: Path) -> None:
    first = examples()[0].replace("sb.Mesh(dp_shard=-1, ring=2, ulysses=2)", "sb.Mesh()")
    model, tokenizer = tiny_training_model("qwen3_5_text", seed=0)
    scope: dict[str, Any] = {"hf_model": model, "samples": samples(), "tokenizer": tokenizer}
    exec(first.replace('"out/"', repr(str(tmp_path))), scope)
    assert scope["mesh"] == Mesh()
    assert abs(scope["out"].mean_loss.item() - alone()[0]) < 1e-5


def test_links_and_anchors_lead_somewhere() -> None:
    root = README.parent
    for page in (README, root / "CONTRIBUTING.md", root / "CHANGELOG.md", *root.glob("docs/*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)", text):
            file = page if not target else page.parent / target
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {"#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in anchors, f"{page.name}: {target}{anchor}"


def test_every_page_is_found_from_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    pages = [page.name for page in (README.parent / "docs").glob("*.md")]
    assert len(pages) > 15 and not [name for name in pages if f"(docs/{name}" not in text]


def test_the_version_is_the_newest_of_the_changelog() -> None:
    versions = re.findall(
        r"^## (.*)$", (README.parent / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert versions[:2] == ["Unreleased", seqbraid.__version__]
    with (README.parent / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == seqbraid.__version__


def test_the_map_names_files_that_exist() -> None:
    root = README.parent
    files = [path.as_posix() for path in (*root.glob("seqbraid/**/*.py"), *root.glob("tests/**/*.py"))]
    map_of_rooms = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = runpy.run_path(str(root / "docs" / "pictures.py"))["STEPS"]
    named = {name for _, rooms, *_ in steps for name in rooms.split(", ") if name.endswith(".py")}
    named |= set(re.findall(r"`([\w/]+\.py)`", map_of_rooms))
    assert len(named) > 40
    for name in sorted(named):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_the_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    runpy.run_path(str(README.parent / "docs" / "pictures.py"))["main"](tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["data_path.svg", "overview.svg"]
    for name in drawn:
        assert (tmp_path / name).read_bytes() == (README.parent / "docs" / name).read_bytes(), name
