"""SegPagedAttention in one Triton kernel, without a mask tensor: all heads of all prompts, each
over the tokens it keeps.

Keys are split over programs (flash decoding), so that a decode step fills the device. The parts are
joined by their log-sum-exp. For heads that see all tokens, long runs of queries go to PyTorch's
flash attention. It reads a copy of the keys and values, made once per layer, which costs little
compared with the attention.
"""

import logging
from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.kernels.heads import HeadSet, LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.long_runs import LongRuns, Run, Sequences
from kvgraft.kernels.reference.attention import varlen_attention
from kvgraft.kernels.triton.rows import read_rows
from kvgraft.kernels.triton.tiles import attention_tile, parts_of, places_of, splits_of
from kvgraft.kernels.workload import PROGRAMS_PER_CORE, programs_of

logger = logging.getLogger(__name__)
# least number of queries in a long run: a tile of flash attention; 0 turns flash attention off
RUN = 128
# queries at the beginning of a prompt from which PyTorch chooses how: on Hopper cuDNN, which makes
# a plan a length
TRIANGLE = 4096
FLASH_DTYPES = (torch.bfloat16, torch.float16)
# heads of at most this size, a multiple of 8; least compute capability of the device
FLASH_DIM, FLASH_CAPABILITY = 256, (8, 0)
# numbers that a program joins at a time
JOINED = 8192
LOG2E = tl.constexpr(1.4426950408889634)


def segpaged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: LayerHeads,
    layout: AttentionLayout,
    scale: float,
    output: Tensor | None = None,
) -> Tensor:
    """See `kvgraft.kernels.dispatch.segpaged_attention`. The last dimension of every tensor must be
    contiguous.
    """
    # `read_rows` needs equal strides
    same = keys.stride() == values.stride()
    runs = _long_runs(query, keys, heads, layout) if same else None
    if runs is None:
        return _paged(query, keys, values, heads, layout, scale, output=output)
    if output is None and len(heads.whole) == 1 and not heads.windowed:
        output = _flash(query, keys, values, heads.whole[0], runs, scale)
    else:
        output = (
            torch.empty_like(query, memory_format=torch.contiguous_format)
            if output is None
            else output
        )
        # [n, Hkv, G, d]
        queries, outputs = (x.unflatten(1, (len(heads.streams), -1)) for x in (query, output))
        for head_set in heads.whole:
            asking = queries[:, head_set.places]
            attended = _flash(asking.flatten(1, 2), keys, values, head_set, runs, scale)
            outputs[:, head_set.places] = attended.view(asking.shape)
    if heads.windowed or runs.other_rows.numel():
        _paged(query, keys, values, heads, layout, scale, runs, output)

    return output


def _long_runs(
    query: Tensor, keys: Tensor, heads: LayerHeads, layout: AttentionLayout
) -> LongRuns | None:
    """Return the runs for flash attention, or None. Flash attention must support the heads, and its
    tiles must fill the device.
    """
    dim, num_kv_heads = query.shape[-1], len(heads.streams)
    # query heads that see all tokens
    num_heads = query.shape[1] // num_kv_heads * (num_kv_heads - len(heads.windowed))
    if (
        not RUN
        or query.dtype not in FLASH_DTYPES
        or query.dtype is not keys.dtype
        or dim > FLASH_DIM
        or dim % 8
    ):
        return None
    if any(head_set.page_list >= layout.complete_lists for head_set in heads.whole):
        return None

    runs = layout.long_runs(RUN)
    if runs is None or runs.tiles(RUN) * num_heads < programs_of(query.device) // PROGRAMS_PER_CORE:
        return None

    return runs if not query.is_cuda or _has_flash(query.device) else None


@cache
def _has_flash(device: torch.device) -> bool:
    capable = torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
    return capable and torch.backends.cuda.is_flash_attention_available() and takes_runs(device)


def takes_runs(device: torch.device) -> bool:
    """Return whether PyTorch's flash attention computes runs that share keys. This is not
    documented, so it is tested.
    """
    runs = LongRuns(
        (Run(2, 34, 0, 50), Run(36, 100, 0, 130)), 101, torch.zeros(1, 130, dtype=torch.int64)
    )
    random = torch.Generator().manual_seed(0)
    shapes = ((101, 2, 128), (130, 1, 128), (130, 1, 128))  # queries, keys, values
    query, keys, values = (
        torch.randn(shape, generator=random).to(torch.bfloat16) for shape in shapes
    )
    here, there = (
        replace(runs, slots=runs.slots.to(own)).sequences(TRIANGLE) for own in ("cpu", device)
    )
    if here is None or there is None:
        raise AssertionError("there are runs")

    expected = varlen_attention(query, keys, values, here, 0.09)
    try:
        found = _varlen(query.to(device), keys.to(device), values.to(device), there, 0.09).cpu()
    except RuntimeError as error:
        logger.warning("flash attention is not used for long runs of queries: %s", error)
        return False

    rows = [row for run in runs.runs for row in range(run.start, run.stop)]
    agrees = torch.allclose(found[rows].float(), expected[rows].float(), atol=0.03)
    if not agrees:
        logger.warning(
            "flash attention is not used for long runs of queries: it computes them wrongly"
        )

    return agrees


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, head_set: HeadSet, runs: LongRuns, scale: float
) -> Tensor:
    """Attend from queries [n, h * G, d] of heads on the first list. Only the rows of runs are valid
    in the result.
    """
    streams = range(head_set.streams.start, head_set.streams.stop)
    heads = LayerHeads(
        tuple(streams), (head_set.page_list,) * len(streams), (False,) * len(streams)
    )
    own_keys, own_values = read_rows((keys, values), heads, runs.slots)  # [k, h, d]
    sequences = runs.sequences(TRIANGLE)
    if sequences is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    else:
        output = _varlen(query, own_keys, own_values, sequences, scale)

    for run in runs.runs:
        if run.opens and run.num_keys >= TRIANGLE:
            own = slice(run.first_key, run.first_key + run.num_keys)
            output[run.start : run.stop] = _triangle(
                query[run.start : run.stop], own_keys[own], own_values[own], scale
            )

    return output


def _varlen(
    query: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    """Attend from queries [n, Hq, d] to keys and values [k, Hkv, d], and return [n, Hq, d]. One
    launch serves all sequences.

    Sequences may share keys at `key_starts`, because PyTorch's flash attention (2) also gets their
    lengths.
    """
    if not query.is_cuda:
        return varlen_attention(query, keys, values, sequences, scale)
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, sequences.query_starts, sequences.key_starts,
        # no dropout, causal, nothing to debug
        sequences.longest_query, sequences.longest_keys, 0.0, True, False,
        scale=scale, seqused_k=sequences.num_keys,
    )[0]  # fmt: skip
    return attended.contiguous()


def _triangle(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend causally from queries [n, h * G, d] to keys and values [n, h, d]; the result has the
    shape of `query`.
    """
    asking, own_keys, own_values = (x.transpose(0, 1)[None] for x in (query, keys, values))
    attended = scaled_dot_product_attention(
        asking, own_keys, own_values, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _paged(
    query: Tensor, keys: Tensor, values: Tensor, heads: LayerHeads, layout: AttentionLayout,
    scale: float,
    runs: LongRuns | None = None, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from all queries. With `runs`, queries of runs are computed for local heads only, and
    `output` already has the others.
    """
    num_rows, num_heads, head_dim = query.shape
    dim = triton.next_power_of_2(head_dim)
    most_rows, tile_tokens, warps, stages = attention_tile(dim, query.dtype)
    size = num_heads // len(heads.streams)
    if size > most_rows:
        sharing = parts_of(size, most_rows)
        every = [head for head in range(len(heads.streams)) for _ in range(sharing)]
        streams, lists = (
            [given[head] for head in every] for given in (heads.streams, heads.page_lists)
        )
        heads = LayerHeads(tuple(streams), tuple(lists), tuple(heads.local[head] for head in every))
        size //= sharing

    most = max(rows.stop - rows.start for rows in layout.rows) * size
    tile_rows = min(most_rows, triton.next_power_of_2(max(16, most)))
    with_runs = runs is None or bool(heads.windowed)
    tiles, slots = (
        layout.query_tiles(max(1, tile_rows // size), runs, with_runs),
        layout.stacked_slots,
    )
    # number of heads that see all tokens
    most_work = max(1, len(heads.streams) - len(heads.windowed))
    splits = splits_of(query.device, len(tiles) * most_work, slots.shape[2])
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)

    rows = None if runs is None or with_runs else runs.other_rows
    # number of rows whose parts are joined
    num_parts = num_rows if rows is None else len(rows)
    parts, weight = output, output
    if splits > 1:
        parts = torch.empty(
            splits, num_parts, num_heads, head_dim, dtype=torch.float32, device=query.device
        )
        weight = torch.empty(splits, num_parts, num_heads, dtype=torch.float32, device=query.device)

    _segpaged[len(tiles), len(heads.streams), splits](
        query, keys, values, parts, weight, tiles, layout.query_positions, slots, places_of(heads,
        query.device),
        scale, layout.sinks, layout.window, *query.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2],
        num_parts, num_heads, head_dim, *slots.shape[1:], len(heads.streams),
        SPLIT=splits > 1,
        # the interpreter multiplies bfloat16 as if it were integers
        WIDE=triton.knobs.runtime.interpret,
        SIZE=size, TILE_ROWS=tile_rows, TILE_TOKENS=tile_tokens, DIM=dim, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        most = triton.next_power_of_2(splits)
        _join[(num_parts * num_heads,)](
            parts, weight, output, rows, splits, num_parts * num_heads, num_heads, head_dim,
            SPLITS=most, TILE=min(most, max(1, JOINED // dim)), DIM=dim, INTO=runs is not None,
        )  # fmt: skip

    return output


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, slot, kept, seen, best, mass, attended, key_slot, value_slot, inner, needed,
    scale,
    DIM: tl.constexpr
):  # fmt: skip
    """Add a tile of tokens to `best`, `mass` and `attended`. `seen` masks the logits, and `needed`
    masks the values.
    """
    dim = tl.arange(0, DIM)
    k = tl.load(
        keys + slot[:, None] * key_slot + dim[None], mask=kept[:, None] & inner[None], other=0.0
    )
    k = k.to(q.dtype)
    logits = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    v = tl.load(
        values + slot[:, None] * value_slot + dim[None],
        mask=needed[:, None] & inner[None],
        other=0.0,
    )
    v = v.to(q.dtype)
    greatest = tl.maximum(best, tl.max(logits, 1))
    safe = tl.where(greatest == float("-inf"), 0.0, greatest)
    shrink, weights = tl.exp2(best - safe), tl.exp2(logits - safe[:, None])
    mass = mass * shrink + tl.sum(weights, 1)
    attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return greatest, mass, attended


@triton.jit
def _seen(positions, first, count, is_local, sinks, window, split, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the range of tokens that some queries see.

    These are the first token after the sinks, the number of sinks, and the number of tokens; and
    for this split the beginning, the end of the whole tiles that all queries see, and the end.
    """
    earliest, stop = tl.load(positions + first), tl.load(positions + first + count - 1) + 1
    begin = tl.where(is_local, tl.maximum(earliest - window + 1, sinks), 0)
    # tokens between the sinks and `begin` are not read
    leading = tl.where(is_local, tl.minimum(sinks, stop), 0)
    total = leading + tl.maximum(stop - begin, 0)
    share = tl.cdiv(tl.cdiv(total, tl.num_programs(2)), TILE) * TILE
    start, end = split * share, tl.minimum((split + 1) * share, total)
    common = tl.where(is_local, 0, (earliest + 1) // TILE * TILE)
    return begin, leading, total, start, tl.maximum(start, tl.minimum(end, common)), end


@triton.jit
def _tile(tiles, split, num_rows, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile: its context, first row and rows, whether flash attention has them, and the
    place of the first result.
    """
    first = tl.load(tiles + 1)
    to = split * num_rows + tl.load(tiles + 4) if SPLIT else first
    return tl.load(tiles).to(tl.int64), first, tl.load(tiles + 2), tl.load(tiles + 3) != 0, to


@triton.jit(do_not_specialize=["sinks", "window", "num_rows", "num_tokens"])
def _segpaged(  # type: ignore[no-untyped-def]
    query, keys, values, output, weight, tiles, positions, slots, places,
    scale, sinks, window, query_row, query_head, key_stream, key_slot, value_stream, value_slot,
    num_rows, num_heads, head_dim, num_lists, num_tokens, num_kv_heads,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one prompt, the query heads of one KV head, and a part of the
    tokens that it keeps.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_local = tl.load(places + 2 * num_kv_heads + head) != 0
    context, first, count, is_run, to = _tile(tiles + tile * 5, split, num_rows, SPLIT)
    row = tl.arange(0, TILE_ROWS)
    row_mask = (row // SIZE) < count
    out = (to + row // SIZE).to(tl.int64) * num_heads + head * SIZE + row % SIZE
    if is_run and not is_local:
        if SPLIT:
            tl.store(weight + out, float("-inf"), mask=row_mask)
        return
    page_list, stream = tl.load(places + head), tl.load(places + num_kv_heads + head).to(tl.int64)
    own_slots = slots + (context * num_lists + page_list) * num_tokens
    own_keys, own_values = keys + stream * key_stream, values + stream * value_stream

    place, dim = first + row // SIZE, tl.arange(0, DIM)
    inner, inside = dim < head_dim, row_mask[:, None] & (dim < head_dim)[None]
    at = tl.load(positions + place, mask=row_mask, other=-1)
    query_at = (
        place.to(tl.int64)[:, None] * query_row
        + (head * SIZE + row % SIZE)[:, None] * query_head
        + dim[None]
    )
    q = tl.load(query + query_at, mask=inside, other=0.0)
    q = q.to(tl.float32) if WIDE else q

    begin, leading, total, start, common, end = _seen(
        positions, first, count, is_local, sinks, window, split, TILE_TOKENS
    )
    best, mass = tl.full([TILE_ROWS], float("-inf"), tl.float32), tl.zeros([TILE_ROWS], tl.float32)
    attended = tl.zeros([TILE_ROWS, DIM], tl.float32)
    for number in range(start, common, TILE_TOKENS):
        slot = tl.load(own_slots + number + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        kept = slot >= 0
        best, mass, attended = _attend(
            q, own_keys, own_values, slot, kept, kept[None], best, mass, attended, key_slot,
            value_slot, inner, kept,
            scale * LOG2E, DIM,
        )  # fmt: skip
    for number in range(common, end, TILE_TOKENS):
        nth = number + tl.arange(0, TILE_TOKENS)
        token = tl.where(nth < leading, nth, begin + nth - leading)
        slot = tl.load(own_slots + token, mask=nth < total, other=-1).to(tl.int64)
        kept = slot >= 0
        seen = kept[None] & (token[None] <= at[:, None])
        seen = seen & (
            (not is_local) | (token[None] < sinks) | (token[None] > at[:, None] - window)
        )
        # a weight of 0 does not hide NaN in unwritten memory
        needed = kept & (tl.max(seen.to(tl.int32), 0) > 0)
        best, mass, attended = _attend(
            q, own_keys, own_values, slot, kept, seen, best, mass, attended, key_slot, value_slot,
            inner, needed,
            scale * LOG2E, DIM,
        )  # fmt: skip

    some = mass > 0
    attended = attended / tl.where(some, mass, 1.0)[:, None]
    if SPLIT:
        total_weight = tl.where(some, best + tl.log2(tl.where(some, mass, 1.0)), float("-inf"))
        tl.store(weight + out, total_weight, mask=row_mask)
    tl.store(
        output + out[:, None] * head_dim + dim[None],
        attended.to(output.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["splits", "num_rows"])
def _join(  # type: ignore[no-untyped-def]
    parts, weight, joined, rows, splits, num_rows, num_heads, head_dim,
    SPLITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """One program: joins the splits' results for one head of a row; weights are logarithms to base
    2.

    The result goes to the row in `rows`, if given. With INTO, a row without any result keeps its
    previous value.
    """
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    split = tl.arange(0, SPLITS)
    every = tl.load(
        weight + split.to(tl.int64) * num_rows + row, mask=split < splits, other=float("-inf")
    )
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
    if rows is not None:
        row = tl.load(rows + row // num_heads).to(tl.int64) * num_heads + row % num_heads

    size = tl.where(mass > 0, head_dim, 0) if INTO else head_dim
    tl.store(joined + row * head_dim + dim, total.to(joined.dtype.element_ty), mask=dim < size)
