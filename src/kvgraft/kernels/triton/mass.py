"""Sparse-Q scores in Triton without an attention matrix: one pass over the keys for the sums of
weights, one for shares.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.triton.tiles import score_tile, splits_of
from kvgraft.kernels.upload import upload


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    reduction: str,
    counts: Sequence[tuple[int, int]],
) -> Tensor:
    """See `kvgraft.kernels.dispatch.attention_mass`. One launch of each kernel serves all
    prompts.
    """
    if query.dtype is not keys.dtype:
        query, keys = query.float(), keys.float()

    (num_queries, num_heads, head_dim), (num_tokens, num_kv_heads) = query.shape, keys.shape[:2]
    size, dim = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    kept, passing, warps, stages = score_tile(dim, query.dtype)
    row_tiles, token_tiles = _tiles(counts, size, kept)
    splits = splits_of(
        query.device, len(row_tiles) * num_kv_heads, max(tokens for _, tokens in counts)
    )
    row_tiles, token_tiles = upload(query.device, row_tiles, token_tiles)
    weight = torch.empty(splits, num_queries, num_heads, dtype=torch.float32, device=query.device)
    given = (
        *query.stride()[:2],
        *keys.stride()[:2],
        num_queries * size,
        num_tokens,
        num_heads,
        head_dim,
    )
    constants = {
        "WIDE": triton.knobs.runtime.interpret, "SIZE": size, "DIM": dim, "num_warps": warps,
        "num_stages": stages
    }  # fmt: skip
    _weigh[len(row_tiles), num_kv_heads, splits](
        query,
        keys,
        positions,
        row_tiles,
        weight,
        scale,
        *given,
        TILE_ROWS=kept,
        TILE_TOKENS=passing,
        **constants,
    )
    total = weight.logsumexp(0) if splits > 1 else weight[0]
    mass = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=query.device)
    _receive[len(token_tiles), num_kv_heads](
        query, keys, positions, token_tiles, total, mass, scale, *given,
        SUM=reduction == "sum", TILE_ROWS=passing, TILE_TOKENS=kept, **constants,
    )  # fmt: skip
    return mass.sum(0) if reduction == "sum" else mass.amax(0)


def _tiles(counts: Sequence[tuple[int, int]], size: int, kept: int) -> tuple[Tensor, Tensor]:
    """Return the tiles of the two kernels.

    The first is int32 [n, 3]: rows [first, stop) and the first token of their prompt. The second is
    int32 [m, 5]: tokens [first, stop), the first token of their prompt and its queries [first,
    stop).
    """
    row_tiles, token_tiles = [], []
    num_queries, num_tokens = (
        np.cumsum([0, *column]).tolist() for column in zip(*counts, strict=True)
    )
    for begin, end, first, stop in zip(
        num_queries, num_queries[1:], num_tokens, num_tokens[1:], strict=False
    ):
        row_tiles += [(row, end * size, first) for row in range(begin * size, end * size, kept)]
        token_tiles += [(token, stop, first, begin, end) for token in range(first, stop, kept)]
    return torch.tensor(row_tiles, dtype=torch.int32), torch.tensor(token_tiles, dtype=torch.int32)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    query, positions, row, head, query_row, query_head, num_rows, head_dim,
    WIDE: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Load queries of a KV head's query heads, row by row, and their positions; -1 for missing
    rows.
    """
    dim, inside = tl.arange(0, DIM), row < num_rows
    at = tl.load(positions + row // SIZE, mask=inside, other=-1).to(tl.int32)
    where = (row // SIZE).to(tl.int64)[:, None] * query_row + (head * SIZE + row % SIZE)[
        :, None
    ] * query_head
    q = tl.load(query + where + dim[None], mask=inside[:, None] & (dim < head_dim)[None], other=0.0)
    return q.to(tl.float32) if WIDE else q, at


@triton.jit
def _tokens(  # type: ignore[no-untyped-def]
    keys,
    token,
    head,
    key_token,
    key_head,
    num_tokens,
    head_dim,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Load keys of a KV head."""
    dim = tl.arange(0, DIM)
    where = token.to(tl.int64)[:, None] * key_token + head.to(tl.int64) * key_head + dim[None]
    k = tl.load(
        keys + where, mask=(token < num_tokens)[:, None] & (dim < head_dim)[None], other=0.0
    )
    return k.to(tl.float32) if WIDE else k


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _weigh(  # type: ignore[no-untyped-def]
    query, keys, positions, tiles, weight, scale, query_row, query_head, key_token, key_head,
    num_rows, num_tokens, num_heads, head_dim,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """One program: the log-sum-exp of a part of the logits of some queries, for the query heads of
    one KV head.
    """
    tile, head, split = tiles + tl.program_id(0) * 3, tl.program_id(1), tl.program_id(2)
    row, last_row, begin = (
        tl.load(tile) + tl.arange(0, TILE_ROWS),
        tl.load(tile + 1),
        tl.load(tile + 2),
    )
    q, at = _rows(
        query, positions, row, head, query_row, query_head, last_row, head_dim, WIDE, SIZE, DIM
    )
    stop = tl.max(at, 0) + 1
    share = tl.cdiv(tl.cdiv(stop, tl.num_programs(2)), TILE_TOKENS) * TILE_TOKENS
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_ROWS], tl.float32)

    for start in range(split * share, tl.minimum((split + 1) * share, stop), TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        k = _tokens(keys, begin + token, head, key_token, key_head, num_tokens, head_dim, WIDE, DIM)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(token[None] <= at[:, None], logits, float("-inf"))
        greatest = tl.maximum(best, tl.max(logits, 1))
        safe = tl.where(greatest == float("-inf"), 0.0, greatest)
        mass = mass * tl.exp(best - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)
        best = greatest

    some = mass > 0
    total = tl.where(some, best + tl.log(tl.where(some, mass, 1.0)), float("-inf"))
    out = (
        (split.to(tl.int64) * (num_rows // SIZE) + row // SIZE) * num_heads
        + head * SIZE
        + row % SIZE
    )
    tl.store(weight + out, total, mask=row < last_row)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _receive(  # type: ignore[no-untyped-def]
    query, keys, positions, tiles, weight, mass, scale, query_row, query_head, key_token, key_head,
    num_rows, num_tokens, num_heads, head_dim, SUM: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """One program: the sum, or the maximum, of the attention that some keys of one KV head receive
    from all queries.
    """
    tile, head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    place, stop, begin = (
        tl.load(tile) + tl.arange(0, TILE_TOKENS),
        tl.load(tile + 1),
        tl.load(tile + 2),
    )
    first, token = tl.load(tile) - begin, place - begin  # relative to the prompt
    k = _tokens(keys, place, head, key_token, key_head, stop, head_dim, WIDE, DIM)
    # positions ascend: find the first query that sees any of these keys, so that no load of the
    # loop depends on a condition
    low, high = tl.load(tile + 3), tl.load(tile + 4)
    first_row, last_row = low * SIZE, high * SIZE
    while low < high:
        middle = (low + high) // 2
        before = tl.load(positions + middle) < first
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)

    received = tl.zeros([TILE_TOKENS], tl.float32)
    for start in range(
        first_row + (low * SIZE - first_row) // TILE_ROWS * TILE_ROWS, last_row, TILE_ROWS
    ):
        row = start + tl.arange(0, TILE_ROWS)
        q, at = _rows(
            query, positions, row, head, query_row, query_head, last_row, head_dim, WIDE, SIZE, DIM
        )
        total = tl.load(
            weight + (row // SIZE) * num_heads + head * SIZE + row % SIZE,
            mask=row < last_row,
            other=0,
        )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        share = tl.where(token[None] <= at[:, None], tl.exp(logits - total[:, None]), 0.0)
        received = received + tl.sum(share, 0) if SUM else tl.maximum(received, tl.max(share, 0))
    tl.store(mass + head * num_tokens + place, received, mask=place < stop)
