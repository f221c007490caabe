"""The first kernel that fits, is there and is right; what is asked for and is not there is refused."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import seqbraid
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.ops.kernels import Candidate, KernelOptions, Kernels, Op
from seqbraid.ops.table import TABLE

CALLS: list[str] = []


def reason(name: str, wrong_for: int = -1) -> Candidate:
    """A kernel for even numbers that is wrong for one of them."""

    def wrong(need: int) -> str | None:
        CALLS.append(f"{name} looked at {need}")
        return "it is off by 0.5" if need == wrong_for else None

    return Candidate(name, lambda need: "it is for even numbers" if need % 2 else None, wrong=wrong)


ABSENT = Candidate("absent", missing=lambda: "it is not installed; pip install absent")
OP = Op("attention", (ABSENT, reason("quick", wrong_for=4), reason("slow"), Candidate("torch")))


def test_the_first_that_nothing_speaks_against() -> None:
    kernels = Kernels()
    assert kernels.choose(OP, 2) == "quick"
    assert kernels.choose(OP, 3) == "torch"
    with pytest.warns(UserWarning, match="quick is not used for attention: it is off by 0.5"):
        assert kernels.choose(OP, 4) == "slow"


def test_a_choice_is_made_once_a_model(caplog: pytest.LogCaptureFixture) -> None:
    CALLS.clear()
    kernels, others = Kernels(), Kernels()
    with caplog.at_level(logging.INFO, "seqbraid.ops.kernels"):
        assert [kernels.choose(OP, 2) for _ in range(3)] == ["quick"] * 3
    assert CALLS == ["quick looked at 2"]
    assert caplog.messages == ["attention by quick for 2 not absent: it is not installed; pip install absent"]
    others.choose(OP, 2)
    assert len(CALLS) == 2
    with pytest.warns(UserWarning, match="off by"):
        kernels.choose(OP, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.choose(OP, 4)


def test_a_wish_is_kept_where_it_is_made_for_the_numbers() -> None:
    kernels = Kernels(KernelOptions(attention="slow"))
    assert [kernels.choose(OP, need) for need in (2, 4, 3)] == ["slow", "slow", "torch"]
    wrong = Kernels(KernelOptions(attention="quick"))
    assert wrong.choose(OP, 2) == "quick"
    with pytest.raises(ValueError, match="attention='quick' cannot be used: it is off by"):
        wrong.choose(OP, 4)


def test_a_wish_for_what_is_not_there_is_refused() -> None:
    OP.check(KernelOptions(attention="slow"))
    with pytest.raises(ValueError, match="attention='absent' cannot be used: it is not installed; pip inst"):
        OP.check(KernelOptions(attention="absent"))
    with pytest.raises(
        ValueError, match=("attention='eagre' is not a kernel for this op; use one of 'auto', 'absent")
    ):
        OP.check(KernelOptions(attention="eagre"))


@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_an_op_ends_with_torch_and_is_an_option(op: Op) -> None:
    assert getattr(KernelOptions(), op.name) == "auto"
    last = op.candidates[-1]
    assert last.name == "torch" and last.why_not(None) is None


def test_two_models_of_a_process_have_their_own() -> None:
    """Nothing is left behind: what one model wished for, the next does not get."""
    first = seqbraid.parallelize(tiny_model("llama"), kernels=KernelOptions(attention="torch", loss="torch"))
    second = seqbraid.parallelize(tiny_model("llama"))
    assert first.kernels.options.attention == "torch" and second.kernels.options == KernelOptions()
    batch = seqbraid.pack([{"input_ids": torch.arange(5)}], first.model.config)
    assert float(first(batch).mean_loss) == float(second(batch).mean_loss)
    again = seqbraid.parallelize(first.release(), kernels=KernelOptions(gated_delta="torch"))
    assert again.kernels.options == KernelOptions(gated_delta="torch")
    with pytest.raises(
        ValueError, match=("loss='cuda' is not a kernel for this op; use one of 'auto', 'triton'")
    ):
        seqbraid.parallelize(tiny_model("llama"), kernels=KernelOptions(loss="cuda"))
