"""What a program of a kernel takes at a time, how many share the tokens of one sequence, and where
heads lie."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.workload import programs_of

MOST = 64  # tokens, and rows of queries
ENTRIES = 8192  # of a tile of more than 16: shared memory holds several
LEAST_SPLIT = 256  # tokens that one program reads, at least
MOST_SPLITS = 64


class Tile(NamedTuple):
    """What a program takes: rows of queries and tokens at a time, warps, and stages of loads that
    overlap."""

    rows: int
    tokens: int
    warps: int
    stages: int


def tile_of(dim: int) -> int:
    """Tokens, and rows of queries, whose heads are padded to `dim`."""
    return max(16, min(MOST, ENTRIES // dim))


def attention_tile(dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of attention for heads padded to `dim`.

    Compiled for sm_90 no register spills (tests/kernels/test_compiling.py). At 16 bits and size 128
    a thread has 254 registers, so two programs share a multiprocessor whatever memory they take.
    The third stage, 256 bytes more, loads slots ahead, too: keys and values wait for them. More
    rows or tokens spill: 24 bytes a thread at 128 rows, 80 at 64 tokens. In float32, without tensor
    cores, the third stage spills."""
    size = tile_of(dim)
    if triton.knobs.runtime.interpret:  # takes its time by program
        return Tile(size, size, 4, 1)
    if dtype is torch.float32:
        return Tile(16, min(32, size), 8, 2)
    return Tile(size, min(32, size), 4 if dim <= 128 else 8, 3)


def score_tile(dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of Sparse-Q scores: `rows` of what a program keeps, `tokens` of what passes
    by.

    Nothing but logits is kept, so that registers allow 128 rows at 16 bits: what passes by is read
    half as often from the L2 cache, which would otherwise limit the tensor cores. Two programs of
    eight warps share a multiprocessor (128 registers a thread, 80 KB). In float32 loads are not
    overlapped, because that spills."""
    size = tile_of(dim)
    if triton.knobs.runtime.interpret:
        return Tile(size, size, 4, 1)
    if dtype is torch.float32:
        return Tile(16, min(32, size), 8, 1)
    return Tile(2 * size, size, 8, 3)


def parts_of(group: int, rows: int) -> int:
    """How many equal parts of at most `rows` the query heads of a KV head are cut into."""
    return next(
        parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= rows
    )


def splits_of(device: torch.device, programs: int, num_tokens: int) -> int:
    """Into how many parts tokens are cut, so that there are programs enough for a device."""
    return max(1, min(MOST_SPLITS, programs_of(device) // programs, num_tokens // LEAST_SPLIT))


@cache  # graphs of decode steps read it where it is
def places_of(heads: LayerHeads, device: torch.device) -> Tensor:
    """Return the page list, the stream and whether it is local, of each KV head: int32 [3, Hkv] on
    the device."""
    return torch.tensor([heads.page_lists, heads.streams, heads.local], dtype=torch.int32).to(
        device
    )
