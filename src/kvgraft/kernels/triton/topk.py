"""Radix top-k with one program per row: histograms narrow the threshold, and one more pass writes
the columns above it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


def radix_topk(scores: Tensor, lengths: Tensor, k: int, tolerance: float, remap: bool) -> Tensor:
    """See `kvgraft.kernels.dispatch.radix_topk`. The result is in the order of the columns."""
    scores = scores.float().contiguous()
    indices = torch.full((len(scores), k), -1, dtype=torch.int64, device=scores.device)
    _radix[(len(scores),)](
        scores,
        lengths,
        indices,
        scores.shape[1],
        k,
        int(tolerance * k),
        REMAP=remap,
        TILE=TILE,
        num_warps=8,
    )
    return indices


def page_topk(
    scores: Tensor,
    rows: Tensor,
    tokens: Tensor,
    size: int,
    always: tuple[int, int],
    k: int,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """See `kvgraft.kernels.dispatch.page_topk`."""
    (leading, trailing), count = always, len(scores)
    tables = torch.empty(count, leading + k + trailing, dtype=torch.int64, device=scores.device)
    lengths = torch.empty(count, dtype=torch.int64, device=scores.device)
    _page_topk[(count,)](
        scores, rows, tokens, tables, lengths, scores.stride(0), rows.stride(0),
        k, int(tolerance * k), size, leading, trailing, tables.shape[1], REMAP=True, TILE=TILE,
        num_warps=8,
    )  # fmt: skip
    return tables, lengths


@triton.jit
def _load(scores, start, length, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return columns, their scores, and which of them exist."""
    column = start + tl.arange(0, TILE)
    score = tl.load(scores + column, mask=column < length, other=float("-inf"))
    return column, score, score > float("-inf")


@triton.jit
def _key(score):  # type: ignore[no-untyped-def]
    """Return a uint32 that ascends as the scores do."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _bin(score, least, scale, REMAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first digit, int32 from 0 to 255, which spreads scores evenly between the least
    and the greatest.
    """
    if REMAP:
        spread = (score - least) * scale
        return tl.where(spread == spread, tl.minimum(tl.maximum(spread, 0.0), 255.0), 0.0).to(
            tl.int32
        )
    return tl.zeros_like(score).to(tl.int32)


@triton.jit
def _threshold(  # type: ignore[no-untyped-def]
    scores, length, k, tolerated, REMAP: tl.constexpr, TILE: tl.constexpr
):
    """Find the k-th best of the first `length` scores.

    Returns the least score and the scale of bins, the bin, the leading bits of the key, the number
    of bits after them, the number of scores to choose among those equal by these bits, and the
    number of those.
    """
    least = float("inf")
    most = float("-inf")
    size = 0
    for start in range(0, length, TILE):
        _, score, there = _load(scores, start, length, TILE)
        least = tl.minimum(least, tl.min(tl.where(there, score, float("inf")), 0))
        most = tl.maximum(most, tl.max(score, 0))
        size += tl.sum(there.to(tl.int32), 0)

    scale = 255.0 / tl.maximum(most - least, 1.1754944e-38)
    missing = tl.minimum(size, k)
    shift = 32  # bits of the key below those that `prefix` fixes
    prefix = tl.zeros([], tl.uint32)
    first = 0  # the bin of the threshold
    digit = tl.arange(0, 256)

    for turn in tl.static_range(0 if REMAP else 1, 5):
        if (turn == 0) | ((missing > tolerated) & (missing < size)) | ((turn == 1) & (not REMAP)):
            counts = tl.zeros([256], tl.int32)
            for start in range(0, length, TILE):
                _, score, there = _load(scores, start, length, TILE)
                spread = _bin(score, least, scale, REMAP)
                if turn == 0:
                    value = spread
                    member = there
                else:
                    key = _key(score)
                    value = ((key >> (32 - 8 * turn)) & 255).to(tl.int32)
                    member = there & (spread == first)
                    if turn > 1:
                        member = member & ((key >> (40 - 8 * turn)) == prefix)
                counts += tl.histogram(value, 256, mask=member)
            from_top = tl.cumsum(counts, 0, reverse=True)
            threshold = tl.sum((from_top >= tl.maximum(missing, 1)).to(tl.int32), 0) - 1
            missing -= tl.sum(tl.where(digit > threshold, counts, 0), 0)
            size = tl.sum(tl.where(digit == threshold, counts, 0), 0)
            if turn == 0:
                first = threshold
            else:
                shift = 32 - 8 * turn
                prefix = (prefix << 8) | threshold.to(tl.uint32)

    return least, scale, first, prefix, shift, missing, size


@triton.jit
def _chosen(  # type: ignore[no-untyped-def]
    scores, start, length, least, scale, first, prefix, shift, missing, size, seen,
    REMAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the columns of a tile, which of them are chosen, and the number of scores equal to the
    threshold so far.
    """
    column, score, there = _load(scores, start, length, TILE)
    spread = _bin(score, least, scale, REMAP)
    top = (_key(score).to(tl.uint64) >> shift).to(tl.uint32)
    equal = there & (spread == first) & (top == prefix)
    rank = (seen + tl.cumsum(equal.to(tl.int32), 0)).to(tl.int64)
    sampled = rank * missing // tl.maximum(size, 1) > (rank - 1) * missing // tl.maximum(size, 1)
    chosen = there & ((spread > first) | ((spread == first) & (top > prefix)) | (equal & sampled))
    return column, chosen, seen + tl.sum(equal.to(tl.int32), 0)


@triton.jit
def _radix(  # type: ignore[no-untyped-def]
    scores, lengths, indices, num_columns, k, tolerated, REMAP: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * num_columns
    length = tl.minimum(tl.load(lengths + row), num_columns).to(tl.int32)
    least, scale, first, prefix, shift, missing, size = _threshold(
        scores, length, k, tolerated, REMAP, TILE
    )
    written = 0
    seen = 0

    for start in range(0, length, TILE):
        column, chosen, seen = _chosen(
            scores,
            start,
            length,
            least,
            scale,
            first,
            prefix,
            shift,
            missing,
            size,
            seen,
            REMAP,
            TILE,
        )
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices + row * k + place, column.to(tl.int64), mask=chosen & (place < k))
        written += tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def choose_pages(  # type: ignore[no-untyped-def]
    scores, rows, tokens, table, length, k, tolerated, size, leading, trailing, width,
    REMAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the table of pages of one sequence: its first and last blocks, and the k best blocks
    between.
    """
    total = tl.cdiv(tokens, size).to(tl.int32)
    begin = tl.minimum(leading, total)
    end = tl.maximum(begin, total - trailing)
    between = tl.minimum(end, tokens // size).to(tl.int32) - begin
    scores += begin
    least, scale, first, prefix, shift, missing, equals = _threshold(
        scores, between, k, tolerated, REMAP, TILE
    )
    written = begin
    seen = 0

    for start in range(0, between, TILE):
        column, chosen, seen = _chosen(
            scores,
            start,
            between,
            least,
            scale,
            first,
            prefix,
            shift,
            missing,
            equals,
            seen,
            REMAP,
            TILE,
        )
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        page = tl.load(rows + begin + column, mask=chosen, other=0)
        tl.store(table + place, page, mask=chosen & (place < begin + k))
        written += tl.sum(chosen.to(tl.int32), 0)

    written = tl.minimum(written, begin + k)
    count = written + total - end

    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        always = (place < begin) | (place >= written)
        block = tl.where(
            place < begin, place, tl.minimum(end + place - written, tl.maximum(total, 1) - 1)
        )
        page = tl.load(rows + block, mask=always & (place < width), other=0)
        tl.store(table + place, page, mask=always & (place < width))

    tl.store(length, (count * size - (total * size - tokens)).to(tl.int64))


@triton.jit
def _page_topk(  # type: ignore[no-untyped-def]
    scores, rows, tokens, tables, lengths, score_row, row_row, k, tolerated, size, leading,
    trailing, width,
    REMAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    choose_pages(
        scores + s * score_row, rows + s * row_row, tl.load(tokens + s), tables + s * width,
        lengths + s,
        k, tolerated, size, leading, trailing, width, REMAP, TILE,
    )  # fmt: skip
