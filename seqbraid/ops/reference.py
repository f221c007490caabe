"""The operations as they are defined: slow, plain, differentiable; what the fast ones are held to.

Shapes: T query tokens, S key tokens, H heads, D head dim, K key dim, V value dim, N segments.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .boundaries import Boundaries, as_boundaries


def gated_delta_recurrent(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Boundaries,
    initial_state_NHKV: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token: decay the state, correct what it predicts for k, read with q."""
    num_tokens, num_value_heads, value_dim = v_THV.shape
    num_key_heads, key_dim = k_THK.shape[1:]
    cu = as_boundaries(cu_seqlens, num_tokens)
    dtype = torch.float64 if v_THV.dtype == torch.float64 else torch.float32
    q_THK, k_THK, v, g, beta = (x.to(dtype) for x in (q_THK, k_THK, v_THV, g_TH, beta_TH))
    if qk_l2norm:
        q_THK, k_THK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q_THK, k_THK))
    group = num_value_heads // num_key_heads
    q = q_THK.repeat_interleave(group, dim=1) * (key_dim**-0.5 if scale is None else scale)
    k = k_THK.repeat_interleave(group, dim=1)

    out_HV = [v.new_zeros(num_value_heads, value_dim)] * num_tokens
    final_HKV = []
    for segment, (start, stop) in enumerate(pairwise(cu)):
        if initial_state_NHKV is None:
            state_HKV = v.new_zeros(num_value_heads, key_dim, value_dim)
        else:
            state_HKV = initial_state_NHKV[segment].to(dtype)
        for t in range(start, stop):
            state_HKV = state_HKV * g[t].exp()[:, None, None]
            predicted_HV = torch.einsum("hk,hkv->hv", k[t], state_HKV)
            delta_HV = beta[t][:, None] * (v[t] - predicted_HV)
            state_HKV = state_HKV + k[t][:, :, None] * delta_HV[:, None, :]
            out_HV[t] = torch.einsum("hk,hkv->hv", q[t], state_HKV)
        final_HKV.append(state_HKV)
    out_THV = torch.stack(out_HV) if out_HV else v_THV.to(dtype)
    final_NHKV = torch.stack(final_HKV) if final_HKV else v.new_zeros(0, num_value_heads, key_dim, value_dim)
    return out_THV.to(v_THV.dtype), final_NHKV


def attention_reference(
    q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, mask_TS: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention where `mask_TS` is True, with its log-sum-exp per head and query.

    Query head h uses KV head h // (query heads / KV heads). A query that sees no key gives 0 and -inf.
    """
    dtype = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    group = q_THD.shape[1] // k_SHD.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k_SHD, v_SHD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.to(dtype), k) * scale
    scores_HTS = scores_HTS.masked_fill(~mask_TS, float("-inf"))
    lse_HT = scores_HTS.logsumexp(-1)
    # -inf - (-inf) is no probability: a query without keys is compared with 0 instead.
    weights_HTS = (scores_HTS - lse_HT.masked_fill(lse_HT == float("-inf"), 0.0)[..., None]).exp()
    return torch.einsum("hts,shd->thd", weights_HTS, v).to(q_THD.dtype), lse_HT
