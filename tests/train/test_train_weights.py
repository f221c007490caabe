"""Turns with weights: each label counts as its turn says, on any mesh, in training and evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqbraid.train.setup import EncoderFactory, make_model
from tests.helpers.ranks import run
from tests.helpers.runs import DATA_RANKS, RING, assert_same_curves, config, logged, said, train, write


def weighted(number: int, weights: tuple[float, float]) -> dict[str, Any]:
    """Two answers, which count differently."""
    messages = said(number)["messages"] + said(number + 1)["messages"]
    for answer, weight in zip(messages[1::2], weights, strict=True):
        answer["weight"] = weight
    return {"messages": messages}


def test_a_run_with_weights_is_the_same_on_any_mesh_and_divides_by_their_sum(tmp_path: Path) -> None:
    records = [weighted(n, (0.25, 2.0) if n % 3 else (1, 1)) for n in range(6)]
    write(tmp_path / "text.jsonl", records)
    write(tmp_path / "eval.jsonl", records)
    alone = config(tmp_path, tmp_path / "alone", train={"steps": 2, "eval_every": 1}, evaluated=True)
    run(train, 1, alone)
    for name, mesh in (("ring", RING), ("data", DATA_RANKS)):
        other = replace(alone, out=str(tmp_path / name), mesh=mesh)
        run(train, 2, other)
        assert_same_curves(other, alone)

    # After the second step: of the final weights, by hand, with those of the model that was exported.
    model, encoder = make_model(alone), EncoderFactory(alone.model, alone.data, make_model(alone).config)()
    samples = [encoder.encode(record) for record in records]
    assert encoder.encode_text(records[1]) is None and encoder.encode_text(records[0]) is not None
    total, count = 0.0, 0.0
    with torch.no_grad():
        for sample in samples:
            labels, ids = sample["labels"], sample["input_ids"]
            weights = sample["fields"]["weights"] if "fields" in sample else torch.ones(len(ids))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")
            total += float((losses * weights[1:]).sum())
            count += float(weights[1:][labels[1:] != -100].sum())
    first = replace(alone, out=str(tmp_path / "first"), train=replace(alone.train, steps=1, lr=1e-30))
    run(train, 1, first)
    assert logged(first, "eval_loss")[0] == pytest.approx(total / count, rel=1e-5)
    spans = samples[1]["fields"]["weights"][samples[1]["labels"] != -100]
    assert sorted(set(spans.tolist())) == [0.25, 2.0] and spans[0] == 0.25 and spans[-1] == 2.0
