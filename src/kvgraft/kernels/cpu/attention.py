"""SegPagedAttention and Sparse-Q scores from batched matmul and SDPA; also serves CUDA without Triton.

Heads that see everything read the pool in place where their tokens lie in one stretch, else from a copy made once per
layer. Their queries go in chunks of ascending position, and a chunk attends only to the keys up to its last query:
scattered tokens cost little more than their own share of the triangle. Local heads read sinks and windows, in tiles.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.kernels.layout import LONG_CONTEXT, AttentionLayout, Context, HeadSet, LayerHeads

SCORE_ROWS = 16  # queries of all heads whose scores fit the cache
SPLITS = 8  # parts of a long context, so that the cores share one head
TILES = 64  # tiles of windows that are copied at a time


def segpaged_attention(
    query: Tensor, keys: Tensor, values: Tensor, heads: LayerHeads, layout: AttentionLayout, scale: float
) -> Tensor:
    """See `kvgraft.kernels.dispatch.segpaged_attention`."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    queries, outputs = (x.unflatten(1, (len(heads.streams), -1)) for x in (query, output))  # [n, Hkv, G, d]
    for own in heads.sets:
        pools = keys[own.streams], values[own.streams]  # [h, slots, d]
        part = queries if len(own.heads) == len(heads.streams) else queries[:, own.heads]
        attend = _windows if own.local else _decode if layout.decodes else _prefill
        outputs[:, own.heads] = attend(part, *pools, own, layout, scale)
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


def _prefill(
    query: Tensor, keys: Tensor, values: Tensor, own: HeadSet, layout: AttentionLayout, scale: float
) -> Tensor:
    """query [n, h, G, d], keys and values [h, slots, d] -> [n, h, G, d]; heads that see all that their list holds."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for context, rows in zip(layout.contexts, layout.rows, strict=True):
        tokens = context.kept(own.page_list)[0]
        own_keys, own_values = (_read(pool, context, own.page_list)[None] for pool in (keys, values))  # [1, h, T, d]
        folded = query[rows].flatten(1, 2).transpose(0, 1)[None]  # [1, h * G, n, d]
        for start, stop in context.chunks:
            at = context.device_positions[start:stop]
            seen = int(torch.searchsorted(tokens, at[-1], right=True))
            causal = seen == stop - start  # the prompt's own beginning: a plain causal triangle
            attended = scaled_dot_product_attention(
                folded[:, :, start:stop],
                own_keys[:, :, :seen],
                own_values[:, :, :seen],
                attn_mask=None if causal else tokens[:seen] <= at[:, None],
                is_causal=causal,
                scale=scale,
                enable_gqa=True,
            )  # [1, h * G, c, d]
            output[rows][start:stop] = attended[0].transpose(0, 1).unflatten(1, query.shape[1:3])
    return output


def _decode(query: Tensor, keys: Tensor, values: Tensor, own: HeadSet, layout: AttentionLayout, scale: float) -> Tensor:
    """As `_prefill`, with one query a prompt."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for rows in layout.decode_buckets:
        context = layout.contexts[rows[0]]
        if context.seen >= LONG_CONTEXT:
            own_keys, own_values = (_read(pool, context, own.page_list) for pool in (keys, values))  # [h, T, d]
            for head in range(keys.shape[0]):
                output[rows[0], head] = _split(query[rows[0], head], own_keys[head], own_values[head], scale)
            continue
        slots, real = layout.padded(rows, own.page_list)  # [b, T]
        own_keys, own_values = (_gather(pool, slots) for pool in (keys, values))
        mask = None if real is None else real[:, None, None]
        output[rows] = scaled_dot_product_attention(query[rows], own_keys, own_values, attn_mask=mask, scale=scale)
    return output


def _split(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [G, d], keys and values [T, d] -> [G, d]: the cores share one head by its tokens."""
    size = keys.shape[0] // SPLITS
    whole = size * SPLITS
    by_part = [x[:whole].unflatten(0, (SPLITS, size)) for x in (keys, values)]  # [S, t, d]
    scaled = query * scale
    logits = torch.bmm(scaled.expand(SPLITS, -1, -1), by_part[0].transpose(1, 2)).transpose(0, 1).flatten(1)
    weights = torch.cat((logits, scaled @ keys[whole:].T), dim=1).softmax(-1)  # [G, T]
    parts = weights[:, :whole].unflatten(1, (SPLITS, size)).transpose(0, 1)  # [S, G, t]
    return torch.bmm(parts, by_part[1]).sum(0) + weights[:, whole:] @ values[whole:]


def _windows(
    query: Tensor, keys: Tensor, values: Tensor, own: HeadSet, layout: AttentionLayout, scale: float
) -> Tensor:
    """As `_prefill`, for heads that see sinks and a window."""
    tiles, size = layout.window_tiles(own.page_list), query.shape[2]
    attended = []
    for part in torch.arange(tiles.rows.shape[0], device=query.device).split(TILES):
        own_keys, own_values = (_gather(pool, tiles.slots[part]) for pool in (keys, values))  # [w, h, k, d]
        folded = query[tiles.rows[part]].permute(0, 2, 3, 1, 4).flatten(2, 3)  # [w, h, G * r, d]
        mask = tiles.visible[part].repeat(1, size, 1)[:, None]  # [w, 1, G * r, k]
        result = scaled_dot_product_attention(folded, own_keys, own_values, attn_mask=mask, scale=scale)
        by_row = result.unflatten(2, (size, -1)).permute(0, 3, 1, 2, 4)  # [w, r, h, G, d]
        attended.append(by_row[tiles.real[part]])
    return torch.cat(attended)


def _read(pool: Tensor, context: Context, page_list: int) -> Tensor:
    """[h, T, d]: what a list holds of a prompt; in place where it lies in one stretch."""
    stretch = context.stretch(page_list)
    return pool.index_select(1, context.kept(page_list)[1]) if stretch is None else pool[:, stretch]


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """pool [h, slots, d] at slots [b, t] -> [b, h, t, d]."""
    return pool.index_select(1, slots.flatten()).unflatten(1, slots.shape).transpose(0, 1)
