"""Varlen paged causal attention and Sparse-Q scores in plain torch: the truth."""

import torch
from torch import Tensor

from kvgraft.kernels.layout import VarlenLayout


def varlen_attention(query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, scale: float) -> Tensor:
    """See `kvgraft.kernels.dispatch.varlen_attention`; one run (pseudo-sequence) at a time, in float32."""
    output = torch.empty_like(query)
    for context, rows in zip(layout.contexts, layout.rows, strict=True):
        for first, stop in context.runs:
            at = context.device_positions[first:stop]
            slots = context.slots[: int(at[-1]) + 1]
            run = slice(rows.start + first, rows.start + stop)
            weights = _probabilities(query[run], keys[slots], scale, at)  # [Hq, run, seq_len]
            expanded = values[slots].float().repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
            output[run] = torch.einsum("hnt,thd->nhd", weights, expanded).to(query.dtype)
    return output


def attention_mass(query: Tensor, keys: Tensor, positions: Tensor, scale: float, reduction: str) -> Tensor:
    """See `kvgraft.kernels.dispatch.attention_mass`; the whole attention matrix at once."""
    weights = _probabilities(query, keys, scale, positions)
    return weights.sum((0, 1)) if reduction == "sum" else weights.amax((0, 1))


def _probabilities(query: Tensor, keys: Tensor, scale: float, positions: Tensor) -> Tensor:
    """Causal softmax weights, float32 [Hq, n, T]."""
    groups = query.shape[1] // keys.shape[1]
    expanded = keys.float().repeat_interleave(groups, dim=1)  # [T, Hq, d]
    logits = torch.einsum("nhd,thd->hnt", query.float(), expanded) * scale
    future = torch.arange(keys.shape[0], device=keys.device)[None] > positions[:, None]  # [n, T]
    return logits.masked_fill(future, float("-inf")).softmax(-1)
