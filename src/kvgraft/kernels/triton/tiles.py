"""What a program of a kernel takes at a time, how many share the tokens of one sequence, and where heads lie."""

from functools import lru_cache

import torch
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.workload import programs_of

MOST = 64  # tokens, and rows of queries
ENTRIES = 8192  # of a tile of more than 16: shared memory holds several
LEAST_SPLIT = 256  # tokens that one program reads, at least
MOST_SPLITS = 64


def tile_of(dim: int) -> int:
    """Tokens, and rows of queries, whose heads are padded to `dim`."""
    return max(16, min(MOST, ENTRIES // dim))


def parts_of(group: int, rows: int) -> int:
    """How many equal parts of at most `rows` the query heads of a KV head are cut into."""
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= rows)


def splits_of(device: torch.device, programs: int, num_tokens: int) -> int:
    """Into how many parts tokens are cut, so that there are programs enough for a device."""
    return max(1, min(MOST_SPLITS, programs_of(device) // programs, num_tokens // LEAST_SPLIT))


@lru_cache(maxsize=1024)
def places_of(heads: LayerHeads, device: torch.device) -> Tensor:
    """Return the page list, the stream and whether it is local, of each KV head: int32 [3, Hkv] on the device."""
    return torch.tensor([heads.page_lists, heads.streams, heads.local], dtype=torch.int32).to(device)
