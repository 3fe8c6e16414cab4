"""Block-sparse decode attention, flash decoding over a table of pages: a program a sequence and part of its tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.triton.tiles import parts_of, tile_of

SPLIT_TOKENS = 256  # tokens that one program reads, at least
MAX_SPLITS = 32


def block_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """See `kvgraft.kernels.dispatch.block_sparse_attention`; the last dimension of every tensor must be contiguous."""
    num_rows, group, head_dim = query.shape
    size, value_dim, dim = keys.shape[1], values.shape[2], triton.next_power_of_2(head_dim)
    tile = tile_of(dim)
    if group > tile:
        parts = parts_of(group, tile)
        split = query.reshape(num_rows * parts, group // parts, head_dim)
        tables, lengths = (part.repeat_interleave(parts, dim=0) for part in (tables, lengths))
        return block_sparse_attention(split, keys, values, tables, lengths, scale).view(num_rows, group, value_dim)
    splits = max(1, min(MAX_SPLITS, tables.shape[1] * size // SPLIT_TOKENS))
    output = torch.empty(splits, num_rows, group, value_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(splits, num_rows, group, dtype=torch.float32, device=query.device)
    _sparse[num_rows, splits](
        query, keys, values, output, weight, tables, lengths, scale,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], tables.stride(0),
        num_rows, group, head_dim, value_dim,
        WIDE=triton.knobs.runtime.interpret,  # where the interpreter multiplies bfloat16 as if it were integers
        SIZE=size, ROWS=max(16, triton.next_power_of_2(group)),
        TILE_TOKENS=tile, DIM=dim, VALUE_DIM=triton.next_power_of_2(value_dim),
    )  # fmt: skip
    joined = output[0] if splits == 1 else (output * weight.softmax(0)[..., None]).sum(0)
    return joined.to(query.dtype)


@triton.jit
def _sparse(  # type: ignore[no-untyped-def]
    query, keys, values, output, weight, tables, lengths, scale,
    query_row, query_head, key_page, key_token, value_page, value_token, table_row,
    num_rows, group, head_dim, value_dim,
    WIDE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One program: the queries of one sequence, a part of its tokens."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    value = tl.arange(0, VALUE_DIM)
    row_mask = head < group
    query_at = row * query_row + head[:, None] * query_head + dim[None]
    q = tl.load(query + query_at, mask=row_mask[:, None] & (dim < head_dim)[None], other=0.0)
    q = q.to(tl.float32) if WIDE else q

    total = tl.load(lengths + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(total, tl.num_programs(1)), TILE_TOKENS) * TILE_TOKENS
    best = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, total), TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        there = token < total
        page = tl.load(tables + row * table_row + token // SIZE, mask=there, other=0).to(tl.int64)
        key_at = page * key_page + (token % SIZE) * key_token
        k = tl.load(keys + key_at[:, None] + dim[None], mask=there[:, None] & (dim < head_dim)[None], other=0.0)
        k = k.to(tl.float32) if WIDE else k
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(there[None], logits, float("-inf"))
        value_at = page * value_page + (token % SIZE) * value_token
        inside = there[:, None] & (value < value_dim)[None]
        v = tl.load(values + value_at[:, None] + value[None], mask=inside, other=0.0)
        v = v.to(tl.float32) if WIDE else v
        greatest = tl.maximum(best, tl.max(logits, 1))
        shrink = tl.exp(best - greatest)
        weights = tl.exp(logits - greatest[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = greatest

    some = mass > 0
    attended = attended / tl.where(some, mass, 1.0)[:, None]
    total_weight = tl.where(some, best + tl.log(tl.where(some, mass, 1.0)), float("-inf"))
    out = (split.to(tl.int64) * num_rows + row) * group + head
    tl.store(weight + out, total_weight, mask=row_mask)
    tl.store(
        output + out[:, None] * value_dim + value[None], attended, mask=row_mask[:, None] & (value < value_dim)[None]
    )
