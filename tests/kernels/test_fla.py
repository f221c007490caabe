"""flash-linear-attention's kernels and ours, put together as on a GPU, against the torch versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqbraid.ops import conv, gated_delta_pieces
from seqbraid.ops.gated_delta import GatedDeltaCall
from seqbraid.ops.gated_delta_call import RuleOptions
from seqbraid.ops.gated_delta_fla import FlaGatedDeltaCall
from seqbraid.ops.gated_delta_pieces import Pieces
from tests.helpers.plain import relative

SEED = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=SEED, dtype=torch.float64)


@pytest.mark.parametrize("with_states", [True, False])
@pytest.mark.parametrize(
    ("cu", "opened", "sizes", "options"),
    [
        ((3, 80, 81, 310), (2,), (2, 4, 32, 32), RuleOptions(qk_l2norm=True)),
        ((0, 64, 129, 330), (0, 1, 2), (1, 3, 16, 48), RuleOptions(scale=0.3)),
        ((0, 1, 2, 200), (), (2, 2, 64, 16), RuleOptions(qk_l2norm=True)),
        ((5, 330), (0,), (1, 1, 128, 128), RuleOptions(qk_l2norm=True)),
    ],
)
def test_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    cu: tuple[int, ...],
    opened: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    options: RuleOptions,
    with_states: bool,
) -> None:
    """Open segments in several pieces and in one, closed ones, one token, rows outside all segments."""
    monkeypatch.setattr(gated_delta_pieces, "SMALLEST_PIECE", 64)
    Pieces.of.cache_clear()
    (G, H, K, V), num_segments, T = sizes, len(cu) - 1, 330
    inputs = [random(T, G, K), random(T, G, K), random(T, H, V), -0.05 * random(T, H).abs()]
    inputs.append(random(T, H).sigmoid())
    dout, states = random(T, H, V), [random(num_segments, H, K, V) for _ in range(2)]
    initial, dfinal = states if with_states else (None, None)

    def run(kind: type, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every part of a call, the backward with what the forward has kept, as layers have it."""
        tensors = [x.to(dtype) for x in inputs]
        entering, leaving = (None if x is None else x.to(dtype) for x in (initial, dfinal))
        call = kind(*tensors, cu, options, opened=opened)
        found = {}
        if opened:
            found["M"], found["S0"] = call.summaries(opened, True)
        found["out"], found["final"] = call.forward(entering)
        back = kind(*tensors, cu, options, kept=call.kept, opened=opened)
        if opened:
            found["dS_in"] = back.entering_gradients(dout.to(dtype), opened)
        names = ("dq", "dk", "dv", "dg", "dbeta", "dinitial")
        return found | dict(zip(names, back.backward(dout.to(dtype), entering, leaving), strict=True))

    exact, found = run(GatedDeltaCall, torch.float64), run(FlaGatedDeltaCall, torch.float32)
    Pieces.of.cache_clear()
    if not with_states:
        del exact["dinitial"]
    for name, wanted in exact.items():
        assert wanted.norm() > 0
        assert relative(found[name].double(), wanted) < 1e-5, name


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_halo", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_convolution(
    monkeypatch: pytest.MonkeyPatch, activation: str | None, with_halo: bool, with_bias: bool
) -> None:
    cu, T, C, W = (2, 3, 5, 70, 150), 155, 20, 4
    leaves = [random(T, C), random(C, W)]
    if with_bias:
        leaves.append(random(C))
    if with_halo:
        leaves.append(random(len(cu) - 1, W - 1, C))
    dout = random(T, C)

    def run(dtype: torch.dtype) -> list[Tensor]:
        x, weight, *others = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        bias = others[0] if with_bias else None
        halo = others[-1] if with_halo else None
        y = conv.causal_conv(x, weight, bias, cu, halo_NWC=halo, activation=activation)
        return [y, *torch.autograd.grad(y, (x, weight, *others), dout.to(dtype))]

    exact = run(torch.float64)
    monkeypatch.setattr(conv, "_takes_fla", lambda x, weight, kernels: True)
    for got, wanted in zip(run(torch.float32), exact, strict=True):
        assert wanted.norm() > 0
        assert relative(got.double(), wanted) < 1e-5
