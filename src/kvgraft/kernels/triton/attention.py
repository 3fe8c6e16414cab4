"""SegPagedAttention in one Triton kernel: all heads of all prompts, each over the tokens it keeps, no mask tensor.

Keys are split over programs (flash decoding), so that a decode step fills the device; the parts are joined by their
log-sum-exp. The beginning of a long prompt, a plain causal triangle for heads that see everything, goes to PyTorch's
attention, on a copy of its keys and values: to make it takes little beside what it is for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.triton.tiles import parts_of, places_of, splits_of, tile_of

TRIANGLE = 4096  # queries from which PyTorch's flash attention is faster, with the copy
FLASH_DIM, FLASH_CAPABILITY = 256, (8, 0)  # of heads, at most, and in eights; of devices, at least
JOINED = 8192  # numbers that a program joins at a time
LOG2E = tl.constexpr(1.4426950408889634)


def segpaged_attention(
    query: Tensor, keys: Tensor, values: Tensor, heads: LayerHeads, layout: AttentionLayout, scale: float
) -> Tensor:
    """See `kvgraft.kernels.dispatch.segpaged_attention`; the last dimension of every tensor must be contiguous."""
    openings = _openings(query, heads, layout)
    if sum(openings.values()) == len(query) and not heads.windowed:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    else:
        output = _paged(query, keys, values, heads, layout, scale, TRIANGLE if openings else None)
    queries, outputs = (x.unflatten(1, (len(heads.streams), -1)) for x in (query, output))  # [n, Hkv, G, d]
    for number, count in openings.items():
        rows = slice(layout.rows[number].start, layout.rows[number].start + count)
        for head_set in heads.whole:
            slots = layout.contexts[number].slots[head_set.page_list, :count]
            own_keys, own_values = (pool[head_set.streams].index_select(1, slots) for pool in (keys, values))
            asking = queries[rows, head_set.places]
            outputs[rows, head_set.places] = _triangle(asking, own_keys, own_values, scale)
    return output


def _openings(query: Tensor, heads: LayerHeads, layout: AttentionLayout) -> dict[int, int]:
    """By context the queries that go to flash attention: without it PyTorch would make the whole matrix of weights."""
    dim = query.shape[-1]
    if query.dtype is torch.float32 or dim > FLASH_DIM or dim % 8:
        return {}
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < FLASH_CAPABILITY:
        return {}
    openings, lists = layout.openings(TRIANGLE), {head_set.page_list for head_set in heads.whole}
    hold_all = all(layout.contexts[number].holds_all(page_list) for number in openings for page_list in lists)
    return openings if hold_all else {}


def _triangle(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [n, h, G, d], keys and values [h, n, d] -> the shape of `query`."""
    asking = query.flatten(1, 2).transpose(0, 1)  # [h * G, n, d]
    attended = scaled_dot_product_attention(
        asking[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1).unflatten(1, query.shape[1:3])


def _paged(
    query: Tensor, keys: Tensor, values: Tensor, heads: LayerHeads, layout: AttentionLayout, scale: float,
    triangle: int | None,
) -> Tensor:  # fmt: skip
    """Of all queries, but of openings of at least `triangle` only for heads that see a window."""
    num_rows, num_heads, head_dim = query.shape
    dim = triton.next_power_of_2(head_dim)
    most_rows, tile_tokens, warps = _tile_of(dim, query.dtype)
    size = num_heads // len(heads.streams)
    if size > most_rows:
        parts = parts_of(size, most_rows)
        every = [head for head in range(len(heads.streams)) for _ in range(parts)]
        streams, lists = ([given[head] for head in every] for given in (heads.streams, heads.page_lists))
        heads = LayerHeads(tuple(streams), tuple(lists), tuple(heads.local[head] for head in every))
        size //= parts
    most = max(rows.stop - rows.start for rows in layout.rows) * size
    tile_rows = min(most_rows, triton.next_power_of_2(max(16, most)))
    tiles, slots = layout.query_tiles(max(1, tile_rows // size), triangle), layout.stacked_slots
    most_work = max(1, len(heads.streams) - len(heads.windowed))  # heads that see everything
    splits = splits_of(query.device, len(tiles) * most_work, slots.shape[2])
    dtype = query.dtype if splits == 1 else torch.float32
    output = torch.empty(splits, num_rows, num_heads, head_dim, dtype=dtype, device=query.device)
    weight = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    _segpaged[len(tiles), len(heads.streams), splits](
        query, keys, values, output, weight, tiles, layout.query_positions, slots, places_of(heads, query.device),
        scale, layout.sinks, layout.window, *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        num_rows, num_heads, head_dim, *slots.shape[1:], len(heads.streams),
        WIDE=triton.knobs.runtime.interpret,  # where the interpreter multiplies bfloat16 as if it were integers
        SIZE=size, TILE_ROWS=tile_rows, TILE_TOKENS=tile_tokens, DIM=dim, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if splits == 1:
        return output[0]
    joined = torch.empty(num_rows, num_heads, head_dim, dtype=query.dtype, device=query.device)
    rows, most = num_rows * num_heads, triton.next_power_of_2(splits)
    tile = min(most, max(1, JOINED // dim))
    _join[(rows,)](output, weight, joined, splits, rows, head_dim, SPLITS=most, TILE=tile, DIM=dim)
    return joined


def _tile_of(dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows, tokens and warps of a program, so that no register spills (sm_90; tests/kernels/test_compiling.py)."""
    if triton.knobs.runtime.interpret:  # takes its time by program
        return tile_of(dim), tile_of(dim), 4
    if dtype is torch.float32:
        return 16, min(32, tile_of(dim)), 8
    return tile_of(dim), min(32, tile_of(dim)), 8 if dim > 256 else 4


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, slot, kept, seen, best, mass, attended, key_slot, value_slot, inner, needed, scale,
    WIDE: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """A tile of tokens more: `best`, `mass` and `attended` with those that are `seen`; values that are `needed`."""
    dim = tl.arange(0, DIM)
    k = tl.load(keys + slot[:, None] * key_slot + dim[None], mask=kept[:, None] & inner[None], other=0.0)
    k = k.to(tl.float32) if WIDE else k
    logits = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    v = tl.load(values + slot[:, None] * value_slot + dim[None], mask=needed[:, None] & inner[None], other=0.0)
    v = v.to(tl.float32) if WIDE else v
    greatest = tl.maximum(best, tl.max(logits, 1))
    safe = tl.where(greatest == float("-inf"), 0.0, greatest)
    shrink, weights = tl.exp2(best - safe), tl.exp2(logits - safe[:, None])
    mass = mass * shrink + tl.sum(weights, 1)
    attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return greatest, mass, attended


@triton.jit
def _seen(positions, first, count, is_local, sinks, window, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of what some queries see: the first token behind the sinks, how many sinks, how many tokens, and how many of
    these, in whole tiles, all queries see."""
    earliest, stop = tl.load(positions + first), tl.load(positions + first + count - 1) + 1
    begin = tl.where(is_local, tl.maximum(earliest - window + 1, sinks), 0)
    leading = tl.where(is_local, tl.minimum(sinks, stop), 0)  # what lies between them and `begin` is not read
    common = tl.where(is_local, 0, (earliest + 1) // TILE * TILE)
    return begin, leading, leading + tl.maximum(stop - begin, 0), common


@triton.jit(do_not_specialize=["sinks", "window", "num_rows", "num_tokens"])
def _segpaged(  # type: ignore[no-untyped-def]
    query, keys, values, output, weight, tiles, positions, slots, places,
    scale, sinks, window, query_row, query_head, key_stream, key_slot, value_stream, value_slot,
    num_rows, num_heads, head_dim, num_lists, num_tokens, num_kv_heads,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one prompt, the query heads of one KV head, a part of the tokens it keeps."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_local = tl.load(places + 2 * num_kv_heads + head) != 0
    if not is_local and tl.load(tiles + tile * 4 + 3) != 0:
        return
    context = tl.load(tiles + tile * 4).to(tl.int64)
    first, count = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    page_list, stream = tl.load(places + head), tl.load(places + num_kv_heads + head).to(tl.int64)
    own_slots = slots + (context * num_lists + page_list) * num_tokens
    own_keys, own_values = keys + stream * key_stream, values + stream * value_stream

    row, dim = tl.arange(0, TILE_ROWS), tl.arange(0, DIM)
    row_mask, inner = (row // SIZE) < count, dim < head_dim
    inside = row_mask[:, None] & inner[None]
    place = first + row // SIZE  # of the query among all rows
    at = tl.load(positions + place, mask=row_mask, other=-1)
    query_at = place.to(tl.int64)[:, None] * query_row + (head * SIZE + row % SIZE)[:, None] * query_head + dim[None]
    q = tl.load(query + query_at, mask=inside, other=0.0)
    q = q.to(tl.float32) if WIDE else q

    begin, leading, total, common = _seen(positions, first, count, is_local, sinks, window, TILE_TOKENS)
    share = tl.cdiv(tl.cdiv(total, tl.num_programs(2)), TILE_TOKENS) * TILE_TOKENS
    start, end = split * share, tl.minimum((split + 1) * share, total)
    common = tl.maximum(start, tl.minimum(end, common))
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    attended = tl.zeros([TILE_ROWS, DIM], tl.float32)
    for number in range(start, common, TILE_TOKENS):
        slot = tl.load(own_slots + number + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        kept = slot >= 0
        best, mass, attended = _attend(
            q, own_keys, own_values, slot, kept, kept[None], best, mass, attended, key_slot, value_slot, inner, kept,
            scale * LOG2E, WIDE, DIM,
        )  # fmt: skip
    for number in range(common, end, TILE_TOKENS):
        token = number + tl.arange(0, TILE_TOKENS)
        there = token < total
        token = tl.where(token < leading, token, begin + token - leading)
        slot = tl.load(own_slots + token, mask=there, other=-1).to(tl.int64)
        kept = slot >= 0
        seen = kept[None] & (token[None] <= at[:, None])
        seen = seen & ((not is_local) | (token[None] < sinks) | (token[None] > at[:, None] - window))
        needed = kept & (tl.max(seen.to(tl.int32), 0) > 0)  # weights of 0 do not heal what nobody wrote
        best, mass, attended = _attend(
            q, own_keys, own_values, slot, kept, seen, best, mass, attended, key_slot, value_slot, inner, needed,
            scale * LOG2E, WIDE, DIM,
        )  # fmt: skip

    some = mass > 0
    attended = attended / tl.where(some, mass, 1.0)[:, None]
    total_weight = tl.where(some, best + tl.log2(tl.where(some, mass, 1.0)), float("-inf"))
    out = (split.to(tl.int64) * num_rows + place) * num_heads + head * SIZE + row % SIZE
    tl.store(weight + out, total_weight, mask=row_mask)
    tl.store(output + out[:, None] * head_dim + dim[None], attended.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "num_rows"])
def _join(  # type: ignore[no-untyped-def]
    parts, weight, joined, splits, num_rows, head_dim, SPLITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr
):
    """One program: a row, from what each split has of it; weights are logarithms to base 2."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    split = tl.arange(0, SPLITS)
    every = tl.load(weight + split.to(tl.int64) * num_rows + row, mask=split < splits, other=float("-inf"))
    best = tl.max(every, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    mass = tl.sum(tl.exp2(every - best), 0)
    total = tl.zeros([DIM], tl.float32)
    for first in range(0, SPLITS, TILE):
        split = first + tl.arange(0, TILE)
        at = split.to(tl.int64) * num_rows + row
        own = tl.load(weight + at, mask=split < splits, other=float("-inf"))
        inside = (split < splits)[:, None] & (dim < head_dim)[None]
        part = tl.load(parts + at[:, None] * head_dim + dim[None], mask=inside, other=0.0)
        total += tl.sum(part * tl.exp2(own - best)[:, None], 0)
    total = total / tl.where(mass > 0, mass, 1.0)
    tl.store(joined + row * head_dim + dim, total.to(joined.dtype.element_ty), mask=dim < head_dim)
