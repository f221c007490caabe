"""The packed convolution equals one convolution per sequence, in values and in gradients."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqbraid.ops import conv as conv_module
from seqbraid.ops.boundaries import as_boundaries
from seqbraid.ops.conv import ConvPlan, causal_conv

LENGTHS = (1, 2, 63, 64, 65, 130, 0, 257)
CHANNELS = 5


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-12) -> None:
    """Relative to the norm of what is expected, so that a gradient that is missing or tiny cannot pass."""
    assert actual.shape == expected.shape, name
    size = expected.norm()
    error = (actual - expected).norm()
    assert error <= tolerance * size, f"{name}: error {error:.2e}, size {size:.2e}"


def one_by_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu: list[int], halo: Tensor | None, activation: str | None
) -> Tensor:
    """Each sequence alone, its halo (or zeros) before it."""
    channels, width = weight.shape
    rows = [x.new_zeros(cu[0], channels)]
    for segment, (start, stop) in enumerate(pairwise(cu)):
        before = x.new_zeros(width - 1, channels) if halo is None else halo[segment]
        if stop > start:
            row = torch.cat([before, x[start:stop]]).T[None]
            y = F.conv1d(row, weight[:, None], bias, groups=channels)[0].T
            rows.append(F.silu(y) if activation == "silu" else y)
    rows.append(x.new_zeros(len(x) - cu[-1], channels))
    return torch.cat(rows)


def check(
    lengths: list[int],
    width: int,
    with_bias: bool,
    with_halo: bool,
    activation: str | None,
    padding: tuple[int, int],
) -> None:
    cu = list(accumulate(lengths, initial=padding[0]))
    x, weight = rand(cu[-1] + padding[1], CHANNELS), rand(CHANNELS, width, seed=1)
    bias = rand(CHANNELS, seed=2) if with_bias else None
    halo = rand(len(lengths), width - 1, CHANNELS, seed=3) if with_halo else None
    expected = one_by_one(x, weight, bias, cu, halo, activation)
    actual = causal_conv(x, weight, bias, cu, halo_NWC=halo, activation=activation)
    assert_close(actual, expected, "y")
    inputs = {"x": x, "weight": weight, "bias": bias, "halo": halo}
    used = {name: tensor for name, tensor in inputs.items() if tensor is not None and tensor.numel()}
    dy = rand(*expected.shape, seed=4).detach()
    grads = torch.autograd.grad(actual, used.values(), dy)
    for name, grad, wanted in zip(used, grads, torch.autograd.grad(expected, used.values(), dy), strict=True):
        assert_close(grad, wanted, f"d{name}")


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_halo", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1], (0, 0, 3, 0), (257,)])
def test_equals_each_sequence_alone(
    lengths: tuple[int, ...], width: int, with_halo: bool, activation: str | None
) -> None:
    check(
        list(lengths), width, with_bias=width > 1, with_halo=with_halo, activation=activation, padding=(3, 2)
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    width=st.integers(1, 5),
    with_bias=st.booleans(),
    with_halo=st.booleans(),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_random_segments_equal_each_sequence_alone(
    lengths: list[int], width: int, with_bias: bool, with_halo: bool, padding: tuple[int, int]
) -> None:
    check(lengths, width, with_bias, with_halo, "silu", padding)


@pytest.mark.parametrize("split", [0, 1, 2, 3, 4, 10, 19, 20])
def test_halo_continues_the_sequence(split: int) -> None:
    """Cut in two at any place, with the rows before the cut as halo, a sequence is what it was."""
    x, weight, bias = rand(20, CHANNELS), rand(CHANNELS, 4, seed=1), rand(CHANNELS, seed=2)
    dy = rand(20, CHANNELS, seed=3).detach()
    whole = causal_conv(x, weight, bias, [0, 20])
    halo = torch.cat([x.new_zeros(3, CHANNELS), x[:split]])[-3:]
    first = causal_conv(x[:split], weight, bias, [0, split])
    second = causal_conv(x[split:], weight, bias, [0, 20 - split], halo_NWC=halo[None])
    cut = torch.cat([first, second])
    assert_close(cut, whole, "y")
    grads = torch.autograd.grad(cut, (x, weight, bias), dy)
    for name, grad, wanted in zip(
        ("dx", "dweight", "dbias"), grads, torch.autograd.grad(whole, (x, weight, bias), dy), strict=True
    ):
        assert_close(grad, wanted, name)


@pytest.mark.parametrize("split", [3, 4, 10, 18])
def test_gradient_of_the_halo_is_that_of_the_rows_it_stands_for(split: int) -> None:
    x, weight = rand(20, CHANNELS), rand(CHANNELS, 4, seed=1)
    dy = rand(20, CHANNELS, seed=3).detach()
    whole = causal_conv(x, weight, None, [0, 20])[split:]
    (dx,) = torch.autograd.grad(whole, x, dy[split:])
    halo = x[split - 3 : split].detach()[None].requires_grad_()
    second = causal_conv(x[split:], weight, None, [0, 20 - split], halo_NWC=halo)
    (dhalo,) = torch.autograd.grad(second, halo, dy[split:])
    assert_close(dhalo[0], dx[split - 3 : split], "dhalo")


def test_one_sequence_does_not_touch_another() -> None:
    cu = list(accumulate((7, 30, 2, 11), initial=0))
    x, weight = rand(50, CHANNELS, dtype=torch.float32), rand(CHANNELS, 4, seed=1, dtype=torch.float32)
    changed = x.detach().clone()
    changed[7:37] = float("nan")
    others = [row for row in range(50) if not 7 <= row < 37]
    assert torch.equal(
        causal_conv(x, weight, None, cu)[others], causal_conv(changed, weight, None, cu)[others]
    )


def test_padding_rows_are_nobody() -> None:
    x, weight = rand(12, CHANNELS).detach(), rand(CHANNELS, 4, seed=1)
    x[:3] = x[10:] = float("nan")
    x.requires_grad_()
    y = causal_conv(x, weight, None, [3, 5, 10])
    assert torch.equal(y[:3], torch.zeros(3, CHANNELS)) and torch.equal(y[10:], torch.zeros(2, CHANNELS))
    dx, dweight = torch.autograd.grad(y, (x, weight), rand(12, CHANNELS, seed=2).detach())
    assert torch.equal(dx[:3], torch.zeros(3, CHANNELS)) and torch.equal(dx[10:], torch.zeros(2, CHANNELS))
    assert dx[3:10].isfinite().all() and dweight.isfinite().all()


@pytest.mark.parametrize("cu", [[4], [4, 4], [0, 0, 0]])
@pytest.mark.parametrize("width", [1, 4])
def test_rows_without_tokens_still_take_part_in_the_graph(cu: list[int], width: int) -> None:
    x, weight, bias = rand(6, CHANNELS), rand(CHANNELS, width, seed=1), rand(CHANNELS, seed=2)
    y = causal_conv(x, weight, bias, cu)
    assert torch.equal(y, torch.zeros_like(y))
    for grad in torch.autograd.grad(y.sum(), (x, weight, bias)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_runs_in_the_dtype_of_the_weight_and_returns_that_of_the_input() -> None:
    x, weight = rand(9, CHANNELS, dtype=torch.bfloat16), rand(CHANNELS, 4, seed=1, dtype=torch.float32)
    y = causal_conv(x, weight, None, [0, 4, 9])
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, causal_conv(x.float(), weight, None, [0, 4, 9]).bfloat16())


def test_plan_is_built_once_for_all_layers() -> None:
    device = torch.device("cpu")
    assert ConvPlan.of((0, 3, 9), 4, device) is ConvPlan.of((0, 3, 9), 4, device)
    assert as_boundaries(torch.tensor([0, 3, 9]), 9) == as_boundaries([0, 3, 9], 9) == (0, 3, 9)


@pytest.mark.parametrize(
    "cu", [[], [-1, 4], [0, 7], [0, 4, 3], torch.tensor([0.0, 4.0]), torch.tensor([[0, 4]])]
)
def test_boundaries_that_do_not_cut_the_rows_are_refused(cu: list[int] | Tensor) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv(rand(6, CHANNELS), rand(CHANNELS, 4), None, cu)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = rand(6, CHANNELS), rand(CHANNELS, 4)
    with pytest.raises(ValueError, match="weight"):
        causal_conv(x, rand(CHANNELS + 1, 4), None, [0, 6])
    with pytest.raises(ValueError, match="width 0; it must be at least 1"):
        causal_conv(x, rand(CHANNELS, 0), None, [0, 6])
    with pytest.raises(ValueError, match=r"x .* do not fit"):
        causal_conv(x[None], weight, None, [0, 6])
    with pytest.raises(ValueError, match="bias"):
        causal_conv(x, weight, rand(CHANNELS + 1), [0, 6])
    with pytest.raises(ValueError, match="halo"):
        causal_conv(x, weight, None, [0, 6], halo_NWC=rand(1, 4, CHANNELS))
    with pytest.raises(ValueError, match=r"gelu.*'silu'"):
        causal_conv(x, weight, None, [0, 6], activation="gelu")


@pytest.mark.parametrize("tile", [1, 3, 8, 64])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, tile: int, width: int) -> None:
    """A tile of fewer rows than the kernel is wide, of one row, of all."""
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((20, 2), (2, width), (2,))
    )
    dy = torch.randn(20, 2, dtype=torch.float64)

    def results() -> list[torch.Tensor]:
        y = causal_conv(x, weight, bias, (1, 4, 5, 19))
        return [y, *torch.autograd.grad(y, (x, weight, bias), dy)]

    whole = results()
    monkeypatch.setitem(conv_module.TILE_ELEMENTS, "cpu", 2 * tile)
    for a, b in zip(results(), whole, strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-13)


def test_16_bits_are_rounded_once() -> None:
    x, weight = torch.randn(50, 3).bfloat16(), torch.randn(3, 4).bfloat16()
    found = causal_conv(x, weight, None, (0, 50), activation=None)
    wanted = causal_conv(x.double(), weight.double(), None, (0, 50), activation=None)
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()
