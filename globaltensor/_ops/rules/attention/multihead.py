"""Multi-head attention (Vaswani et al. 2017) for nn.MultiheadAttention and nn.Transformer layers.

torch's own body joins sequence and batch into one dim for the output projection, and batch and
heads for the masks. A split of the inner one of two joined dims cannot be kept. So the body here
keeps the dims separate: split sequences, batches and heads all pass through.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...._base import torch_private
from ..helpers import register
from ..notation import OpDescription

__all__: list[str] = []


def _multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None,
    bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the arguments' attention as ``F.multi_head_attention_forward`` does.

    query [l, n, e] or [l, e], key and value [s, n, e] or [s, e] -> (result like query, weights [n,
    l, s], or [n, h, l, s], or None).
    """
    single = query.ndim == 2
    if single:
        # An argument that is passed several times stays one tensor.
        batched = {id(t): t.unsqueeze(1) for t in (query, key, value)}
        query, key, value = (batched[id(t)] for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else in_proj_weight
    )
    q, k, v = _project_inputs(query, key, value, weights, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k, v = (
            torch.cat([t, b.expand(1, t.shape[1], t.shape[2])])
            for t, b in ((k, bias_k), (v, bias_v))
        )
    # [l, n, e] -> [n, h, l, d]
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    n, d = q.shape[0], q.shape[3]
    k = k if static_k is None else static_k.unflatten(0, (n, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (n, num_heads))
    if add_zero_attn:
        k, v = (torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in (k, v))
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = (
        None
        if causal
        else _merge_masks(attn_mask, key_padding_mask, n, num_heads, k.shape[2], q.dtype)
    )
    dropout = dropout_p if training else 0.0
    shares = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / d)) @ k.transpose(-2, -1)
        shares = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        out = shares @ v
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    if single:
        return out.squeeze(1), None if shares is None else shares.squeeze(0)
    return out, shares


def _project_inputs(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the three projections.

    One product computes several of them where their inputs are one tensor and their weights are one
    tensor.
    """
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if isinstance(weights, tuple):
        return tuple(
            F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True)
        )
    if query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, -1)
    if key is value:
        q_weight, rest = weights.split([query.shape[-1], 2 * query.shape[-1]])
        q_bias, rest_bias = (
            (None, None) if bias is None else bias.split([query.shape[-1], 2 * query.shape[-1]])
        )
        return F.linear(query, q_weight, q_bias), *F.linear(key, rest, rest_bias).chunk(2, -1)
    return tuple(
        F.linear(t, w, b)
        for t, w, b in zip((query, key, value), weights.chunk(3), biases, strict=True)
    )


def _merge_masks(
    attn_mask: Tensor | None,
    padding: Tensor | None,
    n: int,
    heads: int,
    keys: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return both masks as one that is added to the scores.

    Keys that were appended are visible.
    """
    both = None
    if attn_mask is not None:
        both = _additive_mask(attn_mask, keys, dtype)
        both = both if both.ndim == 2 else both.unflatten(0, (n, heads))
    if padding is not None:
        more = _additive_mask(padding, keys, dtype)[:, None, None, :]
        both = more if both is None else both + more
    return both


def _additive_mask(mask: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    more = keys - mask.shape[-1]
    return mask if more <= 0 else torch.cat([mask, mask.new_zeros(*mask.shape[:-1], more)], -1)


def _describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    op.compose(_multi_head_attention_forward)


register(F.multi_head_attention_forward, _describe)


def _never(op: OpDescription, *args: Any) -> None:
    op.composite = lambda *args: False


register(torch_private.admits_nesting, _never)
