"""Our Triton kernels against plain maths."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from seqbraid.ops import cross_entropy_triton, gated_delta_triton, merge, merge_triton
from seqbraid.ops.cross_entropy import cross_entropy_rows
from seqbraid.ops.gated_delta import GatedDeltaCall
from tests.helpers.plain import relative
from tests.kernels.races import no_races

# The interpreter cuts numbers off to 16 bits where a GPU rounds them.
ONE_DIGIT = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
LOG2_E = 1.4426950408889634


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Equal, −inf too, but for the last digit of this precision."""
    finite = wanted.isfinite()
    off = (got - wanted)[finite].abs() <= ONE_DIGIT[dtype] * wanted[finite].abs() + 1e-6
    return bool(off.all()) and torch.equal(got[~finite], wanted[~finite])


@pytest.mark.parametrize(
    ("rows", "size"), [(slice(2, 40), 8), (slice(0, 1), 12), (slice(3, 1060), 8), ("some", 12), ("one", 8)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("into_dtype", [torch.bfloat16, torch.float32, None])
def test_sums_over_blocks(
    rows: slice | str, size: int, dtype: torch.dtype, into_dtype: torch.dtype | None
) -> None:
    """Of more rows than a program has, of less, and of rows that lie anywhere; in place, and elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens, num_heads = (1100, 1) if rows == slice(3, 1060) else (50, 3)
    if isinstance(rows, str):
        rows = torch.randperm(num_tokens, generator=generator)[: 37 if rows == "some" else 1]
    out, lse = random(num_tokens, num_heads, size).to(dtype), random(num_heads, num_tokens)
    n = len(out[rows])
    part, part_lse = random(n, num_heads, size).bfloat16(), 3 * random(num_heads, n)
    # Rows that no key was seen of: before, in this block, and in both.
    lse[0, rows] = torch.where(torch.arange(n) % 3 == 0, -torch.inf, lse[0, rows])
    out[:, 0][lse[0] == -torch.inf] = 0
    part_lse[0, ::2], part[::2, 0] = -torch.inf, 0
    for function in ("merge_rows", "add_rows"):
        results = []
        for kernels in (merge, merge_triton):
            total, sums = out.clone(), lse.clone()
            into = total if into_dtype is None else torch.full_like(out, 7.0, dtype=into_dtype)
            with no_races() as launched:
                if function == "merge_rows":
                    kernels.merge_rows(total, sums, rows, part, part_lse, into)
                else:
                    kernels.add_rows(total, rows, part, into)
            assert (len(launched) > 0) == (kernels is merge_triton)
            results.append((into.float(), sums))
        (wanted, wanted_lse), (got, got_lse) = results
        # Plain maths is never given rows that saw no key at all; the kernels give them 0.
        assert close(got, wanted.nan_to_num(0.0), into_dtype or dtype), function
        assert close(got_lse, wanted_lse, torch.float32), function


@pytest.mark.parametrize("num_columns", [1, 7, 4096, 4097, 9000])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_of_rows(num_columns: int, gradient: bool, dtype: torch.dtype) -> None:
    """Targets in any block, logits far from 0, several largest ones, and some that are −inf."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, num_columns, generator=generator)
    logits[1] += 300
    targets = torch.randint(0, num_columns, (6,), generator=generator)
    targets[0], targets[1] = num_columns - 1, 0
    logits[2] = logits[2].round().clamp(-3, 2)
    targets[2] = logits[2].argmax()
    logits[3] = logits[3].round().clamp(-3, 2)
    targets[3] = len(logits[3]) - 1 - logits[3].flip(0).argmax()  # not the first of the largest
    logits[4, : num_columns // 2] = -torch.inf
    targets[4] = num_columns - 1
    targets[5] = logits[5].argmax()
    logits = logits.to(dtype)
    wanted = cross_entropy_rows(logits.double(), targets, gradient)
    with no_races() as launched:
        losses, best, dlogits = cross_entropy_triton.cross_entropy_rows(logits.clone(), targets, gradient)
    assert launched == ["_rows_kernel"]
    torch.testing.assert_close(losses.double(), wanted.loss_C, rtol=1e-5, atol=1e-5)
    assert torch.equal(best, wanted.best_C)
    assert torch.equal(best == targets, wanted.correct_C)
    correct = best == targets
    assert correct[5] and correct[2] and (num_columns < 4096 or not correct[3])
    assert (dlogits is None) == (not gradient)
    if gradient:
        assert dlogits.dtype == dtype
        assert (dlogits.double() - wanted.dlogits_CV).norm() <= ONE_DIGIT[dtype] * wanted.dlogits_CV.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_of_rows_that_are_cut_over_ranks(dtype: torch.dtype) -> None:
    """Each part is given the largest logit and the sum of all parts; targets are in either."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, 9000, generator=generator)).to(dtype)
    logits[1] += 300
    logits[4, 4100:] = -torch.inf  # nothing of a row
    targets = torch.tensor([0, 4099, 4100, 8999, 7, int(logits[5].argmax())])
    wanted = cross_entropy_rows(logits.double(), targets, True).dlogits_CV
    top = logits.double().amax(1)
    total = (logits.double() - top[:, None]).exp().sum(1)
    for part in (slice(0, 4100), slice(4100, 9000)):
        own = logits[:, part].contiguous()
        with no_races() as launched:
            own_top, own_total, best = cross_entropy_triton.part_sums(own)
            columns = torch.where((targets >= part.start) & (targets < part.stop), targets - part.start, -1)
            dlogits = cross_entropy_triton.part_gradient(own.clone(), columns, top.float(), total.float())
        assert launched == ["_part_kernel", "_part_gradient_kernel"]
        assert torch.equal(own_top, own.float().amax(1)) and torch.equal(best, own.max(1).indices)
        below = (own.double() - own_top.double().clamp(min=-1e30)[:, None]).exp().sum(1)
        torch.testing.assert_close(own_total.double(), below, rtol=1e-5, atol=0)
        assert dlogits.dtype == dtype
        assert (dlogits.double() - wanted[:, part]).norm() <= ONE_DIGIT[dtype] * wanted.norm()


def chunk_parts(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: list[int]) -> tuple[Tensor, ...]:
    """W and U of `gated_delta_chunks.py`, and g summed inside chunks, to base 2: token by token,
    head by head.
    """
    group = v.shape[1] // k.shape[1]
    w, u, sums = k.new_zeros(*v.shape[:2], k.shape[2]), torch.zeros_like(v), torch.zeros_like(g)
    for rows in chunks(cu):
        for head in range(v.shape[1]):
            key, G, b = k[rows, head // group], g[rows, head].cumsum(0), beta[rows, head, None]
            n = (b * (key @ key.T) * (G[:, None] - G).exp()).tril(-1)
            solved = torch.linalg.inv(torch.eye(len(G), dtype=n.dtype, device=n.device) + n) * b.T
            w[rows, head], u[rows, head] = solved @ (G.exp()[:, None] * key), solved @ v[rows, head]
            sums[rows, head] = G * LOG2_E
    return w, u, sums


def outputs_du(q: Tensor, k: Tensor, g_sums: Tensor, dout: Tensor, cu: list[int], scale: float) -> Tensor:
    """What the outputs give U inside their chunk: (Q Kᵀ ∘ D)ᵀ dO."""
    group, du = dout.shape[1] // k.shape[1], torch.zeros_like(dout)
    for rows in chunks(cu):
        for head in range(dout.shape[1]):
            G = g_sums[rows, head] / LOG2_E
            a = (scale * q[rows, head // group] @ k[rows, head // group].T * (G[:, None] - G).exp()).tril()
            du[rows, head] = a.T @ dout[rows, head]
    return du


def chunks(cu: list[int]) -> list[slice]:
    """Rows of each chunk of each piece."""
    size = gated_delta_triton.CHUNK
    return [slice(i, min(i + size, stop)) for start, stop in pairwise(cu) for i in range(start, stop, size)]


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), (16, 64), (48, 16), (128, 128)])
def test_states_over_pieces(key_dim: int, value_dim: int) -> None:
    """Pieces of one token, of a chunk and one more, and rows before the first piece."""
    generator = torch.Generator().manual_seed(0)
    cu = [5, 6, 70, 134, 199, 360]
    shapes = [
        (360, 2, key_dim),
        (360, 2, key_dim),
        (360, 4, value_dim),
        (360, 4),
        (360, 4),
        (360, 4, value_dim),
    ]
    q, k, v, g, beta, dout = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta, scale = -0.05 * g.abs(), beta.sigmoid(), key_dim**-0.5
    plain = GatedDeltaCall(q, k, v, g, beta, tuple(cu))
    wanted = [4, 1, 0, 3]
    start, stop = (torch.tensor([cu[i + j] for i in wanted]) for j in (0, 1))
    w, u, sums = chunk_parts(k, v, g, beta, cu)
    du = outputs_du(q, k, sums, dout, cu, scale)
    low = [x.float().contiguous() for x in (q, k, w, u, sums, dout, du)]
    q32, k32, w32, u32, g32, dout32, du32 = low
    with no_races() as launched:
        M, S0 = gated_delta_triton.piece_summaries(k32, w32, u32, g32, start, stop)
        dS = gated_delta_triton.piece_entering_gradients(q32, k32, w32, g32, dout32, du32, start, stop, scale)
    assert len(launched) == 2
    wanted_M, wanted_S0 = plain.summaries(wanted, with_transition=True)
    assert wanted_M is not None
    for got, exact in ((M, wanted_M), (S0, wanted_S0), (dS, plain.entering_gradients(dout, wanted))):
        for piece in range(len(wanted)):
            assert relative(got[piece].double(), exact[piece]) < 1e-5


@triton.jit
def _racing_kernel(x, total, RACE: tl.constexpr):
    i = tl.program_id(0)
    lane = tl.arange(0, 128)
    if RACE == "between programs":
        tl.store(x + lane, tl.load(total + lane))
    elif RACE == "reads of a neighbour":
        tl.store(x + i * 128 + lane, tl.load(x + (1 - i) * 128 + lane))
    elif RACE == "copies in several warps":
        few = i * 128 + tl.arange(0, 16)
        tl.store(x + few, tl.load(x + few) + 1)
    elif RACE == "another shape":
        all_of_it = tl.sum(tl.load(x + i * 128 + lane), 0)
        tl.store(x + i * 128 + lane[:, None], tl.full([128, 1], 1.0, tl.float32) * all_of_it)
    else:
        tl.store(x + i * 128 + lane, tl.load(x + i * 128 + lane) + tl.load(total))


@pytest.mark.parametrize(
    ("race", "said"),
    [
        ("between programs", "write the same number"),
        ("reads of a neighbour", "reads what"),
        ("copies in several warps", r"writes \(16,\) where it has read \(16,\)"),
        ("another shape", r"writes \(128, 1\) where it has read \(128,\)"),
        ("none", None),
    ],
)
def test_races_are_found(race: str, said: str | None) -> None:
    x, total = torch.ones(256), torch.ones(128)
    expected = nullcontext() if said is None else pytest.raises(AssertionError, match=said)
    with expected, no_races():
        _racing_kernel[(2,)](x, total, RACE=race)
