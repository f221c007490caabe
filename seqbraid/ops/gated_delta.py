"""The gated delta rule over packed segments, computed chunk by chunk.

    S_t = exp(g_t) S_{t−1} + k_t u_tᵀ      u_t = β_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)      o_t = scale · S_tᵀ q_t

Over a segment the rule is affine in its state, S_out = M S_in + S0. `GatedDeltaCall` gives what a caller
needs that knows S_in only after others have told their M and S0, or has it at once: `gated_delta_rule`.
Backward keeps the inputs and the states that enter tiles of chunks.

Shapes: T rows, N segments, H heads (key heads of q and k, value heads of v, g and β), K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .boundaries import Boundaries, as_boundaries
from .comparison import largest_error, too_far
from .fla_status import fla_missing, fla_wrong
from .gated_delta_call import DEFAULTS, Gradients, RuleCall, RuleOptions
from .gated_delta_chunks import Chunking, Chunks, chain, chain_backward, tile_backward
from .gated_delta_fla import FlaGatedDeltaCall
from .gated_delta_qla import HEAD, HOPPER, QlaGatedDeltaCall, qla_missing
from .kernels import DEFAULT, Candidate, Kernels, Op, needs_16_bits_on_a_gpu


class GatedDeltaCall:
    """A `RuleCall` in torch, on any device."""

    def __init__(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        cu_seqlens: Boundaries,
        options: RuleOptions = DEFAULTS,
        kept: Sequence[Tensor] = (),
        opened: Sequence[int] = (),
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta = q_THK, k_THK, v_THV, g_TH, beta_TH
        self.cu = as_boundaries(cu_seqlens, len(v_THV))
        self.segments = tuple(pairwise(self.cu))
        self.key_dim, self.value_dim = k_THK.shape[2], v_THV.shape[2]
        self.options = options
        self.scale = self.key_dim**-0.5 if options.scale is None else options.scale
        self.kept = tuple(kept)

    def summaries(self, segments: Sequence[int], with_transition: bool) -> tuple[Tensor | None, Tensor]:
        """M [n, H, K, K] (None unless it is wanted) and S0 [n, H, K, V] of some segments.

        The rule treats the columns of the state alike and apart, so M is what becomes of the identity when no
        values are written.
        """
        columns = self.key_dim if with_transition else 0
        chunking = self._chunking(segments, self.value_dim + columns)
        start_KV = torch.eye(self.key_dim, columns, dtype=chunking.dtype, device=self.v.device)
        start_KV = F.pad(start_KV, (self.value_dim, 0))
        with self._without_autograd():
            state = chunking.sort_states(start_KV.expand(len(segments), self.v.shape[1], -1, -1))
            for tile in chunking.plan.tiles:
                c = Chunks.load(chunking, tile, self.k, self.v, self.g, self.beta)
                chain(c._replace(u0=F.pad(c.u0, (0, columns))), state[tile.segments], tile)
            S0, M = chunking.unsort_states(state).split([self.value_dim, columns], dim=-1)
        return M if with_transition else None, S0

    def forward(self, initial_NHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [T, H, V] in v's dtype, 0 outside all segments, and the final states [N, H, K, V]."""
        chunking = self._chunking()
        kept = []
        with self._without_autograd():
            out_THV = torch.zeros_like(self.v, memory_format=torch.contiguous_format)
            state = chunking.sort_states(self._states(initial_NHKV, chunking.dtype))
            for tile in chunking.plan.tiles:
                if not tile.starts_chain:
                    kept.append(state[tile.segments].clone())
                c = Chunks.load(chunking, tile, self.k, self.v, self.g, self.beta)
                q, _ = chunking.load_normed(self.q, tile)
                entering, u = chain(c, state[tile.segments], tile)
                o = (q * c.read) @ entering
                o += ((q @ c.k.mT) * c.decay) @ u
                chunking.store(o.mul_(self.scale), tile, out_THV)
            self.kept = tuple(kept)
            return out_THV, chunking.unsort_states(state)

    def entering_gradients(self, dout_THV: Tensor, segments: Sequence[int]) -> Tensor:
        """dS_in [n, H, K, V] of some segments where their final states have no gradient.

        It does not depend on the states or the values: with dS_out it is this plus Mᵀ dS_out.
        """
        chunking = self._chunking(segments)
        with self._without_autograd():
            dstate = chunking.sort_states(self._states(None, chunking.dtype)[: len(segments)])
            for tile in reversed(chunking.plan.tiles):
                c = Chunks.load(chunking, tile, self.k, self.v[..., :0], self.g, self.beta)
                q, _ = chunking.load_normed(self.q, tile)
                do = chunking.load(dout_THV, tile, chunking.group).mul_(self.scale)
                chain_backward(c, q, (q @ c.k.mT) * c.decay, do, dstate[tile.segments], tile)
            return chunking.unsort_states(dstate)

    def backward(
        self, dout_THV: Tensor, initial_NHKV: Tensor | None, dfinal_NHKV: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs and of the initial states, from those of the outputs and final states."""
        chunking = self._chunking()
        inputs = (self.q, self.k, self.v, self.g, self.beta)
        kept = list(self.kept)
        with self._without_autograd():
            initial_NHKV = self._states(initial_NHKV, chunking.dtype)
            dstate = chunking.sort_states(self._states(dfinal_NHKV, chunking.dtype))
            dq, dk, dv, dg, dbeta = grads = [
                torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs
            ]
            for tile in reversed(chunking.plan.tiles):
                if tile.starts_chain:
                    state = chunking.sort_states(initial_NHKV, tile.segments)
                else:
                    state = kept.pop().clone()
                c = Chunks.load(chunking, tile, self.k, self.v, self.g, self.beta)
                q, q_factor = chunking.load_normed(self.q, tile)
                do = chunking.load(dout_THV, tile, chunking.group).mul_(self.scale)
                found = tile_backward(c, q, q_factor, do, state, dstate[tile.segments], tile)
                for chunks, grad in zip(found, grads, strict=True):
                    chunking.store(chunks, tile, grad)
            return dq, dk, dv, dg, dbeta, chunking.unsort_states(dstate)

    def _chunking(self, segments: Sequence[int] | None = None, state_columns: int | None = None) -> Chunking:
        some = self.segments if segments is None else tuple(self.segments[i] for i in segments)
        columns = self.value_dim if state_columns is None else state_columns
        return Chunking.of(
            some, self.k, self.v, columns, self.options.qk_l2norm, chunk_size=self.options.chunk_size
        )

    def _states(self, states_NHKV: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The states, zeros that take no memory where they are absent."""
        shape = (len(self.segments), self.v.shape[1], self.key_dim, self.value_dim)
        if states_NHKV is None:
            return self.v.new_zeros(1, *shape[1:], dtype=dtype).expand(shape)
        if states_NHKV.shape != shape:
            raise ValueError(
                f"initial state {tuple(states_NHKV.shape)} must be [N, value heads, K, V] = {list(shape)}"
            )
        return states_NHKV

    @contextmanager
    def _without_autograd(self) -> Iterator[None]:
        """Nothing is recorded, and no product is taken in 16 bits."""
        with torch.no_grad(), torch.autocast(self.v.device.type, enabled=False):
            yield


def make_call(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Boundaries,
    options: RuleOptions = DEFAULTS,
    kept: Sequence[Tensor] = (),
    opened: Sequence[int] = (),
    kernels: Kernels = DEFAULT,
) -> RuleCall:
    """The call on the kernels that are chosen for these tensors; `opened` are the segments whose M and
    S0 are wanted.
    """
    _check_shapes(q_THK, k_THK, v_THV, g_TH, beta_TH, options.chunk_size)
    cu = as_boundaries(cu_seqlens, len(v_THV))
    call: RuleCall = CALLS[_chosen(k_THK, v_THV, cu, options, kernels)](
        q_THK, k_THK, v_THV, g_TH, beta_TH, cu, options, kept, opened
    )
    return call


class RuleNeed(NamedTuple):
    """What the rule is needed for."""

    device: torch.device
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    chunk_size: int = DEFAULTS.chunk_size
    key_heads: int = 16
    value_heads: int = 32
    has_empty: bool = False
    """Whether there is a segment without a token."""

    def __str__(self) -> str:
        return f"{self.dtype} heads of {self.key_dim} and {self.value_dim} on {self.device}"


def _unfit(need: RuleNeed) -> str | None:
    if any(n % 16 or n > 128 for n in (need.key_dim, need.value_dim)):
        return "it takes heads whose sizes are multiples of 16 up to 128"
    if need.chunk_size != 64:
        return "it takes chunks of 64 tokens only"
    return needs_16_bits_on_a_gpu(need)


def _unfit_for_qla(need: RuleNeed) -> str | None:
    if need.device.type == "cuda" and torch.cuda.get_device_capability(need.device) != HOPPER:
        return "its kernels are used on GPUs like the H100 and H200 only"
    if (need.key_dim, need.value_dim) != (HEAD, HEAD):
        return f"it takes heads of {HEAD} only"
    if need.has_empty:
        return "it miscounts the chunks behind an empty segment"
    return _unfit(need)


@cache
def _qla_wrong(need: RuleNeed) -> str | None:
    """What a comparison says; it compiles the kernels that are wanted then, for a minute or two."""
    return too_far(lambda: max(_qla_errors(need).values()), need.dtype)


def _qla_errors(need: RuleNeed) -> dict[str, float]:
    """How far each result of FlashQLA's kernels is from float64, with a state and without.

    On random numbers, of a generator of their own: the keys of `numbers` lie in a plane, where a chunk's
    inverse loses what it should not.
    """
    tokens, cu, opened = 330, (3, 4, 134, 330), (1, 2)
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    narrow, wide = [(tokens, h, HEAD) for h in (need.key_heads, need.value_heads)]
    shapes = (narrow, narrow, wide, wide[:2], wide[:2], wide)
    q, k, v, g, beta, dout = (random(shape).to(need.dtype) for shape in shapes)
    inputs = (q, k, v, -0.05 * g.float().abs(), beta.sigmoid())
    states = [random(len(cu) - 1, need.value_heads, HEAD, HEAD).float() / 4 for _ in range(2)]
    names = ("M", "S0", "out", "final", "dS_in", "dq", "dk", "dv", "dg", "dbeta", "dinitial")

    def run(kind: Any, move: Callable[[Tensor], Tensor], with_states: bool) -> list[Tensor]:
        initial, dfinal = (move(x) for x in states) if with_states else (None, None)
        call = kind(*map(move, inputs), cu, opened=opened)
        M, S0 = call.summaries(opened, True)
        found = [M, S0, *call.forward(initial)]
        back = kind(*map(move, inputs), cu, kept=call.kept, opened=opened)
        found += [back.entering_gradients(move(dout), opened), *back.backward(move(dout), initial, dfinal)]
        return found

    errors: dict[str, float] = {}
    with torch.no_grad():
        for with_states in (False, True):
            got = run(QlaGatedDeltaCall, lambda x: x.to(need.device), with_states)
            wanted = run(GatedDeltaCall, lambda x: x.double(), with_states)
            for name, a, b in list(zip(names, got, wanted, strict=True))[: None if with_states else -1]:
                errors[name] = max(errors.get(name, 0.0), largest_error([a], [b]))
    return errors


RULE = Op(
    "gated_delta",
    (
        Candidate("fla", _unfit, fla_missing, lambda need: fla_wrong(need.device)),
        Candidate("flash_qla", _unfit_for_qla, qla_missing, _qla_wrong),  # not timed in a model yet
        Candidate("torch"),
    ),
)

CALLS: dict[str, Any] = {"flash_qla": QlaGatedDeltaCall, "fla": FlaGatedDeltaCall, "torch": GatedDeltaCall}


def _chosen(k: Tensor, v: Tensor, cu: tuple[int, ...], options: RuleOptions, kernels: Kernels) -> str:
    """Whose kernels compute these rows."""
    if not len(v):
        return "torch"
    has_empty = any(stop == start for start, stop in pairwise(cu))
    need = RuleNeed(
        v.device, v.dtype, k.shape[2], v.shape[2], options.chunk_size, k.shape[1], v.shape[1], has_empty
    )
    return kernels.choose(RULE, need)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int) -> None:
    if k.dim() != 3 or v.dim() != 3 or q.shape != k.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit; pass q and k [T, "
            "key heads, K] and v [T, value heads, V]"
        )
    if k.shape[0] != v.shape[0] or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has {k.shape[0]} rows of {k.shape[1]} heads, v {v.shape[0]} rows of {v.shape[1]} heads; "
            "give both as many rows, and v a multiple of k's heads"
        )
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(
            f"g {tuple(g.shape)} and beta {tuple(beta.shape)} must be [T, value heads] = {list(v.shape[:2])}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be 1 or more; 64 suits most shapes")


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        cu: Boundaries,
        options: RuleOptions,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        call = make_call(q, k, v, g, beta, cu, options, kernels=kernels)
        out, final = call.forward(initial)
        ctx.save_for_backward(q, k, v, g, beta, initial, *call.kept)
        ctx.cu, ctx.options, ctx.kernels = as_boundaries(cu, len(v)), options, kernels
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        # Asked for once: a checkpointed call computes them again when they are.
        q, k, v, g, beta, initial, *kept = ctx.saved_tensors
        call = make_call(q, k, v, g, beta, ctx.cu, ctx.options, kept, kernels=ctx.kernels)
        *grads, dinitial = call.backward(dout, initial, dfinal)
        return *grads, None if initial is None else dinitial.to(initial.dtype), None, None, None


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Boundaries,
    *,
    initial_state_NHKV: Tensor | None = None,
    options: RuleOptions = DEFAULTS,
    kernels: Kernels = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """The outputs and final states of all segments, each run from its own initial state (zeros when absent).

    Value head h uses key head h // (value heads / key heads); g is the log of the decay, at most 0. Computed
    in float64 when v is, else in float32; the outputs have v's dtype, the states the computation's. Rows
    outside [cu[0], cu[-1]) are padding: 0 comes out, and no gradient goes back.
    """
    out_THV, final_state_NHKV = _GatedDelta.apply(  # type: ignore[no-untyped-call]
        q_THK,
        k_THK,
        v_THV,
        g_TH,
        beta_TH,
        initial_state_NHKV,
        cu_seqlens,
        options,
        kernels,
    )
    return out_THV, final_state_NHKV
