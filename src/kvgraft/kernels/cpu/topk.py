"""Radix top-k over all rows at once. Also serves CUDA without Triton."""

from collections.abc import Iterator

import torch
from torch import Tensor

BINS = 256


def radix_topk(scores: Tensor, lengths: Tensor, k: int, tolerance: float, remap: bool) -> Tensor:
    """See `kvgraft.kernels.dispatch.radix_topk`. The result is in the order of the columns."""
    pool = (torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]) & (
        scores > float("-inf")
    )
    chosen = torch.zeros_like(pool)
    missing = pool.sum(1, keepdim=True).clamp(max=k)

    for bins in _digits(scores, pool, remap):
        counts = torch.zeros(len(scores), BINS + 1, dtype=torch.int64, device=scores.device)
        counts.scatter_add_(1, torch.where(pool, bins, BINS), torch.ones_like(bins))
        counts[:, BINS] = 0
        # number of scores in this bin and above
        from_top = counts.flip(1).cumsum(1).flip(1)
        threshold = (from_top >= missing.clamp(min=1)).sum(1, keepdim=True) - 1
        chosen |= pool & (bins > threshold)
        pool &= bins == threshold
        missing = missing - from_top.gather(1, threshold + 1)
        if bool(((missing <= tolerance * k) | (missing == pool.sum(1, keepdim=True))).all()):
            break

    rank, size = pool.cumsum(1), pool.sum(1, keepdim=True).clamp(min=1)
    # choose among equal scores evenly over the columns
    chosen |= pool & (rank * missing // size > (rank - 1) * missing // size)
    rows, columns = chosen.nonzero(as_tuple=True)
    found = torch.full((len(scores), k), -1, device=scores.device)
    found[rows, chosen.cumsum(1)[rows, columns] - 1] = columns
    return found


def _digits(scores: Tensor, there: Tensor, remap: bool) -> Iterator[Tensor]:
    """Yield the digits of the scores, int64 [S, n] from 0 to 255, the most significant digit
    first.
    """
    scores = scores.float()
    if remap:
        least = scores.masked_fill(~there, float("inf")).amin(1, keepdim=True)
        most = scores.masked_fill(~there, float("-inf")).amax(1, keepdim=True)
        scale = (BINS - 1) / (most - least).clamp(min=torch.finfo(torch.float32).tiny)
        yield ((scores - least) * scale).nan_to_num(0.0).clamp(0, BINS - 1).long()
    bits = scores.view(torch.int32).long()
    key = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)  # ascends as the scores do
    for shift in (24, 16, 8, 0):
        yield (key >> shift) & 0xFF
