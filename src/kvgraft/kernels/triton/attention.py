"""SegPagedAttention in one Triton kernel: all heads of all prompts, each over the tokens it keeps, no mask tensor.

Keys are split over programs (flash decoding), so that a decode step fills the device; the parts are joined by their
log-sum-exp.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.layout import AttentionLayout, LayerHeads
from kvgraft.kernels.triton.tiles import parts_of, tile_of

SPLIT_TOKENS = 2048  # tokens that one program reads, at least
MAX_SPLITS = 64


def segpaged_attention(
    query: Tensor, keys: Tensor, values: Tensor, heads: LayerHeads, layout: AttentionLayout, scale: float
) -> Tensor:
    """See `kvgraft.kernels.dispatch.segpaged_attention`; the last dimension of every tensor must be contiguous."""
    num_rows, num_heads, head_dim = query.shape
    dim = triton.next_power_of_2(head_dim)
    tile, size = tile_of(dim), num_heads // len(heads.streams)
    if size > tile:
        parts = parts_of(size, tile)
        every = [head for head in range(len(heads.streams)) for _ in range(parts)]
        streams, lists = ([given[head] for head in every] for given in (heads.streams, heads.page_lists))
        heads = LayerHeads(tuple(streams), tuple(lists), tuple(heads.local[head] for head in every))
        size //= parts
    most = max(rows.stop - rows.start for rows in layout.rows) * size
    tile_rows = min(tile, triton.next_power_of_2(max(16, most)))
    tiles, slots = layout.query_tiles(max(1, tile_rows // size)), layout.stacked_slots
    splits = max(1, min(MAX_SPLITS, slots.shape[2] // SPLIT_TOKENS))
    output = torch.empty(splits, num_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    _segpaged[tiles.shape[0], len(heads.streams), splits](
        query, keys, values, output, weight, tiles, layout.query_positions, slots, _places(heads, query.device),
        scale, layout.sinks, layout.window, *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        num_rows, num_heads, head_dim, *slots.shape[1:], len(heads.streams),
        WIDE=triton.knobs.runtime.interpret,  # where the interpreter multiplies bfloat16 as if it were integers
        SIZE=size, TILE_ROWS=tile_rows, TILE_TOKENS=tile, DIM=dim,
    )  # fmt: skip
    joined = output[0] if splits == 1 else (output * weight.softmax(0)[..., None]).sum(0)
    return joined.to(query.dtype)


@lru_cache(maxsize=1024)
def _places(heads: LayerHeads, device: torch.device) -> Tensor:
    """int32 [3, Hkv]: list, stream and whether local, of each head."""
    return torch.tensor([heads.page_lists, heads.streams, heads.local], dtype=torch.int32).to(device)


@triton.jit
def _segpaged(  # type: ignore[no-untyped-def]
    query, keys, values, output, weight, tiles, positions, slots, places,
    scale, sinks, window, query_row, query_head, key_stream, key_slot, value_stream, value_slot,
    num_rows, num_heads, head_dim, num_lists, num_tokens, num_kv_heads,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one prompt, the query heads of one KV head, a part of the tokens it keeps."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    page_list = tl.load(places + head)
    stream = tl.load(places + num_kv_heads + head).to(tl.int64)
    is_local = tl.load(places + 2 * num_kv_heads + head) != 0
    own_slots = slots + (context * num_lists + page_list) * num_tokens

    row, dim = tl.arange(0, TILE_ROWS), tl.arange(0, DIM)
    row_mask = (row // SIZE) < count
    place = first + row // SIZE  # of the query among all rows
    at = tl.load(positions + place, mask=row_mask, other=-1)
    query_at = place.to(tl.int64)[:, None] * query_row + (head * SIZE + row % SIZE)[:, None] * query_head + dim[None]
    q = tl.load(query + query_at, mask=row_mask[:, None] & (dim < head_dim)[None], other=0.0)
    q = q.to(tl.float32) if WIDE else q

    stop = tl.load(positions + first + count - 1) + 1
    begin = tl.where(is_local, tl.maximum(tl.load(positions + first) - window + 1, sinks), 0)
    leading = tl.where(is_local, tl.minimum(sinks, stop), 0)  # sinks; what lies between them and `begin` is not read
    total = leading + tl.maximum(stop - begin, 0)
    share = tl.cdiv(tl.cdiv(total, tl.num_programs(2)), TILE_TOKENS) * TILE_TOKENS

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)
    attended = tl.zeros([TILE_ROWS, DIM], tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, total), TILE_TOKENS):
        number = start + tl.arange(0, TILE_TOKENS)
        token = tl.where(number < leading, number, begin + number - leading)
        slot = tl.load(own_slots + token, mask=number < total, other=-1).to(tl.int64)
        kept = slot >= 0
        inside = kept[:, None] & (dim < head_dim)[None]
        k = tl.load(keys + stream * key_stream + slot[:, None] * key_slot + dim[None], mask=inside, other=0.0)
        k = k.to(tl.float32) if WIDE else k
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = kept[None] & (token[None] <= at[:, None])
        seen = seen & ((not is_local) | (token[None] < sinks) | (token[None] > at[:, None] - window))
        logits = tl.where(seen, logits, float("-inf"))
        inside = inside & (tl.max(seen.to(tl.int32), 0) > 0)[:, None]  # weights of 0 do not heal what nobody wrote
        v = tl.load(values + stream * value_stream + slot[:, None] * value_slot + dim[None], mask=inside, other=0.0)
        v = v.to(tl.float32) if WIDE else v
        greatest = tl.maximum(best, tl.max(logits, 1))
        safe = tl.where(greatest == float("-inf"), 0.0, greatest)
        shrink, weights = tl.exp(best - safe), tl.exp(logits - safe[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = greatest

    some = mass > 0
    attended = attended / tl.where(some, mass, 1.0)[:, None]
    total_weight = tl.where(some, best + tl.log(tl.where(some, mass, 1.0)), float("-inf"))
    out = (split.to(tl.int64) * num_rows + place) * num_heads + head * SIZE + row % SIZE
    tl.store(weight + out, total_weight, mask=row_mask)
    tl.store(output + out[:, None] * head_dim + dim[None], attended, mask=row_mask[:, None] & (dim < head_dim)[None])
