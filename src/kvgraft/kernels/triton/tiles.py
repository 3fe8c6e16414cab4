"""Tiles of kernels, the number of programs that share a sequence's tokens, and the places of
heads.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.workload import programs_of

# largest number of tokens, and of query rows
MOST = 64
# entries of a tile with more than 16 rows; shared memory holds several tiles
ENTRIES = 8192
# least number of tokens that one program reads
LEAST_SPLIT = 256
MOST_SPLITS = 64


class Tile(NamedTuple):
    """Tile of a program: query rows and tokens at a time, warps, and stages of overlapping
    loads.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


def tile_of(dim: int) -> int:
    """Return the number of tokens, and of query rows, for heads padded to `dim`."""
    return max(16, min(MOST, ENTRIES // dim))


def attention_tile(dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of attention for heads padded to `dim`.

    Compiled for sm_90, no register spills (tests/kernels/test_compiling.py). At 16 bits and size
    128 a thread has 254 registers, so two programs share a multiprocessor regardless of memory. The
    third stage takes 256 bytes more and also loads slots ahead, because keys and values wait for
    them. More rows or tokens spill: 24 bytes a thread at 128 rows, 80 at 64 tokens. In float32,
    without tensor cores, the third stage spills.
    """
    size = tile_of(dim)
    # the interpreter's time grows with the number of programs
    if triton.knobs.runtime.interpret:
        return Tile(size, size, 4, 1)
    if dtype is torch.float32:
        return Tile(16, min(32, size), 8, 2)
    return Tile(size, min(32, size), 4 if dim <= 128 else 8, 3)


def score_tile(dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of Sparse-Q scores: `rows` are kept by a program, `tokens` are passed over.

    A program keeps only logits, so registers allow 128 rows at 16 bits. Passed-over rows are then
    read half as often from the L2 cache, which would otherwise limit the tensor cores. Two programs
    of eight warps share a multiprocessor (128 registers a thread, 80 KB). In float32 loads are not
    overlapped, because that spills.
    """
    size = tile_of(dim)
    if triton.knobs.runtime.interpret:
        return Tile(size, size, 4, 1)
    if dtype is torch.float32:
        return Tile(16, min(32, size), 8, 1)
    return Tile(2 * size, size, 8, 3)


def parts_of(group: int, rows: int) -> int:
    """Return the number of equal parts of at most `rows` into which the query heads of a KV head
    are cut.
    """
    return next(
        parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= rows
    )


def splits_of(device: torch.device, programs: int, num_tokens: int) -> int:
    """Return the number of parts into which tokens are cut, so that enough programs fill a
    device.
    """
    return max(1, min(MOST_SPLITS, programs_of(device) // programs, num_tokens // LEAST_SPLIT))


@cache  # CUDA graphs of decode steps need it at a fixed address
def places_of(heads: LayerHeads, device: torch.device) -> Tensor:
    """Return the page list, the stream and the local flag of each KV head: int32 [3, Hkv] on the
    device.
    """
    return torch.tensor([heads.page_lists, heads.streams, heads.local], dtype=torch.int32).to(
        device
    )
