"""What can be seen of FlashQLA's path without a GPU: which pieces its kernels are given, and how their
results are joined. The kernels' place is taken by the torch version, in float64; on a GPU they are compared
with it before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from seqbraid.ops import gated_delta_pieces, gated_delta_qla
from seqbraid.ops.gated_delta import RULE, GatedDeltaCall, RuleNeed
from seqbraid.ops.gated_delta_call import RuleOptions
from seqbraid.ops.gated_delta_pieces import Pieces
from seqbraid.ops.gated_delta_qla import QlaGatedDeltaCall, Run
from tests.helpers.plain import relative

OPTIONS = RuleOptions(qk_l2norm=False)


class InTorch:
    """FlashQLA's functions, as far as they are called."""

    def __init__(self) -> None:
        self.reduced: list[range] = []

    def cumsum(self, g: Tensor, **_: Any) -> Tensor:
        """Sums inside chunks are the affair of the kernels, and of nobody else."""
        return g.double()

    def solve(self, k: Tensor, b: Tensor, **_: Any) -> Tensor:
        return torch.zeros(1, k.shape[1])

    def prepare(self, cu: Tensor, on_host: Tensor) -> Tensor:
        assert torch.equal(cu, on_host)
        return cu

    def sum_heads(self, gradient: Tensor, num_key_heads: int) -> Tensor:
        return gradient

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, cu: Tensor, **how: Any
    ) -> GatedDeltaCall:
        return GatedDeltaCall(*(x[0] for x in (q, k, v, g, b)), tuple(cu.tolist()), OPTIONS, **how)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, **given: Any) -> Any:
        call = self._call(q, k, v, g, b, given["cu_seqlens"])
        out, final = call.forward(given["initial_state"])
        return out[None], None, final

    def states(self, **given: Any) -> Any:
        """Of all chunks, for the backward; here what the backward of the torch version starts from."""
        return given["initial_state"], None, None

    def backward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, **given: Any) -> Any:
        call = self._call(q, k, v, g, b, given["cu_seqlens"])
        call.forward(given["h"])
        call = self._call(q, k, v, g, b, given["cu_seqlens"], kept=call.kept)
        *rows, dinitial = call.backward(given["do"][0], given["h"], given["dht"])
        return *(x[None] for x in rows), dinitial

    def reduce(self, run: Run, k: Tensor, v: Tensor, A: Tensor, g: Tensor, b: Tensor) -> Any:
        self.reduced.append(run.pieces)
        call = self._call(k, k, v, g, b, run.cu)
        return call.summaries(range(len(run.pieces)), True)

    def entering(self, q: Tensor, k: Tensor, g: Tensor, b: Tensor, do: Tensor, **given: Any) -> Any:
        call = self._call(q, k, torch.zeros_like(do), g, b, given["cu_seqlens"])
        return None, call.entering_gradients(do[0], range(len(given["cu_seqlens"]) - 1))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[InTorch]:
    found = InTorch()
    monkeypatch.setattr(gated_delta_qla, "qla_functions", lambda: found)
    monkeypatch.setattr(gated_delta_pieces, "SMALLEST_PIECE", 64)
    Pieces.of.cache_clear()
    yield found
    Pieces.of.cache_clear()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("with_states", [True, False])
@pytest.mark.parametrize(
    ("cu", "opened", "reduced"),
    [
        ((0, 700), (), [range(11)]),  # long, so it is cut, though nobody asks for its M
        ((3, 40, 41, 300, 330), (), [range(2, 6)]),
        ((3, 40, 140, 300, 330), (1, 3), [range(1, 3), range(3, 5), range(5, 6)]),
        ((0, 100, 200, 330), (0, 2), [range(2), range(3, 5)]),  # not those in between
        ((0, 1, 2, 60), (), []),
    ],
)
def test_pieces_joined_are_the_rule(
    kernels: InTorch,
    cu: tuple[int, ...],
    opened: tuple[int, ...],
    reduced: Sequence[range],
    with_states: bool,
) -> None:
    T, num_segments = cu[-1] + 5, len(cu) - 1
    inputs = [
        random(T, 2, 8),
        random(T, 2, 8) / 8,
        random(T, 4, 8),
        (-0.05 * random(T, 4).abs()).float().double(),
    ]
    inputs.append(random(T, 4).sigmoid())
    dout, initial, dfinal = random(T, 4, 8), *random(2, num_segments, 4, 8, 8).unbind()
    states = (initial, dfinal) if with_states else (None, None)

    def run(kind: Any) -> list[Tensor]:
        call = kind(*inputs, cu, OPTIONS, opened=opened)
        found = [*call.summaries(opened, True)] if opened else []
        found += call.forward(states[0])
        back = kind(*inputs, cu, OPTIONS, kept=call.kept, opened=opened)
        found += [back.entering_gradients(dout, opened)] if opened else []
        return [*found, *back.backward(dout, *states)][: None if with_states else -1]

    for got, wanted in zip(run(QlaGatedDeltaCall), run(GatedDeltaCall), strict=True):
        assert relative(got, wanted) < 1e-12
    assert sorted(i for part in kernels.reduced for i in part) == sorted(i for part in reduced for i in part)


def test_autocast_does_not_lower_the_precision_of_chains(kernels: InTorch) -> None:
    cu, shapes = (0, 300, 500), [(500, 2, 8), (500, 2, 8), (500, 4, 8), (500, 4), (500, 4)]
    q, k, v, g, beta = (random(*shape).float() for shape in shapes)
    inputs, dout = (q, k / 8, v, -0.05 * g.abs(), beta.sigmoid()), random(500, 4, 8).float()

    def run() -> list[Tensor]:
        call = QlaGatedDeltaCall(*inputs, cu, OPTIONS, opened=(0, 1))
        found = [*call.summaries((0, 1), True), *call.forward(None)]
        back = QlaGatedDeltaCall(*inputs, cu, OPTIONS, kept=call.kept, opened=(0, 1))
        return [*found, back.entering_gradients(dout, (0, 1)), *back.backward(dout, None, None)]

    wanted = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_dim": 64}, "heads of 128 only"),
        ({"has_empty": True}, "empty segment"),
        ({"dtype": torch.float32}, "16-bit"),
        ({"device": torch.device("cpu")}, "need a GPU"),
    ],
)
def test_what_its_kernels_are_not_made_for(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    need = RuleNeed(torch.device("cuda"), torch.bfloat16, 128, 128)
    candidate = RULE.candidate("flash_qla")
    assert candidate.unfit(need) is None
    assert says in str(candidate.unfit(need._replace(**change)))
    for other in ((8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=other: found)
        assert "H100" in str(candidate.unfit(need))
