"""Equal shares of a step's work (`kernels/workload.py`), planned on the device in one launch.

A chunk begins at each cut, and a cut is the beginning of a sequence or of a program. Sorted, the
cut of a sequence stands at its number plus the number of programs that begin before it. The cut of
a program stands at its number plus the number of sequences that begin before it or at it. So each
cut finds its own place, and the next cut, without a sort.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgraft.kernels.workload import Workload

TILE = 512
# Two entries of a tile for a thread: with four, Triton 3.6 spills 8 bytes.
WARPS = 8


def plan_work(counts: Tensor, unit: int, programs: int) -> Workload:
    """Plan as `kvgraft.kernels.workload.plan_work` does, for units of `unit` entries. `counts`,
    int64 [S], are on the planning device.
    """
    size, device = len(counts), counts.device
    chunks = torch.empty(programs + size, 3, dtype=torch.int32, device=device)
    begins, starts, first = (
        torch.empty(n + 1, dtype=torch.int32, device=device) for n in (programs, size, size)
    )
    _plan_work[(1,)](
        counts,
        starts,
        chunks,
        begins,
        first,
        unit,
        size,
        programs,
        STEPS=size.bit_length(),
        TILE=TILE,
        num_warps=WARPS,
    )
    return Workload(chunks, begins, first)


@triton.jit
def _up_to(starts, size, most, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of sequences that begin at a unit of at most `most`."""
    low, high = tl.zeros_like(most), tl.zeros_like(most) + size
    for _ in range(STEPS):
        middle = (low + high) // 2
        inside = low < high
        below = inside & (tl.load(starts + middle, mask=inside, other=0) <= most)
        high = tl.where(inside & ~below, middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _store(chunks, place, starts, cut, upto, following, inside):  # type: ignore[no-untyped-def]
    """Store the chunk from a cut to the following one. It belongs to the last sequence that begins
    at or before the cut.
    """
    sequence = upto - 1
    tl.store(chunks + 3 * place, sequence, mask=inside)
    tl.store(
        chunks + 3 * place + 1, cut - tl.load(starts + sequence, mask=inside, other=0), mask=inside
    )
    tl.store(chunks + 3 * place + 2, following - cut, mask=inside)


@triton.jit(do_not_specialize=["unit", "size"])
def _plan_work(  # type: ignore[no-untyped-def]
    counts,
    starts,
    chunks,
    begins,
    first,
    unit,
    size,
    programs,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: stores `starts`, the first unit of each sequence, then the chunks, and the first
    chunk of each program and sequence.
    """
    total = 0
    for number in range(0, size, TILE):
        s = number + tl.arange(0, TILE)
        units = tl.cdiv(tl.load(counts + s, mask=s < size, other=0), unit).to(tl.int32)
        tl.store(starts + s, total + tl.cumsum(units, 0) - units, mask=s < size)
        total += tl.sum(units, 0)
    tl.store(starts + size, total)
    tl.debug_barrier()

    share = tl.maximum(tl.cdiv(total, programs), 1)
    for number in range(0, programs, TILE):
        p = number + tl.arange(0, TILE)
        cut = tl.minimum(p * share, total)
        upto = _up_to(starts, size, cut, STEPS)
        following = tl.minimum(
            tl.minimum((p + 1) * share, total), tl.load(starts + upto, mask=p < programs, other=0)
        )
        _store(chunks, p + upto, starts, cut, upto, following, p < programs)
        before = tl.minimum(p, tl.cdiv(total, share)) + _up_to(starts, size, cut - 1, STEPS)
        tl.store(begins + p, before, mask=p < programs)
    for number in range(0, size, TILE):
        s = number + tl.arange(0, TILE)
        cut = tl.load(starts + s, mask=s < size, other=0)
        earlier = tl.minimum(tl.cdiv(cut, share), programs)
        following = tl.minimum(
            tl.minimum(earlier * share, total), tl.load(starts + s + 1, mask=s < size, other=0)
        )
        _store(
            chunks, s + earlier, starts, cut, _up_to(starts, size, cut, STEPS), following, s < size
        )
        tl.store(first + s, earlier + _up_to(starts, size, cut - 1, STEPS), mask=s < size)
    every = tl.cdiv(total, share) + _up_to(starts, size, total - 1, STEPS)
    tl.store(begins + programs, every)
    tl.store(first + size, every)
