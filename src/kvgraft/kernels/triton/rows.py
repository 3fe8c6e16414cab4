"""Row operations of a decoder layer, apart from matrix products and attention, in one Triton kernel
each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.triton.tiles import places_of

# rows of a program. Programs of all heads of the same rows follow each other (L2: cos, sin)
ROWS = 8
# numbers of a row that a program of `_silu_mul` takes
WIDTH = 1024


def norm_rotate(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """See `kvgraft.kernels.rows.norm_rotate`."""
    num_rows, num_heads, head_dim = heads.shape
    turned = heads.new_empty(heads.shape)
    if num_rows:
        _norm_rotate[num_heads, triton.cdiv(num_rows, ROWS)](
            heads, weight, turned, cos, sin, eps, *heads.stride()[:2], num_rows, num_heads,
            head_dim // 2,
            ROWS=ROWS, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), NORM=weight is not None,
        )  # fmt: skip
    return turned


def write_rows(
    pools: tuple[Tensor, ...], rows: tuple[Tensor, ...], heads: LayerHeads, slots: Tensor
) -> None:
    """See `kvgraft.kernels.rows.write_rows`."""
    _move(pools, rows, heads, slots, reads=False)


def read_rows(pools: tuple[Tensor, ...], heads: LayerHeads, slots: Tensor) -> tuple[Tensor, ...]:
    """See `kvgraft.kernels.rows.read_rows`."""
    shape = slots.shape[1], len(heads.streams), pools[0].shape[-1]
    rows = tuple(pool.new_empty(shape) for pool in pools)
    _move(pools, rows, heads, slots, reads=True)
    return rows


def _move(
    pools: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    heads: LayerHeads,
    slots: Tensor,
    *,
    reads: bool,
) -> None:
    num_rows, num_heads, head_dim = rows[0].shape
    if num_rows:
        _move_rows[num_heads, triton.cdiv(num_rows, ROWS)](
            pools[0], pools[-1], rows[0], rows[-1], slots, places_of(heads, slots.device),
            *pools[0].stride()[:2],
            *rows[0].stride()[:2], *rows[-1].stride()[:2], slots.stride(0), num_rows, num_heads,
            head_dim,
            ROWS=ROWS, BLOCK_DIM=triton.next_power_of_2(head_dim), HAS_VALUES=len(pools) > 1,
            READS=reads,
        )  # fmt: skip


def add_norm(rows: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kvgraft.kernels.rows.add_norm`."""
    num_rows, size = rows.shape
    normed = torch.empty_like(rows)
    if num_rows:
        block = triton.next_power_of_2(size)
        warps = min(16, max(4, block // 512))
        _add_norm[(num_rows,)](
            rows, residual, weight, normed, eps, size, BLOCK=block, num_warps=warps
        )
    return rows, normed


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kvgraft.kernels.rows.silu_mul`."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    inner = gate_up.new_empty(num_rows, size)
    if num_rows:
        _silu_mul[num_rows, triton.cdiv(size, WIDTH)](
            gate_up, inner, gate_up.stride(0), size, WIDTH=WIDTH
        )
    return inner


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rotate(  # type: ignore[no-untyped-def]
    heads, weight, turned, cos, sin, eps, row_stride, head_stride, num_rows, num_heads, half,
    ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: one head of ROWS rows."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head, dim = tl.program_id(0), tl.arange(0, BLOCK_HALF)[None, :]
    inside = (row < num_rows) & (dim < half)
    at = heads + row * row_stride + head * head_stride + dim
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        weights = weight + head * 2 * half + dim
        first *= scale * tl.load(weights, mask=dim < half, other=0.0).to(tl.float32)
        second *= scale * tl.load(weights + half, mask=dim < half, other=0.0).to(tl.float32)

    c = tl.load(cos + row * half + dim, mask=inside, other=1.0)
    s = tl.load(sin + row * half + dim, mask=inside, other=0.0)
    to = turned + (row * num_heads + head) * 2 * half + dim
    tl.store(to, first * c - second * s, mask=inside)
    tl.store(to + half, second * c + first * s, mask=inside)


@triton.jit(do_not_specialize=["slots_stride", "num_rows"])
def _move_rows(  # type: ignore[no-untyped-def]
    keys, values, key_rows, value_rows, slots, places, stream_stride, slot_stride, key_row,
    key_head, value_row, value_head,
    slots_stride, num_rows, num_heads, head_dim,
    ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, HAS_VALUES: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of ROWS rows, from or to the pool."""
    row, head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(0)
    page_list = tl.load(places + head).to(tl.int64)
    stream = tl.load(places + num_heads + head).to(tl.int64)
    slot = tl.load(slots + page_list * slots_stride + row, mask=row < num_rows, other=-1)
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (slot >= 0)[:, None] & (dim < head_dim)
    at = stream * stream_stride + slot[:, None] * slot_stride + dim
    to = row[:, None] * key_row + head * key_head + dim
    if READS:
        tl.store(key_rows + to, tl.load(keys + at, mask=inside), mask=inside)
    else:
        tl.store(keys + at, tl.load(key_rows + to, mask=inside), mask=inside)
    if HAS_VALUES:
        to = row[:, None] * value_row + head * value_head + dim
        if READS:
            tl.store(value_rows + to, tl.load(values + at, mask=inside), mask=inside)
        else:
            tl.store(values + at, tl.load(value_rows + to, mask=inside), mask=inside)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    rows, residual, weight, normed, eps, size, BLOCK: tl.constexpr
):
    """One program: one row."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * size + dim, dim < size
    added = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    total = added.to(rows.dtype.element_ty)
    tl.store(rows + at, total, mask=inside)
    total = total.to(tl.float32)  # rounded as later readers will see it
    scale = tl.rsqrt(tl.sum(total * total, 0) / size + eps)
    weights = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, total * scale * weights, mask=inside)


@triton.jit
def _silu_mul(gate_up, inner, row_stride, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: WIDTH numbers of one row."""
    row, dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at, inside = gate_up + row * row_stride + dim, dim < size
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(inner + row * size + dim, gate * tl.sigmoid(gate) * up, mask=inside)
