"""Block-sparse decode attention: flash decoding over tables of pages, in programs with equal shares
of all tokens.

A program goes through its sequences one after the other, and leaves a partial result for each. The
parts of a sequence are joined by their log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.triton.tiles import parts_of, tile_of
from kvgraft.kernels.triton.workload import plan_work
from kvgraft.kernels.workload import Lengths


def block_sparse_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    bound: Lengths | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `kvgraft.kernels.dispatch.block_sparse_attention`. The last dimension of every tensor
    must be contiguous.
    """
    num_rows, group, head_dim = query.shape
    keys, values = (pool if pool.dim() == 4 else pool[:, None] for pool in (keys, values))
    num_heads, size = keys.shape[1:3]
    value_dim, dim = values.shape[3], triton.next_power_of_2(head_dim)
    tile = tile_of(dim)
    parts = parts_of(group, tile)
    work = (bound or Lengths(lengths)).work(tile, parts, plan_work)
    left = torch.empty(len(work.chunks), group, value_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(len(work.chunks), group, dtype=torch.float32, device=query.device)
    width = {
        "VALUE_DIM": triton.next_power_of_2(value_dim),
        "ROWS": max(16, triton.next_power_of_2(group // parts)),
    }
    _sparse[work.num_programs, parts](
        query, keys, values, left, weight, tables, lengths, work.chunks, work.programs, scale,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables.stride(0),
        num_heads, group, group // parts, head_dim, value_dim,
        # the interpreter multiplies bfloat16 as if it were integers
        WIDE=triton.knobs.runtime.interpret,
        SIZE=size, TILE_TOKENS=tile, DIM=dim, **width,
        # registers of four warps hold 16 rows of at most 256 numbers of 16 bits
        num_warps=8 if query.dtype is torch.float32 or dim > 256 else 4,
    )  # fmt: skip
    output = torch.empty(num_rows, group, value_dim, dtype=query.dtype, device=query.device)
    _join[num_rows, parts](
        left, weight, output, work.sequences, sinks, 1 if sinks is None else len(sinks),
        group, group // parts, value_dim, **width,
    )  # fmt: skip
    return output


@triton.jit
def _sparse(  # type: ignore[no-untyped-def]
    query, keys, values, left, weight, tables, lengths, chunks, programs, scale,
    query_row, query_head, key_block, key_head, key_token, value_block, value_head, value_token,
    table_row,
    num_heads, group, own, head_dim, value_dim,
    WIDE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One program: `own` query heads and a share of the tokens."""
    program = tl.program_id(0)
    row_mask = tl.arange(0, ROWS) < own
    head = tl.program_id(1) * own + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    value = tl.arange(0, VALUE_DIM)
    for chunk in range(tl.load(programs + program), tl.load(programs + program + 1)):
        row = tl.load(chunks + 3 * chunk).to(tl.int64)
        begin = tl.load(chunks + 3 * chunk + 1) * TILE_TOKENS
        end = begin + tl.load(chunks + 3 * chunk + 2) * TILE_TOKENS
        total = tl.load(lengths + row).to(tl.int32)
        query_at = row * query_row + head[:, None] * query_head + dim[None]
        q = tl.load(query + query_at, mask=row_mask[:, None] & (dim < head_dim)[None], other=0.0)
        q = q.to(tl.float32) if WIDE else q
        best = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, VALUE_DIM], tl.float32)
        for start in range(begin, tl.minimum(end, total), TILE_TOKENS):
            token = start + tl.arange(0, TILE_TOKENS)
            there = token < total
            page = tl.load(tables + row * table_row + token // SIZE, mask=there, other=0).to(
                tl.int64
            )
            block, kv_head, place = page // num_heads, page % num_heads, token % SIZE
            key_at = block * key_block + kv_head * key_head + place * key_token
            k = tl.load(
                keys + key_at[:, None] + dim[None],
                mask=there[:, None] & (dim < head_dim)[None],
                other=0.0,
            )
            k = k.to(tl.float32) if WIDE else k
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            logits = tl.where(there[None], logits, float("-inf"))
            value_at = block * value_block + kv_head * value_head + place * value_token
            inside = there[:, None] & (value < value_dim)[None]
            v = tl.load(values + value_at[:, None] + value[None], mask=inside, other=0.0)
            v = v.to(tl.float32) if WIDE else v
            greatest = tl.maximum(best, tl.max(logits, 1))
            shrink = tl.exp(best - greatest)
            weights = tl.exp(logits - greatest[:, None])
            mass = mass * shrink + tl.sum(weights, 1)
            attended = attended * shrink[:, None] + tl.dot(
                weights.to(v.dtype), v, input_precision="ieee"
            )
            best = greatest

        some = mass > 0
        attended = attended / tl.where(some, mass, 1.0)[:, None]
        total_weight = tl.where(some, best + tl.log(tl.where(some, mass, 1.0)), float("-inf"))
        out = chunk * group + head
        tl.store(weight + out, total_weight, mask=row_mask)
        inside = row_mask[:, None] & (value < value_dim)[None]
        tl.store(left + out[:, None] * value_dim + value[None], attended, mask=inside)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    left,
    weight,
    output,
    sequences,
    sinks,
    num_sinks,
    group,
    own,
    value_dim,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """One program: `own` query heads of one sequence; writes zeros for a sequence without
    tokens. A sink is a part with the value zero.
    """
    row = tl.program_id(0)
    row_mask = tl.arange(0, ROWS) < own
    head = tl.program_id(1) * own + tl.arange(0, ROWS)
    value = tl.arange(0, VALUE_DIM)
    inside = row_mask[:, None] & (value < value_dim)[None]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = sinks + row % num_sinks * group + head
        best = tl.load(sink, mask=row_mask, other=float("-inf"))
        mass += 1.0
    joined = tl.zeros([ROWS, VALUE_DIM], tl.float32)

    for chunk in range(tl.load(sequences + row), tl.load(sequences + row + 1)):
        at = chunk * group + head
        logit = tl.load(weight + at, mask=row_mask, other=float("-inf"))
        part = tl.load(left + at[:, None] * value_dim + value[None], mask=inside, other=0.0)
        greatest = tl.maximum(best, logit)
        safe = tl.where(greatest == float("-inf"), 0.0, greatest)
        shrink, grow = tl.exp(best - safe), tl.exp(logit - safe)
        joined = joined * shrink[:, None] + part * grow[:, None]
        mass = mass * shrink + grow
        best = greatest

    joined = joined / tl.where(mass > 0, mass, 1.0)[:, None]
    out = row.to(tl.int64) * group + head
    tl.store(
        output + out[:, None] * value_dim + value[None],
        joined.to(output.dtype.element_ty),
        mask=inside,
    )
