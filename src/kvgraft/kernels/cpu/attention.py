"""Varlen paged causal attention and Sparse-Q scores from batched matmul and SDPA; also serves CUDA.

Each prompt's keys and values are gathered once per layer. Queries then go in chunks of ascending position, and a chunk
attends only to the keys up to its last query: scattered tokens cost little more than their own share of the triangle.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.kernels.layout import Context, VarlenLayout

SCORE_ROWS = 16  # queries of all heads whose scores fit the cache


def varlen_attention(query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, scale: float) -> Tensor:
    """See `kvgraft.kernels.dispatch.varlen_attention`."""
    if all(context.positions.numel() == 1 for context in layout.contexts):
        return _decode(query, keys, values, layout, scale)
    output = torch.empty_like(query)
    for context, rows in zip(layout.contexts, layout.rows, strict=True):
        slots = context.slots[: int(context.positions[-1]) + 1]
        own_keys, own_values = keys.index_select(0, slots), values.index_select(0, slots)  # [T, Hkv, d]
        _attend(query[rows], own_keys, own_values, context, scale, output[rows])
    return output


def attention_mass(query: Tensor, keys: Tensor, positions: Tensor, scale: float, reduction: str) -> Tensor:
    """See `kvgraft.kernels.dispatch.attention_mass`; in float32, a few queries of all heads at a time."""
    num_kv_heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
    transposed = keys.float().permute(1, 2, 0).contiguous()  # [Hkv, d, T]
    folded = (query.float() * scale).unflatten(1, (num_kv_heads, groups)).permute(1, 0, 2, 3)  # [Hkv, n, G, d]
    mass = torch.zeros(keys.shape[0], dtype=torch.float32, device=keys.device)
    here = torch.arange(keys.shape[0], device=keys.device)
    for start in range(0, positions.numel(), SCORE_ROWS):
        at = positions[start : start + SCORE_ROWS]
        first, seen = int(at[0]) + 1, int(at[-1]) + 1
        chunk = folded[:, start : start + SCORE_ROWS].flatten(1, 2)  # [Hkv, c * G, d]
        logits = torch.bmm(chunk, transposed[:, :, :seen])
        future = here[first:seen] > at.repeat_interleave(groups)[:, None]  # [c * G, seen - first]
        logits[:, :, first:].masked_fill_(future, float("-inf"))
        weights = logits.softmax(-1)
        if reduction == "sum":
            mass[:seen] += weights.sum((0, 1))
        else:
            mass[:seen] = torch.maximum(mass[:seen], weights.amax((0, 1)))
    return mass


def _attend(query: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float, output: Tensor) -> None:
    """query, output [n, Hq, d]; keys, values [T, Hkv, d]."""
    here = torch.arange(keys.shape[0], device=keys.device)
    query, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))  # [1, H, n or T, d]
    for start, stop in context.chunks:
        seen = int(context.positions[stop - 1]) + 1
        causal = seen == stop - start  # the prompt's own beginning: a plain causal triangle
        attended = scaled_dot_product_attention(
            query[:, :, start:stop],
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=None if causal else here[:seen] <= context.device_positions[start:stop, None],
            is_causal=causal,
            scale=scale,
            enable_gqa=True,
        )
        output[start:stop] = attended[0].transpose(0, 1)


def _decode(query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, scale: float) -> Tensor:
    """One query a prompt: prompts of similar length are padded together, so that there is no loop over requests."""
    output = torch.empty_like(query)
    for rows, slots, visible in layout.decode_buckets:
        size = slots.shape
        own_keys, own_values = (
            c.index_select(0, slots.flatten()).unflatten(0, size).transpose(1, 2) for c in (keys, values)
        )
        attended = scaled_dot_product_attention(
            query[rows][:, :, None],
            own_keys,
            own_values,
            attn_mask=visible[:, None, None],
            scale=scale,
            enable_gqa=True,
        )  # [b, Hq, 1, d]
        output[rows] = attended[:, :, 0]
    return output
