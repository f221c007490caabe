"""The verdict: its reason in words, what float32 cannot decide, and that ranks come to one."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from seqbraid import Mesh, cli
from seqbraid.models.braided import BraidedModel
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.ops.reference import gated_delta_recurrent
from seqbraid.verify import verdict
from seqbraid.verify.mutants import MUTANTS
from seqbraid.verify.parity import check_parity, stock_references
from seqbraid.verify.reference import one_rounding_away
from seqbraid.verify.report import print_parity
from seqbraid.verify.verdict import Parity, Quantity, compare
from seqbraid.verify.wide import float32_is_float64, in_float64
from tests.helpers import ranks

GOOD, BAD = Quantity("loss", 1e-7, 5e-7), Quantity("lm_head.weight", 3e-3, 1e-6)
WIDE = Quantity("layers.2.A_log", 2e-3, 2.2e-3)


def near_ties(difference: float) -> PreTrainedModel:
    """A router whose scores differ by so much relative to their size: whom a token goes to is soon a matter
    of rounding."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    gate = model.model.layers[0].mlp.gate.weight
    noise = torch.randn(gate.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.copy_(gate[:1] * (1 + difference * noise))
    return model


def test_the_reason_names_the_tensor_its_error_its_floor_and_the_rule() -> None:
    broken = Parity("", (GOOD, BAD))
    assert not broken.holds
    assert broken.reason == "lm_head.weight is off by 3.0e-03, 3e+03 × its floor of 1.0e-06 (allowed 10 ×)"
    assert "lm_head.weight is not a number" in Parity("", (GOOD, replace(BAD, error=math.nan))).reason
    assert "floor of layers.2.A_log is 2.2e-03, above 0.001" in Parity("", (GOOD, WIDE)).reason
    healthy = Parity("", (GOOD,), "float64", undecided=WIDE)
    assert healthy.holds and "float32 cannot decide (the floor of layers.2.A_log" in healthy.reason
    assert "in float64 every error is within" in healthy.reason


def test_the_reason_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity("llama", (GOOD, BAD))
    print_parity(parity)
    assert " ".join(parity.reason.split()) in " ".join(capsys.readouterr().out.split())
    assert parity.to_json()["reason"] == parity.reason


def test_what_is_not_a_number_is_not_hidden_behind_a_number() -> None:
    reference, *others = stock_references(tiny_model("llama"), random_samples([5, 9], 97))
    for place in (0, 1):
        logits = [x * math.nan if i == place else x for i, x in enumerate(reference.logits)]
        parity = compare("", replace(reference, logits=logits), reference, others)
        assert not parity.holds and "logits is not a number" in parity.reason


def test_an_order_that_is_not_a_number_says_nothing_and_a_reference_that_is_not_does_not_pass() -> None:
    reference, *others = stock_references(tiny_model("llama"), random_samples([5, 9], 97))
    nowhere = replace(reference, gradients={name: g * math.nan for name, g in reference.gradients.items()})
    assert compare("", reference, reference, [nowhere, *others]).holds
    parity = compare("", reference, nowhere, others)
    assert not parity.holds and not parity.is_decided and "stock model is not a number" in parity.reason


def test_one_rounding_away_is_the_next_number_and_back() -> None:
    model = tiny_model("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with one_rounding_away(model):
        for name, p in model.named_parameters():
            assert (p != before[name]).all()
            up = torch.nextafter(before[name], torch.tensor(math.inf))
            down = torch.nextafter(before[name], torch.tensor(-math.inf))
            assert ((p == up) | (p == down)).all() and (p == up).any() and (p == down).any()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_floor_knows_how_well_the_problem_is_conditioned() -> None:
    """Orders of sums alone agree on this model far better than roundings of its weights do."""
    model, samples = near_ties(1e-5), random_samples([9, 40, 70], 97)
    reference, *others = stock_references(model, samples)
    orders = compare("", reference, reference, others[:2])
    everything = compare("", reference, reference, others)
    assert max(line.floor for line in everything.lines) > 10 * max(line.floor for line in orders.lines)


def test_what_float32_cannot_decide_is_decided_in_float64() -> None:
    model, samples = near_ties(1e-6), random_samples([9, 40, 70], 97)
    parity = check_parity(model, samples, multiple_of=64)
    assert parity.holds and parity.dtype == "float64", parity.reason
    assert parity.undecided is not None and parity.undecided.floor > 1e-3
    assert all(line.floor < 1e-11 for line in parity.lines)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    (mutant,) = (m for m in MUTANTS if m.name == "padding counted by the router")
    with mutant.switched_on():
        mutated = check_parity(model, samples, multiple_of=64)
    assert not mutated.holds and mutated.dtype == "float64" and mutated.worst.ratio > 1e6


def test_what_float64_cannot_decide_either_does_not_pass() -> None:
    parity = check_parity(near_ties(0.0), random_samples([9, 40, 70], 97))
    assert parity.dtype == "float64" and not parity.holds
    assert (
        "float32 cannot decide" in parity.reason and "undecided, so the case does not pass" in parity.reason
    )


def test_stock_gated_delta_computes_in_float64_and_is_the_plain_recurrence() -> None:
    """The reference in float64 is the stock rule itself, which a rule written token by token confirms."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, 3, n, dtype=torch.float64, generator=generator) for n in (5, 5, 7))
    g, beta = (torch.rand(1, 150, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    wanted, _ = gated_delta_recurrent(q[0], k[0], v[0], -g[0], beta[0], (0, 150), qk_l2norm=True)

    def error() -> float:
        rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
        out, _ = rule(q, k, v, -g, beta, use_qk_l2norm_in_kernel=True)
        return float((out[0] - wanted).norm() / wanted.norm())

    assert 1e-8 < error() < 1e-5
    with float32_is_float64(in_float64(tiny_model("llama"))):
        assert error() < 1e-13


LENGTHS = (40, 33, 21, 9)


def on_a_rank(spoilt: str) -> tuple[bool, str, str]:
    """On one of two data ranks: the verdict where only the second one is off, or cannot decide."""
    mesh = Mesh(dp_shard=2)
    logits, floor = BraidedModel.logits, verdict.smallest_floor

    def wrong(self: Any, batch: Any) -> list[torch.Tensor]:
        return [1.01 * x for x in logits(self, batch)]

    def large(dtype: torch.dtype) -> float:
        return 2e-3 if dtype == torch.float32 else floor(dtype)

    patches = {
        "nothing": nullcontext(),
        "logits": patch.object(BraidedModel, "logits", wrong),
        "floor": patch.object(verdict, "smallest_floor", large),
    }
    with patches[spoilt if mesh.rank == 1 else "nothing"]:
        parity = check_parity(tiny_model("llama"), random_samples(LENGTHS, 97), mesh)
    return parity.holds, parity.dtype, parity.reason


@pytest.mark.parametrize(
    ("spoilt", "holds", "dtype"),
    [("nothing", True, "float32"), ("logits", False, "float32"), ("floor", True, "float64")],
)
def test_ranks_come_to_one_verdict(spoilt: str, holds: bool, dtype: str) -> None:
    first, second = ranks.run(on_a_rank, 2, spoilt)
    assert first == second
    assert first[:2] == (holds, dtype), first


def status(spoilt: bool) -> int:
    """On one rank: what the command ends with where the second rank alone is off."""
    logits = BraidedModel.logits

    def wrong(self: Any, batch: Any) -> list[torch.Tensor]:
        return [(1.01 if spoilt and self.mesh.rank == 1 else 1.0) * x for x in logits(self, batch)]

    with patch.object(BraidedModel, "logits", wrong):
        return cli.main(["verify", "--model", "llama", "--lengths", "40,33,21,9", "--dp-shard", "2"])


def test_the_command_ends_alike_on_every_rank() -> None:
    assert ranks.run(status, 2, False) == [0, 0]
    assert ranks.run(status, 2, True) == [1, 1]
