"""Random tiny models of every family against stock, and every defect on every one of them.

    python -m tests.verify.matrix --models 20 --seeds 5
    python -m tests.verify.matrix --models 2 --seeds 1 --mesh shared stages --docs docs/matrix.md

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
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from seqbraid import Mesh
from seqbraid.layout.labels import IGNORE
from seqbraid.plan.pipeline import PipelineOptions
from seqbraid.verify.media_mutants import MEDIA_MUTANTS
from seqbraid.verify.mtp_mutants import MTP_MUTANTS
from seqbraid.verify.mutants import MUTANTS, RANK_MUTANTS, Mutant
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from seqbraid.verify.pipeline_mutants import PIPELINE_MUTANTS
from seqbraid.verify.reference import Measurement
from seqbraid.verify.run import PADDED
from seqbraid.verify.tensor_mutants import TENSOR_MUTANTS
from tests.helpers import ranks
from tests.verify.matrix_page import write_page
from tests.verify.random_models import MEDIA, MTP, NAMES, WITH_EXPERTS, WITH_LATENTS, random_model


@dataclass(frozen=True)
class Case:
    """One model, its weights and samples, on one mesh."""

    family: str
    model: int
    seed: int
    mesh: dict[str, int] = field(default_factory=dict)
    """Axes of `Mesh` that are more than 1; one process without. `stages`, where each rank has several."""

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh alone."""
        return {axis: size for axis, size in self.mesh.items() if axis != "stages"}

    @property
    def world_size(self) -> int:
        """How many ranks the case takes."""
        return math.prod(size for axis, size in self.axes.items() if axis != "ep")

    @property
    def num_stages(self) -> int:
        """Of the pipeline."""
        return self.mesh.get("stages", self.mesh.get("pp", 1))

    @property
    def pipeline(self) -> PipelineOptions | None:
        """Interleaved where each rank has several stages."""
        each = self.num_stages // self.mesh.get("pp", 1)
        return PipelineOptions("interleaved", stages_per_rank=each) if each > 1 else None

    @property
    def is_shared(self) -> bool:
        """Whether ranks share the model's matrices, experts or layers."""
        return not {"tp", "ep", "pp"}.isdisjoint(self.mesh)

    @property
    def model_and_samples(self) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
        """Made anew, alike on every rank."""
        return random_model(self.family, self.model, self.seed, self.is_shared, self.num_stages)

    @property
    def micro_batches(self) -> int:
        """Of a step: every second model has three where it is shared; pipeline stages have 4 or 7."""
        if "pp" in self.mesh:
            return 7 if self.model % 2 else 4
        return 3 if self.is_shared and self.model % 2 else 1

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

NOT_CUT = ("gpt2", *WITH_LATENTS)
"""Families that tp refuses."""

NOT_STAGED = ("gpt2",)
"""Families that pp refuses: positions are added to embeddings in the decoder."""

MESHES = (
    *({"tp": 2}, {"tp": 4}),
    *({"ring": 2, "tp": 2}, {"ulysses": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}),
    *({"dp_shard": 2, "ring": 2, "tp": 2}, {"dp_shard": 2, "ulysses": 2, "tp": 2}),
    {"ring": 2, "ulysses": 2, "tp": 2},
    *({axis: size, "ep": size} for size in (2, 4) for axis in ("dp_shard", "ring", "ulysses", "tp")),
    *({"dp_shard": 2, "tp": 2, "ep": 2}, {"ring": 2, "ulysses": 2, "ep": 4}, {"ring": 2, "tp": 2, "ep": 4}),
)
"""What `--mesh shared` stands for: tp and ep alone and beside the other axes."""

STAGES = (
    *({"pp": 2}, {"pp": 2, "stages": 4}, {"pp": 4}),
    *({"pp": 2, axis: 2} for axis in ("ring", "ulysses", "tp", "dp_shard", "dp_replicate")),
    {"pp": 2, "ring": 2, "stages": 4},
    *({"pp": 2, "dp_shard": 2, "ring": 2, "ep": 2}, {"pp": 2, "ring": 2, "tp": 2}, {"pp": 2, "ulysses": 4}),
)
"""What `--mesh stages` stands for: pipeline stages alone and beside the other axes."""


def mutants_of(model: Any, case: Case) -> list[Mutant]:
    """The defects that this model on this mesh can have."""
    if case.world_size > 1:
        every = (*RANK_MUTANTS, *TENSOR_MUTANTS, *MEDIA_MUTANTS, *PIPELINE_MUTANTS, *MTP_MUTANTS)
        known = [m for m in every if m.mesh == case.mesh]
    else:
        every = (*MUTANTS, *MEDIA_MUTANTS, *MTP_MUTANTS)
        known = [m for m in every if m.world_size == 1 and m.check != "blocks"]
    return [m for m in known if _can_have(model.config, case.family, m)]


def _can_have(config: Any, family: str, mutant: Mutant) -> bool:
    if mutant in MTP_MUTANTS:
        return family in MTP and (MTP[family] in MEDIA or "media" not in mutant.check)
    family = MTP.get(family, family)
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
    if mutant.name == "router loss per stage" and getattr(text, "mlp_only_layers", None):
        return False  # a stage may have no routers
    if mutant.name in (
        "the routers' loss of each rank alone",
        "router loss per stage",
    ):  # where it weighs enough to be seen
        return has[mutant.check] and text.router_aux_loss_coef > 0.01
    if mutant.name in ("DeepStack rows not re-indexed", "a DeepStack layer on the second stage"):
        levels = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
        return family in MEDIA and len(levels) > ("second stage" in mutant.name)
    return has[mutant.check]


def _chooses(text: Any) -> bool:
    """Where every token goes to all experts, the routers' loss is a constant."""
    counts = (getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
    return any(text.num_experts_per_tok < count for count in counts if count is not None)


def references(case: Case, folder: Path) -> Path:
    """What stock makes of a case, for all ranks; meshes with the same rows share it."""
    model, samples = case.model_and_samples
    data = case.mesh.get("dp_shard", 1) * case.mesh.get("dp_replicate", 1)
    samples = list(islice(cycle(samples), max(len(samples), data * case.micro_batches)))
    rows = rows_of(len(samples), data, case.micro_batches)
    assert len(rows) == data * case.micro_batches
    for i in rows[1] if "pp" in case.mesh else ():  # a micro-batch without a label
        samples[i] = samples[i] | {"labels": torch.full((len(samples[i]["input_ids"]),), IGNORE)}
    shape = f"{case.is_shared}-{case.num_stages}-{data}-{case.micro_batches}"
    path = folder / f"{case.family}-{case.model}-{case.seed}-{shape}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((samples, rows, stock_references(model, samples, rows)), path)
    return path


def examine(case: Case, path: Path) -> Found:
    """On one rank: the verdict on the healthy model, and on each defect."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = perf_counter()
    mesh = Mesh(**case.axes)
    model, _ = case.model_and_samples
    found: tuple[list[dict[str, Any]], list[list[int]], list[Measurement]]
    found = torch.load(path, weights_only=False)
    samples, rows, expected = found
    longest = max(sum(len(samples[i]["input_ids"]) for i in row) for row in rows)
    # So much padding that counting it is no matter of rounding, also where routers weigh little.
    how: dict[str, Any] = {"pad_to": (longest // PADDED + 2) * PADDED, "references": expected}
    how |= {"micro_batches": case.micro_batches, "pipeline": case.pipeline}
    if mesh.sequence_size > 1:  # so that sequences are cut, and states are passed on
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


def run(case: Case, folder: Path) -> Found:
    """Here, or on ranks that must agree; an error of the library is a failure of the case."""
    try:
        path = references(case, folder)
        if case.world_size == 1:
            return examine(case, path)
        every = ranks.run(examine, case.world_size, case, path, limit=1200.0)
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
                    if _is_possible(case):
                        yield case


def _is_possible(case: Case) -> bool:
    """Whether the library takes this family on this mesh."""
    family = MTP.get(case.family, case.family)
    if family in WINDOWED and "ring" in case.mesh:
        return False
    if family in NOT_CUT and "tp" in case.mesh:
        return False
    if "pp" in case.mesh and family in NOT_STAGED:
        return False
    return "ep" not in case.mesh or MEDIA.get(family, family) in WITH_EXPERTS


def read_state(path: Path) -> dict[str, Found]:
    """What was found before; lines that were cut off are not."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found.key: found for found in (Found(**json.loads(line)) for line in lines if line.endswith("}"))}


def go_on(wanted: Iterable[Case], path: Path) -> list[Found]:
    """Run what the state file does not have, line by line."""
    known = read_state(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    all_found = []
    with path.open("a", encoding="utf-8") as state, TemporaryDirectory() as folder:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            state.write("\n")  # behind a line that was cut off
        for case in wanted:
            found = known.get(case.key)
            if found is None:
                found = run(case, Path(folder))
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
        "--mesh", nargs="*", default=[""], help="none; ring=2 ring=4,ulysses=2, …; shared; stages"
    )
    parser.add_argument("--docs", type=Path, help="the page whose table is written anew")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--state", type=Path, default=Path("out/matrix.jsonl"))
    args = parser.parse_args(arguments)
    meshes: list[dict[str, int]] = []
    for mesh in args.mesh:
        named = {"shared": MESHES, "stages": STAGES}
        meshes += named[mesh] if mesh in named else [{axis: int(size) for axis, size in _pairs(mesh)}]
    wanted = list(cases(args.families, args.models, args.seeds, meshes))
    end = perf_counter() + 60 * args.minutes
    known = read_state(args.state)
    in_time = (case for case in wanted if case.key in known or perf_counter() < end)
    all_found = go_on(in_time, args.state)
    print_table(all_found)
    if args.docs:
        write_page(
            args.docs, [asdict(found) | {"is_right": found.is_right} for found in all_found], len(wanted)
        )
    right = sum(found.is_right for found in all_found)
    print(f"{right} of {len(all_found)} cases are right")
    return 0 if right == len(all_found) else 1


def _pairs(mesh: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, mesh.split(",")):
        axis, _, size = part.partition("=")
        yield axis, size


if __name__ == "__main__":
    sys.exit(main())
