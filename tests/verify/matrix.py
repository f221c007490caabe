"""Random tiny models of every family against stock, and every defect on every one of them.

    python -m tests.verify.matrix --models 20 --seeds 5

Each case is one line of the state file; a run that is started again goes on behind the last one. Ends with
status 1 if a healthy model does not hold or a defect is not caught.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from seqbraid import Mesh
from seqbraid.models.router import stock_num_experts
from seqbraid.verify.media_mutants import MEDIA_MUTANTS
from seqbraid.verify.mutants import MUTANTS, RANK_MUTANTS, Mutant
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from seqbraid.verify.run import PADDED
from seqbraid.verify.tensor_mutants import TENSOR_MUTANTS
from tests.helpers import ranks
from tests.verify.random_models import MEDIA, NAMES, random_model


@dataclass(frozen=True)
class Case:
    """One model, its weights and samples, on one mesh."""

    family: str
    model: int
    seed: int
    mesh: dict[str, int] = field(default_factory=dict)
    """Axes of `Mesh` that are more than 1; one process without."""

    @property
    def world_size(self) -> int:
        """How many ranks the case takes."""
        return math.prod(size for axis, size in self.mesh.items() if axis != "ep")

    @property
    def key(self) -> str:
        """What it is called in the state file."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{self.family}/{self.model}/{self.seed}" + (f"/{mesh}" if mesh else "")


@dataclass(frozen=True)
class Found:
    """What a case gave: its verdict, and of every defect that it can have how it was caught."""

    key: str
    holds: bool
    dtype: str
    reason: str
    ratio: float
    seconds: float
    mutants: dict[str, str | float] = field(default_factory=dict)
    """By name: the error in floors, or what was refused; `MISSED` where the check holds all the same."""

    @property
    def is_right(self) -> bool:
        """Whether the healthy model holds and every defect was caught."""
        return self.holds and MISSED not in self.mutants.values()


MISSED = "not caught"
WINDOWED = ("gemma3", "gpt_oss")
"""Families with sliding windows: a ring that cuts a longer sample refuses them."""


def mutants_of(model: Any, case: Case) -> list[Mutant]:
    """The defects that this model on this mesh can have."""
    if case.world_size > 1:
        known = [m for m in (*RANK_MUTANTS, *TENSOR_MUTANTS, *MEDIA_MUTANTS) if m.mesh == case.mesh]
    else:
        known = [m for m in (*MUTANTS, *MEDIA_MUTANTS) if m.world_size == 1 and m.check != "blocks"]
    return [m for m in known if _can_have(model.config, case.family, m)]


def _can_have(config: Any, family: str, mutant: Mutant) -> bool:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    has = {
        "gpt2": family == "gpt2",
        "gpt_oss": family == "gpt_oss",
        "qwen3_5": "linear_attention" in kinds,
        "gemma3": "sliding_attention" in kinds,
        "qwen3_moe": bool(getattr(text, "output_router_logits", False)) and _chooses(text),
        "qwen3_vl": family in MEDIA,
        "llama": True,
        "qwen3": family == "qwen3" and bool(text.tie_word_embeddings),
    }
    if mutant.name == "KV gradient not summed over tp":
        return bool(text.num_key_value_heads % mutant.tp)
    if mutant.name == "DeepStack rows not re-indexed":
        return family in MEDIA and bool(getattr(config.vision_config, "deepstack_visual_indexes", None))
    return has[mutant.check]


def _chooses(text: Any) -> bool:
    """Where every token goes to all experts, the routers' loss is a constant."""
    counts = (getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
    return any(text.num_experts_per_tok < count for count in counts if count is not None)


def examine(case: Case) -> Found:
    """On one rank: the verdict on the healthy model, and on each defect."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = perf_counter()
    mesh = Mesh(**case.mesh)
    model, samples = random_model(case.family, case.model, case.seed)
    references = stock_references(model, samples, rows_of(len(samples), mesh.data_world_size))
    total = sum(len(sample["input_ids"]) for sample in samples)
    # So much padding that counting it is no matter of rounding, also where routers weigh little.
    how: dict[str, Any] = {"pad_to": (total // PADDED + 2) * PADDED, "references": references}
    if case.mesh:  # so that sequences are cut, and states are passed on
        how |= {"policy": "zigzag", "gated_delta": "states"}
    parity = check_parity(model, samples, mesh, case.key, **how)
    caught: dict[str, str | float] = {}
    for mutant in mutants_of(model, case):
        with mutant.switched_on():
            try:
                mutated = check_parity(model, samples, mesh, case.key, **how)
            except ValueError as error:
                caught[mutant.name] = str(error)[:80]
            else:
                caught[mutant.name] = MISSED if mutated.holds else mutated.worst.ratio
    seconds = round(perf_counter() - begin, 2)
    return Found(case.key, parity.holds, parity.dtype, parity.reason, parity.worst.ratio, seconds, caught)


def run(case: Case) -> Found:
    """Here, or on ranks that must agree; an error of the library is a failure of the case."""
    try:
        if case.world_size == 1:
            return examine(case)
        every = ranks.run(examine, case.world_size, case, limit=600.0)
        verdicts = {(found.holds, found.reason, repr(found.mutants)) for found in every}
        if len(verdicts) > 1:
            return Found(case.key, False, "", f"ranks differ: {sorted(verdicts)}", math.nan, 0.0)
        return every[0]
    except Exception as error:
        return Found(case.key, False, "", f"{type(error).__name__}: {error}"[-600:], math.nan, 0.0)


def cases(
    families: Sequence[str], models: int, seeds: int, meshes: Sequence[dict[str, int]]
) -> Iterator[Case]:
    """All families' first models with their first weights first."""
    for seed in range(seeds):
        for model in range(models):
            for family in families:
                for mesh in meshes:
                    case = Case(family, model, seed, mesh)
                    if not (family in WINDOWED and "ring" in mesh) and _shares_experts(case):
                        yield case


def _shares_experts(case: Case) -> bool:
    """Whether `ep` divides the experts; else the model is refused."""
    ep = case.mesh.get("ep", 1)
    if ep == 1:
        return True
    config = random_model(case.family, case.model, case.seed)[0].config.get_text_config()
    return (stock_num_experts(config) or 1) % ep == 0


def read_state(path: Path) -> dict[str, Found]:
    """What was found before; lines that were cut off are not."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found.key: found for found in (Found(**json.loads(line)) for line in lines if line.endswith("}"))}


def go_on(wanted: Iterable[Case], path: Path) -> list[Found]:
    """Run what the state file does not have, line by line."""
    known = read_state(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    all_found = []
    with path.open("a", encoding="utf-8") as state:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            state.write("\n")  # behind a line that was cut off
        for case in wanted:
            found = known.get(case.key)
            if found is None:
                found = run(case)
                state.write(json.dumps(asdict(found)) + "\n")
                state.flush()
            all_found.append(found)
    return all_found


def print_table(all_found: Sequence[Found]) -> None:
    """Per family and mesh: how many hold, in which format, and how far off defects were at the least."""
    groups = defaultdict(list)
    for found in all_found:
        family, _, _, *mesh = found.key.split("/")
        groups[family, *mesh].append(found)
    table = Table(title="random tiny models against stock, and with defects", title_justify="left")
    for name in (
        "family",
        "models",
        "hold",
        "in float64",
        "worst error / floor",
        "defects",
        "caught",
        "least",
    ):
        table.add_column(name, justify="left" if name == "family" else "right", no_wrap=name == "family")
    for group, members in groups.items():
        defects = [value for found in members for value in found.mutants.values()]
        ratios = [found.ratio for found in members if found.holds]
        far = [value for value in defects if not isinstance(value, str)]
        table.add_row(
            " ".join(group),
            str(len(members)),
            str(sum(found.holds for found in members)),
            str(sum(found.dtype == "float64" for found in members)),
            f"{max(ratios, default=math.nan):.2f}",
            str(len(defects)),
            str(len(defects) - defects.count(MISSED)),
            f"{min(far, default=math.nan):.1e}",
        )
    console = Console()
    console.print(table)
    for found in all_found:
        if not found.is_right:
            missed = [name for name, value in found.mutants.items() if value == MISSED]
            console.print(f"[bold red]{found.key}[/]: {found.reason}; not caught: {missed}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=NAMES, choices=NAMES, metavar="FAMILY")
    parser.add_argument("--models", type=int, default=20, help="random models of each family")
    parser.add_argument("--seeds", type=int, default=5, help="random weights and samples of each model")
    parser.add_argument(
        "--mesh", nargs="*", default=[""], help="none, or for instance ring=2 ring=4,ulysses=2"
    )
    parser.add_argument("--state", type=Path, default=Path("out/matrix.jsonl"))
    args = parser.parse_args(arguments)
    meshes = [{axis: int(size) for axis, size in _pairs(mesh)} for mesh in args.mesh]
    all_found = go_on(cases(args.families, args.models, args.seeds, meshes), args.state)
    print_table(all_found)
    right = sum(found.is_right for found in all_found)
    print(f"{right} of {len(all_found)} cases are right")
    return 0 if right == len(all_found) else 1


def _pairs(mesh: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, mesh.split(",")):
        axis, _, size = part.partition("=")
        yield axis, size


if __name__ == "__main__":
    sys.exit(main())
