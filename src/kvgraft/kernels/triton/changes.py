"""KV changes of recomputed tokens, and copies that apply them, in one Triton kernel each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.changes import Turn
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.triton.tiles import places_of

# rows of a program. Programs of all heads of the same rows follow each other (L2: cos, sin)
ROWS = 8
# anchors, or tokens, of a program that finds those nearby
NEARBY_ROWS = 64


def kv_changes(
    pools: tuple[Tensor, ...], heads: LayerHeads, new: tuple[Tensor, Turn], old: tuple[Tensor, Turn]
) -> Tensor:
    """See `kvgraft.kernels.changes.kv_changes`."""
    num_heads, num_rows, dim = len(heads.streams), new[0].shape[1], pools[0].shape[-1]
    changes = new[1][0].new_empty(num_heads, num_rows, dim * len(pools))
    _kv_changes[num_heads, triton.cdiv(num_rows, ROWS)](
        pools[0], pools[-1], changes, new[0], *new[1], old[0], *old[1], places_of(heads,
        changes.device),
        pools[0].stride(0), new[0].stride(0), old[0].stride(0), num_rows, num_heads, dim // 2,
        ROWS=ROWS, BLOCK_HALF=triton.next_power_of_2(dim // 2), HAS_VALUES=len(pools) > 1,
    )  # fmt: skip
    return changes


def average_changes(changes: Tensor, around: Tensor, weights: Tensor) -> Tensor:
    """See `kvgraft.kernels.changes.average_changes`."""
    num_heads, num_rows, width = changes.shape
    averaged = changes.new_empty(changes.shape)
    _average_changes[num_rows, num_heads](
        changes, averaged, around, weights, num_rows, width,
        AROUND=around.shape[1], BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return averaged


def copy_changed(
    pools: tuple[Tensor, ...],
    heads: LayerHeads,
    source: tuple[Tensor, Turn],
    target: tuple[Tensor, Turn],
    changes: Tensor,
    sides: Tensor,
    weights: Tensor,
) -> None:
    """See `kvgraft.kernels.changes.copy_changed`."""
    num_heads, dim, num_tokens = len(heads.streams), pools[0].shape[-1], source[0].shape[1]
    if num_tokens:
        _copy_changed[num_heads, triton.cdiv(num_tokens, ROWS)](
            pools[0], pools[-1], changes, source[0], *source[1], target[0], *target[1], sides,
            weights,
            places_of(heads, changes.device), pools[0].stride(0), source[0].stride(0),
            target[0].stride(0),
            sides.stride(0), num_tokens, changes.shape[1], num_heads, dim // 2,
            ROWS=ROWS, BLOCK_HALF=triton.next_power_of_2(dim // 2), HAS_VALUES=len(pools) > 1,
        )  # fmt: skip


def anchors_nearby(
    anchors: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor],
    distance: float,
    share: float,
    averaged: int,
    fewest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kvgraft.kernels.changes.anchors_nearby`. One launch."""
    (places, _), (others, _) = anchors, tokens
    count, num_tokens, width = len(places), len(others), 2 * averaged + 1
    around, sides = places.new_empty(count, width), places.new_empty(2, num_tokens)
    weights, behind = (torch.empty_like(part, dtype=torch.float32) for part in (around, sides[0]))
    parts = triton.cdiv(count, NEARBY_ROWS)
    _anchors_nearby[(parts + triton.cdiv(num_tokens, NEARBY_ROWS),)](
        *anchors, *tokens, around, weights, sides, behind,
        count, num_tokens, parts, count.bit_length(), distance, share,
        AVERAGED=averaged, FEWEST=fewest, ROWS=NEARBY_ROWS, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return around, weights, sides, behind


@triton.jit(do_not_specialize=["count", "num_tokens", "parts", "steps"])
def _anchors_nearby(  # type: ignore[no-untyped-def]
    places, segments, others, own, around, weights, sides, behind,
    count, num_tokens, parts, steps, distance, share,
    AVERAGED: tl.constexpr, FEWEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the averages of ROWS anchors, or the sides of ROWS tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) < parts:
        number = tl.arange(0, BLOCK)[None, :]
        written = (row < count)[:, None] & (number <= 2 * AVERAGED)
        wanted = row[:, None] + number - AVERAGED
        other = tl.minimum(tl.maximum(wanted, 0), count - 1)
        at = tl.load(places + row, mask=row < count, other=0)
        segment = tl.load(segments + row, mask=row < count, other=-1)
        same = tl.load(segments + other, mask=written, other=-1) == segment[:, None]
        away = tl.abs(tl.load(places + other, mask=written, other=0) - at[:, None])
        near = written & same & (other == wanted)
        decay = tl.where(near, tl.exp(-away.to(tl.float32) / distance), 0.0)
        out = row[:, None] * (2 * AVERAGED + 1) + number
        tl.store(around + out, other, mask=written)
        tl.store(weights + out, share * decay / tl.sum(decay, 1)[:, None], mask=written)
        return

    token = row - parts * ROWS
    there = token < num_tokens
    at = tl.load(others + token, mask=there, other=0)
    segment = tl.load(own + token, mask=there, other=-2)
    # number of anchors up to the token
    low, high = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + count
    for _ in range(steps):
        unknown, middle = low < high, (low + high) // 2
        is_before = tl.load(places + middle, mask=unknown, other=0) <= at
        low = tl.where(unknown & is_before, middle + 1, low)
        high = tl.where(unknown & (is_before == 0), middle, high)

    num_near = tl.zeros([ROWS], tl.int32)
    for offset in tl.static_range(-FEWEST, FEWEST):
        near = there & (low + offset >= 0) & (low + offset < count)
        near &= tl.load(segments + low + offset, mask=near, other=-1) == segment
        num_near += near.to(tl.int32)

    first, second = tl.maximum(low - 1, 0), tl.minimum(low, count - 1)
    has_first = (low > 0) & (tl.load(segments + first) == segment)
    has_second = (low < count) & (tl.load(segments + second) == segment)
    some = num_near >= FEWEST
    # An anchor itself, which is not copied, is no distance away.
    away = tl.maximum(tl.abs(tl.load(places + first) - at), 1).to(tl.float32)
    other_away = tl.maximum(tl.abs(tl.load(places + second) - at), 1).to(tl.float32)
    nearness = tl.where(has_first, 1.0 / away, 0.0)
    other = tl.where(has_second, 1.0 / other_away, 0.0)
    tl.store(sides + token, tl.where(some, first, -1), mask=there)
    tl.store(sides + num_tokens + token, tl.where(some, second, -1), mask=there)
    tl.store(behind + token, tl.where(some, other / (nearness + other), 0.0), mask=there)


@triton.jit
def _turned(first, second, c, s):  # type: ignore[no-untyped-def]
    """Rotate the halves of keys by cosine and sine."""
    return first * c - second * s, second * c + first * s


@triton.jit
def _loaded(keys, at, half, cos, sin, turn, inside, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load both halves of keys, rotated by the tables, or back."""
    first = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(keys + at + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + turn, mask=inside, other=1.0)
    s = tl.load(sin + turn, mask=inside, other=0.0)
    return _turned(first, second, c, -s if BACK else s)


@triton.jit(do_not_specialize=["new_stride", "old_stride", "num_rows"])
def _kv_changes(  # type: ignore[no-untyped-def]
    keys, values, changes, new, new_cos, new_sin, old, old_cos, old_sin, places,
    stream_stride, new_stride, old_stride, num_rows, num_heads, half,
    ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of ROWS rows."""
    row, head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(0)
    page_list = tl.load(places + head).to(tl.int64)
    stream = tl.load(places + num_heads + head).to(tl.int64) * stream_stride
    dim, there = tl.arange(0, BLOCK_HALF)[None, :], row < num_rows
    now = tl.load(new + page_list * new_stride + row, mask=there, other=0)
    was = tl.load(old + page_list * old_stride + row, mask=there, other=-1)
    inside = (was >= 0)[:, None] & (dim < half)
    now, was = stream + now[:, None] * 2 * half + dim, stream + was[:, None] * 2 * half + dim
    turn = row[:, None] * half + dim
    first, second = _loaded(keys, now, half, new_cos, new_sin, turn, inside, BACK=True)
    old_first, old_second = _loaded(keys, was, half, old_cos, old_sin, turn, inside, BACK=True)
    written = there[:, None] & (dim < half)
    if HAS_VALUES:
        to = changes + (head.to(tl.int64) * num_rows + row[:, None]) * 4 * half + dim
        third = tl.load(values + now, mask=inside, other=0.0).to(tl.float32)
        third -= tl.load(values + was, mask=inside, other=0.0).to(tl.float32)
        fourth = tl.load(values + now + half, mask=inside, other=0.0).to(tl.float32)
        fourth -= tl.load(values + was + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(to + 2 * half, third, mask=written)
        tl.store(to + 3 * half, fourth, mask=written)
    else:
        to = changes + (head.to(tl.int64) * num_rows + row[:, None]) * 2 * half + dim

    tl.store(to, first - old_first, mask=written)
    tl.store(to + half, second - old_second, mask=written)


@triton.jit(do_not_specialize=["num_rows"])
def _average_changes(  # type: ignore[no-untyped-def]
    changes, averaged, around, weights, num_rows, width, AROUND: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one row of one head."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start = tl.program_id(1).to(tl.int64) * num_rows
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(AROUND):
        other = tl.load(around + row * AROUND + number)
        weight = tl.load(weights + row * AROUND + number)
        total += weight * tl.load(
            changes + (start + other) * width + dim, mask=dim < width, other=0.0
        )
    tl.store(averaged + (start + row) * width + dim, total, mask=dim < width)


@triton.jit
def _between(before, behind, weight, at, inside):  # type: ignore[no-untyped-def]
    """Load a part of two rows of changes, interpolated."""
    first = tl.load(before + at, mask=inside, other=0.0)
    return first + weight * (tl.load(behind + at, mask=inside, other=0.0) - first)


@triton.jit(
    do_not_specialize=[
        "source_stride",
        "target_stride",
        "sides_stride",
        "num_tokens",
        "num_changes",
    ]
)
def _copy_changed(  # type: ignore[no-untyped-def]
    keys, values, changes, source, shift_cos, shift_sin, target, cos, sin, sides, weights, places,
    stream_stride, source_stride, target_stride, sides_stride, num_tokens, num_changes, num_heads,
    half,
    ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of ROWS tokens."""
    token, head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(0)
    page_list = tl.load(places + head).to(tl.int64)
    stream = tl.load(places + num_heads + head).to(tl.int64) * stream_stride
    dim, there = tl.arange(0, BLOCK_HALF)[None, :], token < num_tokens
    old = tl.load(source + page_list * source_stride + token, mask=there, other=-1)
    new = tl.load(target + page_list * target_stride + token, mask=there, other=0)
    left = tl.load(sides + token, mask=there, other=-1)
    right = tl.load(sides + sides_stride + token, mask=there, other=-1)
    weight = tl.load(weights + token, mask=there, other=0.0)[:, None]
    inside = (old >= 0)[:, None] & (dim < half)
    changed = inside & (left >= 0)[:, None]
    old, new = stream + old[:, None] * 2 * half + dim, stream + new[:, None] * 2 * half + dim
    width = 4 * half if HAS_VALUES else 2 * half
    before = changes + (head * num_changes + left[:, None]) * width + dim
    behind = changes + (head * num_changes + right[:, None]) * width + dim
    turn = token[:, None] * half + dim

    first, second = _loaded(keys, old, half, shift_cos, shift_sin, turn, inside, BACK=False)
    c = tl.load(cos + turn, mask=changed, other=1.0)
    s = tl.load(sin + turn, mask=changed, other=0.0)
    more, other = _turned(
        _between(before, behind, weight, 0, changed),
        _between(before, behind, weight, half, changed),
        c,
        s,
    )
    tl.store(keys + new, first + more, mask=inside)
    tl.store(keys + new + half, second + other, mask=inside)
    if HAS_VALUES:
        first = tl.load(values + old, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(values + old + half, mask=inside, other=0.0).to(tl.float32)
        first += _between(before, behind, weight, 2 * half, changed)
        second += _between(before, behind, weight, 3 * half, changed)
        tl.store(values + new, first, mask=inside)
        tl.store(values + new + half, second, mask=inside)
