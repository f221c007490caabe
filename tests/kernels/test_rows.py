"""Norms, rotations and gates in one pass, against their definitions in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqbraid.ops import rows, swiglu
from seqbraid.ops.plain_rows import Norm, Rotation, plain_rows
from seqbraid.ops.rows import fused_rows
from seqbraid.ops.swiglu import fused_swiglu, plain_swiglu
from seqbraid.ops.triton_status import RowsNeed
from tests.helpers.plain import relative
from tests.kernels.races import no_races

# The interpreter cuts numbers off to 16 bits where a GPU rounds them.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


CASES = {
    "a hidden state": {"shape": (5, 1, 96), "norm": True},
    "one row": {"shape": (1, 1, 7), "norm": True},
    "more rows than programs": {"shape": (230, 1, 128), "norm": True},
    "wider than a tile": {"shape": (9, 1, 2050), "norm": True},
    "zero-centred": {"shape": (5, 1, 100), "norm": True, "centre": 1.0},
    "gated": {"shape": (67, 1, 24), "norm": True, "gate": True},
    "gated, one row": {"shape": (1, 1, 130), "norm": True, "gate": True},
    "gated heads": {"shape": (9, 3, 40), "norm": True, "gate": True},
    "heads": {"shape": (9, 3, 16), "norm": True},
    "turned": {"shape": (40, 3, 64), "turned": 64},
    "turned in part": {"shape": (9, 2, 20), "turned": 6},
    "normed and turned": {"shape": (70, 3, 32), "norm": True, "turned": 32},
    "normed and turned in part": {"shape": (33, 2, 48), "norm": True, "turned": 12, "centre": 1.0},
    "one token, turned": {"shape": (1, 1, 2), "norm": True, "turned": 2},
}


@pytest.mark.parametrize("layout", ["plain", "strided"])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("case", CASES)
def test_rows(case: str, dtype: torch.dtype, layout: str) -> None:
    """Also of rows that lie apart, as the queries of a projection that makes gates too."""
    options = {"norm": False, "turned": 0, "gate": False, "centre": 0.0} | CASES[case]
    shape = options["shape"]
    tokens, _, width = shape
    x, dout = random(*shape), random(*shape)
    x[0] *= 1e-3  # where eps counts
    leaves = (
        [x] + ([random(width)] if options["norm"] else []) + ([random(*shape)] if options["gate"] else [])
    )
    angle = random(tokens, options["turned"])

    def run(by: object, wide: torch.dtype) -> list[Tensor]:
        own = [leaf.to(dtype).to(wide).requires_grad_() for leaf in leaves]
        given = [spread(leaf) if layout == "strided" and leaf.ndim == 3 else leaf for leaf in own]
        turn = (
            Rotation(*(t.to(dtype).to(wide) for t in (angle.cos(), angle.sin())))
            if options["turned"]
            else None
        )
        norm = Norm(given[1], 1e-6, options["centre"]) if options["norm"] else None
        out = by(given[0], norm, turn, given[2] if options["gate"] else None)
        grad = dout.to(dtype).to(wide)
        return [out, *torch.autograd.grad(out, own, spread(grad) if layout == "strided" else grad)]

    exact = run(plain_rows, torch.float64)
    with no_races() as launched:
        found = run(fused_rows, dtype)
    assert launched == ["_rows_forward_kernel", "_rows_backward_kernel"]
    for got, wanted in zip(found, exact, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        assert relative(got.double(), wanted) < NEAR[dtype]


def spread(x: Tensor) -> Tensor:
    """The same numbers, with others between the rows of each token, and between the tokens."""
    padded = torch.nn.functional.pad(x, (0, x.shape[-1], 0, 1), value=torch.nan)
    return padded[:, : x.shape[1], : x.shape[2]]


def test_nothing_at_all() -> None:
    """A rank without a token."""
    x, weight = torch.zeros(0, 2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    fused_rows(x, Norm(weight, 1e-6, 0.0)).sum().backward()
    assert x.grad is not None and weight.grad is not None and float(weight.grad.abs().sum()) == 0.0


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (5, 96), (3, 2100)])
@pytest.mark.parametrize("layout", ["apart", "side by side"])
def test_swiglu(tokens: int, width: int, dtype: torch.dtype, layout: str) -> None:
    both, dout = 3 * random(1, tokens, 2 * width), random(1, tokens, width)

    def run(by: object, wide: torch.dtype, *options: bool) -> list[Tensor]:
        leaf = both.to(dtype).to(wide).requires_grad_()
        gate, up = (x if layout == "side by side" else x.contiguous() for x in leaf.chunk(2, dim=-1))
        out = by(gate, up, *options)
        return [out, *torch.autograd.grad(out, leaf, dout.to(dtype).to(wide))]

    exact = run(plain_swiglu, torch.float64)
    for in_place in (True, False):
        with no_races() as launched:
            found = run(fused_swiglu, dtype, in_place)
        assert launched == ["_swiglu_forward_kernel", "_swiglu_backward_kernel"]
        for got, wanted in zip(found, exact, strict=True):
            assert got.dtype == dtype and relative(got.double(), wanted) < NEAR[dtype]


def test_what_was_written_over_is_not_used_again() -> None:
    gate, up = (torch.ones(1, 2, 4, requires_grad=True) for _ in range(2))
    out = fused_swiglu(gate * 1, up * 1, True).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was called a second time"):
        out.backward()


def test_the_same_bits_each_time() -> None:
    x, weight, dout = random(300, 2, 64).float(), random(64).float(), random(300, 2, 64).float()
    x.requires_grad_()
    weight.requires_grad_()
    first, second = (
        torch.autograd.grad(fused_rows(x, Norm(weight, 1e-6, 0.0)), (x, weight), dout) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def without(what: str) -> Callable[..., Any]:
    """Kernels that are told something else than they are asked."""

    def wrong(right: Callable[..., Any], *given: Any) -> Any:
        *tensors, norm, turn, gate = given
        if what == "sign" and turn:
            turn = Rotation(turn.cos_TR, -turn.sin_TR)
        elif what == "gate":
            gate = None
        elif what != "sign":
            norm = norm._replace(**{what: 0.0})
        return right(*tensors, norm, turn, gate)

    return wrong


DEFECTS = {
    "a norm without its eps": ("rows_triton", "forward", without("eps")),
    "a centre left out": ("rows_triton", "forward", without("centre")),
    "a gate left out": ("rows_triton", "forward", without("gate")),
    "a rotation the other way": ("rows_triton", "forward", without("sign")),
    "a gradient turned the wrong way": ("rows_triton", "backward", without("sign")),
    "a gradient without eps": ("rows_triton", "backward", without("eps")),
    "a kernel that does not compile": ("rows_triton", "forward", lambda right, *given: 1 / 0),
    "an up left out": ("swiglu_triton", "forward", lambda right, gate, up: right(gate, torch.ones_like(up))),
    "gradients the wrong way round": (
        "swiglu_triton",
        "backward",
        lambda right, *given, in_place: right(*given, in_place=in_place)[::-1],
    ),
}


@pytest.mark.parametrize("defect", [*DEFECTS, "none"])
def test_a_kernel_that_is_off_is_not_used(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqbraid.ops import rows_triton, swiglu_triton

    modules = {"rows_triton": rows_triton, "swiglu_triton": swiglu_triton}
    name = "none"
    if defect != "none":
        name, function, wrong = DEFECTS[defect]
        right = getattr(modules[name], function)
        monkeypatch.setattr(modules[name], function, lambda *a, **k: wrong(right, *a, **k))
    for dtype in (torch.float32, torch.bfloat16):
        need = RowsNeed(torch.device("cpu"), dtype)
        said = {
            "rows_triton": rows.rows_wrong.__wrapped__(need),
            "swiglu_triton": swiglu.swiglu_wrong.__wrapped__(need),
        }
        for module, reason in said.items():
            assert (reason is not None) == (module == name), (module, reason)
