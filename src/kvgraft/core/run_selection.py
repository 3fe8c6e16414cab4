"""Assignment of prompt positions to runs of known blocks. `unclaimed` holds 1 where a token may be
grafted."""

import heapq
from collections.abc import Iterator

import numpy as np

Run = tuple[int, int]  # blocks [first, stop)


def longest_first(
    starts: np.ndarray,
    ids: np.ndarray,
    ranks: np.ndarray,
    runs: np.ndarray,
    may_begin: np.ndarray,
    unclaimed: bytearray,
    block_size: int,
) -> Iterator[Run]:
    """Yield disjoint runs of candidate blocks, longest first, and claim their positions.

    Ties go to the run whose first block has the lowest rank, then start, then id. A run that has
    lost blocks to a longer one is cut, and its pieces compete again. Runs must begin with a block
    that may begin one (`may_begin`, bool [blocks]).

    Args:
        runs: candidates [first, stop), each of blocks that follow each other in the prompt: int [n,
            2].
    """

    def ranked(runs: np.ndarray) -> list[tuple[int, ...]]:
        first, stop = runs[may_begin[runs[:, 0]]].T
        columns = first - stop, ranks[first], starts[first], ids[first], first, stop
        return list(zip(*(column.tolist() for column in columns), strict=True))

    heap = ranked(runs)
    heapq.heapify(heap)
    while heap:
        *_, start, _, first, stop = heapq.heappop(heap)
        length = block_size * (stop - first)
        if unclaimed.find(0, start, start + length) < 0:
            unclaimed[start : start + length] = bytes(length)
            yield first, stop
            continue
        pieces = list(_open_blocks(unclaimed, start, stop - first, block_size))
        for piece in ranked(first + np.array(pieces, np.int64).reshape(-1, 2)):
            heapq.heappush(heap, piece)


def claim(unclaimed: bytearray, position: int, count: int, step: int) -> int:
    """Claim up to `count` unclaimed positions from this one on, by step (-1 or +1), and return how
    many."""
    if step > 0:
        taken = unclaimed.find(0, position, position + count)
        count = count if taken < 0 else taken - position
        unclaimed[position : position + count] = bytes(count)
    else:
        taken = unclaimed.rfind(0, position + 1 - count, position + 1)
        count = count if taken < 0 else position - taken
        unclaimed[position + 1 - count : position + 1] = bytes(count)
    return count


def _open_blocks(
    unclaimed: bytearray, start: int, num_blocks: int, block_size: int
) -> Iterator[Run]:
    """Yield runs of fully unclaimed blocks, among `num_blocks` blocks from position `start` on."""
    first, end = 0, start + block_size * num_blocks
    while first < num_blocks:
        begin = start + block_size * first
        taken = unclaimed.find(0, begin, end)
        stop = num_blocks if taken < 0 else first + (taken - begin) // block_size
        if first < stop:
            yield first, stop
        free = unclaimed.find(1, taken, end) if taken >= 0 else -1
        first = num_blocks if free < 0 else -((start - free) // block_size)
