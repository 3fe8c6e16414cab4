"""Reference of top-k in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def radix_topk(scores: Tensor, lengths: Tensor, k: int, tolerance: float, remap: bool) -> Tensor:
    """See `kvgraft.kernels.dispatch.radix_topk`. Always exact, best first."""
    there = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    best, columns = scores.masked_fill(~there, float("-inf")).topk(min(k, scores.shape[1]), dim=1)
    return F.pad(
        columns.masked_fill(best == float("-inf"), -1), (0, k - columns.shape[1]), value=-1
    )


def page_topk(
    scores: Tensor,
    rows: Tensor,
    tokens: Tensor,
    size: int,
    always: tuple[int, int],
    k: int,
    _: float,
) -> tuple[Tensor, Tensor]:
    """See `kvgraft.kernels.dispatch.page_topk`. Always exact, one sequence at a time."""
    tables, lengths = [], []
    for own, pages, count in zip(scores, rows, tokens.tolist(), strict=True):
        total = -(-count // size)
        begin = min(always[0], total)
        end = max(begin, total - always[1])
        best = own[begin : min(end, count // size)].topk(
            min(k, max(0, min(end, count // size) - begin))
        )
        chosen = (best.indices[best.values > float("-inf")] + begin).sort().values.tolist()
        blocks = [*range(begin), *chosen, *range(end, total)]
        lengths.append(len(blocks) * size - (-count % size))
        blocks += [max(total, 1) - 1] * (sum(always) + k - len(blocks))
        tables.append(pages[blocks])

    return torch.stack(tables), torch.tensor(lengths, device=tokens.device)
