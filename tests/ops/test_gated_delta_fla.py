"""What can be seen of the GPU path without a GPU: how segments are cut into pieces and joined again, and when
it is taken.

The kernels themselves are compared with the torch version in `tests/kernels`, and on a GPU by
`benchmarks/gated_delta_kernels.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.ops import fla_status, gated_delta_fla, gated_delta_pieces, triton_status
from seqbraid.ops.gated_delta import RULE, GatedDeltaCall, RuleNeed, make_call
from seqbraid.ops.gated_delta_fla import FlaGatedDeltaCall
from seqbraid.ops.gated_delta_pieces import CHUNK, Pieces
from seqbraid.ops.kernels import Kernels
from tests.helpers.plain import relative

CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=8), st.integers(1, 64), st.data())
def test_pieces_cover_their_segments_at_chunk_edges(lengths: list[int], heads: int, data: Any) -> None:
    cu = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    opened = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(lengths)))))))
    pieces = Pieces.of(cu, opened, heads, CPU)
    bounds = pieces.bounds.tolist()
    assert sorted(bounds) == bounds and len(set(bounds)) == len(bounds)
    assert [i for part in pieces.of_segment for i in part] == list(range(len(bounds) - 1))
    for segment, (start, stop) in enumerate(pairwise(cu)):
        part = pieces.of_segment[segment]
        assert (bounds[part[0]], bounds[part[-1] + 1]) == (start, stop)
        assert all((bounds[i] - start) % CHUNK == 0 for i in part)
        assert len(part) == 1 or segment in opened
        assert (part[0], part[-1]) == (int(pieces.firsts[segment]), int(pieces.lasts[segment]))
    assert pieces.cut == tuple(i for part in pieces.of_segment if len(part) > 1 for i in part)


def inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 2, 8), (tokens, 2, 8), (tokens, 4, 8), (tokens, 4), (tokens, 4)]
    q, k, v, g, beta = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return [q, k, v, -0.05 * g.abs(), beta.sigmoid()]


class ReducedInTorch(FlaGatedDeltaCall):
    """The joining of pieces over reductions by the torch version, as the GPU's kernels are not here."""

    @property
    def _pieces_call(self) -> GatedDeltaCall:
        return GatedDeltaCall(*self.inputs, tuple(self.pieces.bounds.tolist()))

    def _reduce(self, segments: Any) -> None:
        pieces = self._needed(segments, self._summaries)
        M, S0 = self._pieces_call.summaries(pieces, with_transition=True)
        self._summaries |= dict(zip(pieces, zip(M, S0, strict=True), strict=True))

    def _reduce_gradients(self, dout: torch.Tensor, segments: Any) -> None:
        pieces = self._needed(segments, self._gradients)
        self._gradients |= dict(zip(pieces, self._pieces_call.entering_gradients(dout, pieces), strict=True))


def test_pieces_joined_are_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_pieces, "SMALLEST_PIECE", 64)
    Pieces.of.cache_clear()
    cu, opened = (0, 40, 540, 600, 1000), (1, 3)
    tensors = inputs(1000)
    dout = torch.randn(1000, 4, 8, dtype=torch.float64)
    initial, dfinal = torch.randn(2, 4, 4, 8, 8, dtype=torch.float64)
    plain, ours = GatedDeltaCall(*tensors, cu), ReducedInTorch(*tensors, cu, opened=opened)
    assert [len(part) for part in ours.pieces.of_segment] == [1, 8, 1, 6]

    for found, wanted in zip(ours.summaries([1, 3], True), plain.summaries([1, 3], True), strict=True):
        assert relative(found, wanted) < 1e-12
    # The states that enter the pieces take the pieces to the segments' final states.
    entering = ours._entering(initial)
    out, final = plain.forward(initial)
    pieces_out, pieces_final = ours._pieces_call.forward(entering)
    assert relative(pieces_out, out) < 1e-12
    assert relative(pieces_final[ours.pieces.lasts], final) < 1e-12

    kept = [torch.empty(0), entering, *(ours._summaries[i][0] for i in ours.pieces.cut)]
    back = ReducedInTorch(*tensors, cu, kept=kept, opened=opened)
    assert relative(back.entering_gradients(dout, [3, 1]), plain.entering_gradients(dout, [3, 1])) < 1e-12
    leaving = back._leaving_gradients(dout, dfinal)
    by_pieces = GatedDeltaCall(*tensors, tuple(ours.pieces.bounds.tolist()))
    by_pieces.forward(entering)
    wanted_gradients = GatedDeltaCall(*tensors, cu, kept=plain.kept).backward(dout, initial, dfinal)
    *gradients, dentering = by_pieces.backward(dout, entering, leaving)
    gradients.append(dentering[ours.pieces.firsts])
    for found, wanted in zip(gradients, wanted_gradients, strict=True):
        assert relative(found, wanted) < 1e-12
    Pieces.of.cache_clear()


def test_the_cpu_takes_the_torch_version() -> None:
    assert isinstance(make_call(*(x.bfloat16() for x in inputs(10)), (0, 10)), GatedDeltaCall)


NEED = RuleNeed(torch.device("cuda"), torch.bfloat16, 128, 128)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A machine with a GPU on which these are installed."""

    def make(installed: bool, triton: str | None, capability: tuple[int, int]) -> None:
        def version(package: str) -> str:
            if triton is None:
                raise triton_status.PackageNotFoundError(package)
            return triton

        monkeypatch.setattr(fla_status, "find_spec", lambda name: object() if installed else None)
        monkeypatch.setattr(triton_status, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(gated_delta_fla, "fla_functions", lambda: None)

    for function in (fla_status.fla_missing, fla_status.fla_wrong):
        function.cache_clear()
    yield make
    for function in (fla_status.fla_missing, fla_status.fla_wrong):
        function.cache_clear()


@pytest.mark.parametrize(
    ("installed", "triton", "capability", "says"),
    [
        (False, "3.7.1", (9, 0), r"not installed; pip install 'seqbraid\[cuda\]'"),
        (True, None, (9, 0), "Triton is not installed"),
        (True, "3.6.0", (9, 0), "miscompiles its backward on this GPU; pip install 'triton>=3.7.1'"),
        (True, "3.7.1", (9, 0), None),
        (True, "3.6.0", (8, 0), None),
        (True, "3.10.0+git1", (9, 0), None),
    ],
)
def test_when_its_kernels_are_taken(
    machine: Callable[..., None],
    installed: bool,
    triton: str | None,
    capability: tuple[int, int],
    says: str | None,
) -> None:
    machine(installed, triton, capability)
    reason = RULE.candidate("fla").why_not(NEED)
    assert reason is None if says is None else re.search(says, str(reason))


@pytest.mark.parametrize(
    ("need", "says"),
    [
        (NEED._replace(device=CPU), "need a GPU"),
        (NEED._replace(dtype=torch.float32), "16-bit"),
        (NEED._replace(value_dim=256), "up to 128"),
        (NEED._replace(key_dim=24), "multiples of 16"),
        (NEED._replace(chunk_size=32), "64 tokens"),
    ],
)
def test_what_its_kernels_are_not_made_for(machine: Callable[..., None], need: RuleNeed, says: str) -> None:
    machine(True, "3.7.1", (9, 0))
    assert Kernels().choose(RULE, NEED) == "fla"
    assert Kernels().choose(RULE, need) == "torch"
    assert says in str(RULE.candidate("fla").why_not(need))


def test_a_release_with_other_functions_is_not_used(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ImportError("cannot import name 'chunk_fwd_o'")

    machine(True, "3.7.1", (9, 0))
    monkeypatch.setattr(gated_delta_fla, "fla_functions", missing)
    assert "has a different API" in str(RULE.candidate("fla").why_not(NEED))
