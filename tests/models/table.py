"""What holds for every causal language model type of transformers: `python -m tests.models.table`.

Each type is made tiny and run as a packed row in one process, with ring=2 and with ulysses=2, against the
stock model on each sample alone. What was found is kept in a file, and not looked for again; `--docs` writes
the table of docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers import ranks
from tests.models.tiny_types import OFTEN, VOCABULARY, has_window, tiny_type_config, tiny_type_model, variants

EXACT, REFUSED, WRONG, FAILED, NO_CONFIG = "exact", "refused", "wrong", "failed", "not tried"

LONG = (37, 1, 70, 12, 5)
"""Tokens of samples: two of them longer than the windows of tiny models, and one of a single token."""
SHORT = (9, 1, 16, 12, 5)
"""No sample longer than those windows: what a ring may cut in windowed layers."""

CASES: dict[str, tuple[dict[str, int], str]] = {
    "packed": ({}, "balanced"),
    "ring": ({"ring": 2}, "zigzag"),  # which cuts every sample
    "ulysses": ({"ulysses": 2}, "balanced"),
    "tp": ({"tp": 2}, "balanced"),
}
ALL_MUST = ("packed", "ring", "ulysses")
"""The cases without which a type is not called exact; of `tp` the table says apart whether it is."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest error of a gradient, over its size. Float64 models have parts that stay in float32."""
STOCK_RULE_TOLERANCE = 2e-3
"""The stock gated delta rule computes in float32, in which some of its gradients are small sums
of large terms."""
NEGLIGIBLE = 1e-6
"""A gradient that is zero in exact arithmetic is noise: it is held against this share of all gradients."""


@dataclass(frozen=True)
class Outcome:
    """How one case of a type ended."""

    status: str
    detail: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Line:
    """What the table says of a type."""

    model_type: str
    class_name: str
    status: str
    detail: str = ""
    error: float = 0.0
    dtype: str = ""
    windowed: bool = False
    variants: dict[str, tuple[str, str]] = field(default_factory=dict)
    """How the type ends with a switch of its config set: status and detail."""
    tensor: tuple[str, str] = ("", "")
    """How it ends with tp=2, if it is exact without."""


def run_case(
    model_type: str, variant: str, case: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> Outcome:
    """One step of a type on this rank's mesh, against the stock model."""
    import transformers

    import seqbraid as sb

    transformers.logging.set_verbosity_error()
    axes, policy = CASES[case]
    mesh = sb.Mesh(**axes)
    changes = variants(model_type)[variant]
    try:
        stock: Any = tiny_type_model(model_type, dtype, **changes)
        braided_stock: Any = tiny_type_model(model_type, dtype, **changes)
    except Exception as error:
        return Outcome(NO_CONFIG, f"transformers cannot build it: {_words(error)}")
    samples = _samples(lengths)
    try:
        model = sb.parallelize(braided_stock, mesh)
        output = model(sb.pack(samples, braided_stock.config, mesh, policy=policy))
        output.loss.backward()
        found = {name: _whole(p) for name, p in braided_stock.named_parameters()}
    except ValueError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(FAILED, _words(error))
    if mesh.rank:
        return Outcome(EXACT)
    try:
        loss, expected = _stock_step(stock, samples)
    except Exception as error:
        return Outcome(NO_CONFIG, f"the stock model fails: {_words(error)}")
    if output.aux_loss is not None:
        coefficient = stock.config.get_text_config().router_aux_loss_coef
        output = replace(output, mean_loss=output.mean_loss + coefficient * output.aux_loss)
    name, off = _worst(float(output.mean_loss), loss, found, expected)
    allowed = STOCK_RULE_TOLERANCE if _has_gated_delta(stock) else TOLERANCE[dtype]
    return Outcome(EXACT if off <= allowed else WRONG, name, off)


def _samples(lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths:
        # The last ids may stand for an image or a clip.
        ids = torch.randint(3, VOCABULARY - 5, (length,), generator=generator)
        labels = ids.where(torch.rand(length, generator=generator) < 0.8, -100)
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def _stock_step(model: Any, samples: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """As a user of transformers would: each sample alone, token losses summed, divided once. The loss of
    routers is the stock function's on the whole row.
    """
    from seqbraid.models.stock import in_torch

    config = model.config.get_text_config()
    with_router = bool(getattr(config, "output_router_logits", False))
    extra = {"output_router_logits": True} if with_router else {}
    count = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    losses, routers = [], []
    for sample in samples:
        with in_torch(model):
            outputs = model(input_ids=sample["input_ids"][None], use_cache=False, **extra)
        losses.append(
            torch.nn.functional.cross_entropy(
                outputs.logits[0, :-1], sample["labels"][1:], ignore_index=-100, reduction="sum"
            )
        )
        routers.append(outputs.router_logits if with_router else ())
    total = torch.stack(losses).sum() / count
    if with_router:
        row = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
        stock_loss = sys.modules[type(model).__module__].load_balancing_loss_func
        experts = row[0].shape[-1]
        total = total + config.router_aux_loss_coef * stock_loss(row, experts, config.num_experts_per_tok)
    total.backward()
    return float(total.detach()), {name: _whole(p) for name, p in model.named_parameters()}


def _whole(parameter: Tensor) -> Tensor:
    gradient: Any = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def _worst(
    loss: float, expected_loss: float, found: dict[str, Tensor], expected: dict[str, Tensor]
) -> tuple[str, float]:
    """What is furthest off, and by how much."""
    whole = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    errors = {"loss": abs(loss - expected_loss) / abs(expected_loss)}
    for name, gradient in expected.items():
        size = max(float(gradient.norm()), NEGLIGIBLE * whole)
        errors[name] = float((found[name] - gradient).norm()) / size
    # What is not a number is worst of all.
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return name, errors[name] if errors[name] == errors[name] else float("inf")


def _has_gated_delta(model: Any) -> bool:
    return any("GatedDelta" in type(module).__name__ for module in model.modules())


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def examine(model_type: str) -> Line:
    """All cases of a type, and of what its config has switches for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    outcomes: dict[str, tuple[Outcome, bool, str]] = {}
    for variant, changes in variants(model_type).items():
        if variant and outcomes[""][0].status != EXACT and variant not in OFTEN.get(model_type, {}):
            continue
        outcomes[variant] = _variant(model_type, variant, changes)
    first, windowed, dtype = outcomes.pop("")
    tensor = Outcome("")
    if first.status == EXACT:
        tensor = _of_ranks(model_type, "", "tp", LONG, getattr(torch, dtype))
    return Line(
        model_type,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type],
        first.status,
        first.detail,
        first.error,
        dtype,
        windowed,
        {variant: (outcome.status, outcome.detail) for variant, (outcome, _, _) in outcomes.items()},
        (tensor.status, tensor.detail),
    )


def _variant(model_type: str, variant: str, changes: dict[str, Any]) -> tuple[Outcome, bool, str]:
    """How a variant ends, whether a ring refused to cut a sample longer than a window, and the type used."""
    try:
        windowed = has_window(tiny_type_config(model_type, **changes))
    except Exception:
        windowed = False  # the case says why
    for dtype in (torch.float64, torch.float32):  # some types have parts that know no float64
        outcome, has_refused = _cases(model_type, variant, windowed, dtype)
        if outcome.status in (EXACT, REFUSED):
            break
    return outcome, has_refused, str(dtype).removeprefix("torch.")


def _cases(model_type: str, variant: str, windowed: bool, dtype: torch.dtype) -> tuple[Outcome, bool]:
    worst = Outcome(EXACT)
    for case in ALL_MUST:
        lengths = SHORT if windowed and case == "ring" else LONG
        outcome = _of_ranks(model_type, variant, case, lengths, dtype)
        if outcome.status != EXACT:
            return outcome, False
        worst = max(worst, outcome, key=lambda outcome: outcome.error)
    if not windowed:
        return worst, False
    # A ring that would cut such a sample says so; where the stock model masks by no window, it is cut.
    outcome = _of_ranks(model_type, variant, "ring", LONG, dtype)
    if outcome.status not in (EXACT, REFUSED):
        return outcome, False
    return worst, outcome.status == REFUSED


def _of_ranks(
    model_type: str, variant: str, case: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> Outcome:
    size = 2 if CASES[case][0] else 1
    try:
        outcomes = ranks.run(run_case, size, model_type, variant, case, lengths, dtype, limit=60)
    except ranks.RankError as error:
        return Outcome(FAILED, f"{case}: {error}")
    found = {outcome.status for outcome in outcomes}
    # Worst first: ranks that end differently are a failure of their own.
    status = next(s for s in (FAILED, WRONG, NO_CONFIG, REFUSED, EXACT) if s in found)
    outcome = next(outcome for outcome in outcomes if outcome.status == status)
    if status == REFUSED and len(found) > 1:
        return Outcome(FAILED, f"{case}: refused by some ranks alone: {outcome.detail}")
    where = "" if case == "packed" else f"{case}=2: "
    return Outcome(status, where + " ".join(outcome.detail.split()), outcome.error)


def examine_all(types: list[str], state: Path) -> list[Line]:
    """A line per type; those that the file `state` has are taken from it, others are added to it."""
    known: dict[str, Line] = {}
    if state.is_file():
        for text in state.read_text(encoding="utf-8").splitlines():
            line = Line(**json.loads(text))
            known[line.model_type] = line
    state.parent.mkdir(parents=True, exist_ok=True)
    for number, model_type in enumerate(types):
        if model_type in known:
            continue
        known[model_type] = examine(model_type)
        with state.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(known[model_type])) + "\n")
        line = known[model_type]
        print(
            f"{number + 1}/{len(types)} {model_type}: {line.status} {line.detail[:200]} {line.variants}",
            flush=True,
        )
    return [known[model_type] for model_type in types]


def _sources() -> int:
    """Of all that decides what is found: a change begins anew."""
    root = Path(__file__).parents[2]
    files = [*root.glob("seqbraid/**/*.py"), Path(__file__), Path(__file__).with_name("tiny_types.py")]
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(files)))


def main() -> int:
    """The command line."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all of them when left out")
    parser.add_argument("--state", type=Path, default=None, help="where what was found is kept")
    parser.add_argument("--docs", type=Path, help="the page whose table is written anew")
    options = parser.parse_args()
    state = options.state or Path("out") / f"models-{version('transformers')}-{_sources():08x}.jsonl"
    lines = examine_all(options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), state)
    counts = Counter(line.status for line in lines)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    if options.docs:
        from tests.models.models_page import write_table

        write_table(options.docs, lines)
    found = {
        status
        for line in lines
        for status in (line.status, line.tensor[0], *(s for s, _ in line.variants.values()))
    }
    return int(bool(found & {WRONG, FAILED}))


if __name__ == "__main__":
    sys.exit(main())
