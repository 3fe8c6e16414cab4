"""SegPagedAttention and Sparse-Q scores from batched matmul and flash attention. Also serves CUDA
without Triton.

Heads that see all tokens read the pool in place if their tokens are consecutive in it, else from a
copy made once per layer. Their queries go in chunks of ascending position, and a chunk attends only
to the keys up to its last query. So scattered tokens cost little more than their own share of the
triangle. Local heads read sinks and windows, in tiles.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.kernels.heads import LayerHeads, index_of
from kvgraft.kernels.layout import LONG_CONTEXT, AttentionLayout, Context, joined

# queries, with all heads, whose scores fit the CPU cache
SCORE_ROWS = 16
# tiles of windows that are copied at a time
TILES = 64


def segpaged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: LayerHeads,
    layout: AttentionLayout,
    scale: float,
    output: Tensor | None = None,
) -> Tensor:
    """See `kvgraft.kernels.dispatch.segpaged_attention`."""
    output = (
        torch.empty_like(query, memory_format=torch.contiguous_format) if output is None else output
    )
    # [n, Hkv, G, d]
    queries, outputs = (x.unflatten(1, (len(heads.streams), -1)) for x in (query, output))
    attend = _decode if layout.decodes else _prefill

    for head_set in heads.whole:
        outputs[:, head_set.places] = attend(
            queries[:, head_set.places],
            keys[head_set.streams],
            values[head_set.streams],
            head_set.page_list,
            layout,
            scale,
        )

    if heads.windowed:
        places = index_of(heads.windowed)
        outputs[:, places] = _windows(queries[:, places], keys, values, heads, layout, scale)

    return output


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    reduction: str,
    counts: Sequence[tuple[int, int]],
) -> Tensor:
    """See `kvgraft.kernels.dispatch.attention_mass`. Works in float32, on a few queries of all
    heads at a time.
    """
    queries, tokens = map(list, zip(*counts, strict=True))
    parts = zip(query.split(queries), keys.split(tokens), positions.split(queries), strict=True)
    found = [_mass(*part, scale, reduction) for part in parts]
    return joined(found)


def _mass(query: Tensor, keys: Tensor, positions: Tensor, scale: float, reduction: str) -> Tensor:
    """Return `attention_mass` of one prompt."""
    num_kv_heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
    # without the queries that see no key
    first_asking = int(torch.searchsorted(positions, 0))
    query, positions = query[first_asking:], positions[first_asking:]
    transposed = keys.float().permute(1, 2, 0).contiguous()  # [Hkv, d, T]
    # [Hkv, n, G, d]
    folded = (query.float() * scale).unflatten(1, (num_kv_heads, groups)).permute(1, 0, 2, 3)
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
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_list: int,
    layout: AttentionLayout,
    scale: float,
) -> Tensor:
    """Attend from queries [n, h, G, d] to keys and values [h, slots, d], and return [n, h, G, d].

    The heads see all tokens of their list.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for context, rows in zip(layout.contexts, layout.rows, strict=True):
        tokens = context.kept(page_list)[0]
        own_keys, own_values = _read(keys, values, context, page_list, layout, query.dtype)
        for start, stop in context.chunks:
            at = context.device_positions[start:stop]
            seen = int(torch.searchsorted(tokens, at[-1], right=True))
            asking = query[rows][start:stop].permute(1, 2, 0, 3)  # [h, G, c, d]
            chunk = stop - start
            if query.is_cpu and seen >= LONG_CONTEXT and seen > chunk == int(at[-1] - at[0]) + 1:
                attended = _run(asking, own_keys[:, :seen], own_values[:, :seen], scale)
            else:
                attended = scaled_dot_product_attention(
                    asking.flatten(0, 1)[None],
                    own_keys[None, :, :seen],
                    own_values[None, :, :seen],
                    attn_mask=None if seen == chunk else tokens[:seen] <= at[:, None],
                    # the beginning of the prompt is a plain causal triangle
                    is_causal=seen == chunk,
                    scale=scale,
                    enable_gqa=True,
                )[0].unflatten(0, asking.shape[:2])
            output[rows][start:stop] = attended.permute(2, 0, 1, 3)

    return output


def _run(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend from queries [h, G, c, d] of the last c tokens to keys and values [h, T, d], and
    return [h, G, c, d].

    Only the last c keys need a mask.
    """
    count = query.shape[2]
    folded = query.flatten(1, 2)[None]  # [1, h, G * c, d]
    future = (
        torch.full((count, count), float("-inf"), dtype=query.dtype)
        .triu(1)
        .repeat(query.shape[1], 1)
    )
    past = _flash(folded, keys[None, :, :-count], values[None, :, :-count], scale)
    own = _flash(folded, keys[None, :, -count:], values[None, :, -count:], scale, future)
    attended, weight = (torch.stack(pair) for pair in zip(past, own, strict=True))
    return _join(attended, weight)[0].unflatten(1, query.shape[1:3])


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_list: int,
    layout: AttentionLayout,
    scale: float,
) -> Tensor:
    """Attend as `_prefill` does, with one query per prompt."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for rows in layout.decode_buckets:
        context = layout.contexts[rows[0]]
        if context.seen >= LONG_CONTEXT and query.is_cpu:
            own_keys, own_values = _read(keys, values, context, page_list, layout, query.dtype)
            output[rows[0]] = _split(query[rows[0]], own_keys, own_values, scale)
            continue
        slots, real = layout.padded(rows, page_list)  # [b, T]
        copies = _copy(keys, values, slots.flatten(), layout, query.dtype)
        # [b, h, T, d]
        own_keys, own_values = (copy.unflatten(1, slots.shape).transpose(0, 1) for copy in copies)
        mask = None if real is None else real[:, None, None]
        part = list(rows)
        output[part] = scaled_dot_product_attention(
            query[part], own_keys, own_values, attn_mask=mask, scale=scale
        )

    return output


def _split(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend from one query [h, G, d] to keys and values [h, T, d], and return [h, G, d].

    The CPU cores share each head, because there may be fewer heads than cores.
    """
    parts = -(-torch.get_num_threads() // keys.shape[0])
    size = keys.shape[1] // parts
    whole = parts * size
    # [h, parts, t, d]
    by_part, their_values = (x[:, :whole].unflatten(1, (parts, size)) for x in (keys, values))
    attended, weight = _flash(
        query[:, None].expand(-1, parts, -1, -1), by_part, their_values, scale
    )
    if whole < keys.shape[1]:
        last, its_weight = _flash(
            query[:, None], keys[:, None, whole:], values[:, None, whole:], scale
        )
        attended, weight = (
            torch.cat((attended, last), dim=1),
            torch.cat((weight, its_weight), dim=1),
        )

    return _join(attended.transpose(0, 1), weight.transpose(0, 1))


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention [b, h, n, d], and the log-sum-exp of its logits, float32 [b, h, n]."""
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scale
    )
    return attended, weight


def _join(parts: Tensor, weight: Tensor) -> Tensor:
    """Join attention to parts of the keys, [parts, ..., d] with log weights [parts, ...], into
    attention to all keys, [..., d].
    """
    return (parts * weight.softmax(0)[..., None]).sum(0).to(parts.dtype)


def _windows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: LayerHeads,
    layout: AttentionLayout,
    scale: float,
) -> Tensor:
    """Attend from queries [n, h, G, d] to keys and values [streams, slots, d], and return [n, h, G,
    d].

    The heads see sinks and a window.
    """
    tiles = layout.windows(tuple(heads.page_lists[head] for head in heads.windowed))
    streams = torch.tensor([heads.streams[head] for head in heads.windowed], device=keys.device)
    rows, size = tiles.rows, query.shape[2]
    # a tile for each query, in order
    decodes = rows.shape[1] == 1
    attended = []

    for first in range(0, rows.shape[0], TILES):
        part = slice(first, first + TILES)
        slots = tiles.slots[:, part] + streams[:, None, None] * keys.shape[1]  # [h, w, k]
        copies = _copy(
            keys.flatten(0, 1)[None],
            values.flatten(0, 1)[None],
            slots.flatten(),
            layout,
            query.dtype,
        )
        # [w, h, k, d]
        own_keys, own_values = (
            copy[0].unflatten(0, slots.shape).transpose(0, 1) for copy in copies
        )
        asking = query[part, None] if decodes else query[rows[part]]
        folded = asking.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [w, h, G * r, d]
        visible = tiles.visible[part]
        # [w, 1 or h, G * r or 1, k]
        mask = visible if decodes else visible.repeat(1, 1, size, 1)
        result = scaled_dot_product_attention(
            folded, own_keys, own_values, attn_mask=mask, scale=scale
        )
        by_row = result.unflatten(2, (size, -1)).permute(0, 3, 1, 2, 4)  # [w, r, h, G, d]
        attended.append(by_row[:, 0] if decodes else by_row[tiles.real[part]])

    return torch.cat(attended)


def _read(
    keys: Tensor,
    values: Tensor,
    context: Context,
    page_list: int,
    layout: AttentionLayout,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [h, T, d] of a prompt in a list, in place if they are consecutive
    in the pool.
    """
    stretch = context.stretch(page_list)
    if stretch is None:
        return _copy(keys, values, context.kept(page_list)[1], layout, dtype)
    return keys[:, stretch].to(dtype), values[:, stretch].to(dtype)


def _copy(
    keys: Tensor, values: Tensor, slots: Tensor, layout: AttentionLayout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy keys and values [h, slots, d] at slots [t] to [h, t, d]. The result is valid until the
    next copy of the same size.
    """
    pools = (keys, values) if keys.is_contiguous() else (_side_by_side(keys, values),)
    if keys.dtype is not dtype or not pools[0].is_contiguous():
        # `index_select` would first copy the whole pool
        return keys[:, slots].to(dtype), values[:, slots].to(dtype)
    copies = []
    for number, pool in enumerate(pools):
        shape = (pool.shape[0], slots.numel(), pool.shape[2])
        room = layout.room(f"copy {number}", shape, dtype)
        copies.append(torch.index_select(pool, 1, slots, out=room))
    # of one pool the copy has key and value side by side, too
    own_keys, own_values = copies if len(copies) > 1 else copies[0].chunk(2, dim=-1)
    return own_keys, own_values


def _side_by_side(keys: Tensor, values: Tensor) -> Tensor:
    """Return rows [h, slots, 2 d] of keys, each followed by its value as in vLLM's caches; the keys
    [h, slots, d] if they lie elsewhere.
    """
    dim, itemsize = keys.shape[2], keys.element_size()
    if values.stride() != keys.stride() or values.data_ptr() != keys.data_ptr() + dim * itemsize:
        return keys
    return keys.as_strided((*keys.shape[:2], 2 * dim), keys.stride())
