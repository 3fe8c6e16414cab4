"""Which run of known blocks gets which positions of a prompt. `unclaimed` holds 1 where a token may be grafted."""

import heapq
from collections.abc import Iterator
from itertools import pairwise

import numpy as np


def longest_first(
    starts: list[int],
    ids: list[int],
    ranks: list[int],
    edges: list[int],
    may_begin: np.ndarray,
    unclaimed: bytearray,
    block_size: int,
) -> Iterator[tuple[int, int]]:
    """Yield disjoint runs [first, stop) of candidate blocks, longest first, and claim their positions. Of equally long
    ones the one comes first whose first block has the lowest rank, then start, then id.

    A run between two edges that has lost blocks to a longer one is cut; its pieces compete again. A run that begins
    with a block that may not begin one (`may_begin`, bool [blocks]) is none.
    """

    def is_open(block: int) -> bool:
        return unclaimed.find(0, starts[block], starts[block] + block_size) < 0

    def is_run(first: int, stop: int) -> bool:
        return first < stop and bool(may_begin[first])

    runs = [(first, stop) for first, stop in pairwise(edges) if is_run(first, stop)]
    heap = [(first - stop, ranks[first], starts[first], ids[first], first, stop) for first, stop in runs]
    heapq.heapify(heap)
    while heap:
        *_, first, stop = heapq.heappop(heap)
        lost = [block for block in range(first, stop) if not is_open(block)]
        if not lost:
            unclaimed[starts[first] : starts[stop - 1] + block_size] = bytes(block_size * (stop - first))
            yield first, stop
            continue
        for before, after in pairwise([first - 1, *lost, stop]):
            piece = before + 1
            if is_run(piece, after):
                heapq.heappush(heap, (piece - after, ranks[piece], starts[piece], ids[piece], piece, after))


def grow(block: np.ndarray, tokens: np.ndarray, unclaimed: bytearray, position: int, step: int) -> int:
    """Claim positions from position on, by step, while they are unclaimed and equal the block's tokens; how many."""
    count = 0
    for token in block:
        if not 0 <= position < len(tokens) or not unclaimed[position] or tokens[position] != token:
            break
        unclaimed[position] = 0
        position, count = position + step, count + 1
    return count
