"""Top-k in plain torch: the truth."""

import torch
import torch.nn.functional as F
from torch import Tensor


def radix_topk(scores: Tensor, lengths: Tensor, k: int, tolerance: float, remap: bool) -> Tensor:
    """See `kvgraft.kernels.dispatch.radix_topk`; always exact, best first."""
    there = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    best, columns = scores.masked_fill(~there, float("-inf")).topk(min(k, scores.shape[1]), dim=1)
    return F.pad(columns.masked_fill(best == float("-inf"), -1), (0, k - columns.shape[1]), value=-1)
