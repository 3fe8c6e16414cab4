"""Attention that the tokens of a text receive from later tokens (SamKV, Appendix A)."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# queries whose attention weights are in memory at a time
MOST_ROWS = 256
# attention weights of all heads in memory at a time
MOST_WEIGHTS = 1 << 22
# smaller weights are raised to this before the logarithm
FLOOR = 1e-7
# tokens that must follow a token for a fit
ENOUGH = 8
# standard deviations of the PauTa criterion
SIGMAS = 3.0


@dataclass(frozen=True, eq=False)
class Received:
    """Attention that each token receives, float32 [n].

    Attributes:
        mean: mean attention from later tokens, over all heads.
        exponent: exponent of the power law y = x ** -exponent by which it decays with the distance
            x; infinite if fewer than 8 tokens follow. The law has no other factor, so a smaller
            exponent always means more attention at every distance.
    """

    mean: Tensor
    exponent: Tensor


@dataclass(frozen=True, eq=False)
class BlockImportance:
    """Representative token of each block [B] (int64), its exponent and its mean attention
    (float32).
    """

    representative: Tensor
    exponent: Tensor
    attention: Tensor


def received_attention(
    query: Tensor, keys: Tensor, over_heads: Callable[[Tensor], Tensor] = lambda weights: weights
) -> Received:
    """Return the attention that the tokens of a text receive in one layer.

    Fits by least squares in log-log space, through the point (1, 1).

    Args:
        query, keys: [n, Hq, d] and [n, Hkv, d], rotated.
        over_heads: turns sums over these heads into sums over all heads, if there are others.
    """
    count, size = keys.shape[0], keys.shape[-1]
    here = torch.arange(count, device=keys.device)
    # [Hkv, G, n, d]
    grouped = (query.float() * size**-0.5).unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
    transposed = keys.float().permute(1, 2, 0)[:, None]  # [Hkv, 1, d, n]
    sums = torch.zeros(3, count, dtype=torch.float64, device=keys.device)  # y, log x log y, log^2 x
    rows = min(max(MOST_WEIGHTS // (count * query.shape[1]), 1), MOST_ROWS)

    for start, stop in pairwise([*range(0, count, rows), count]):
        at, past = here[start:stop, None], here[:stop]
        logits = grouped[:, :, start:stop] @ transposed[..., :stop]  # [Hkv, G, r, m]
        # [r, m]
        summed = over_heads(
            logits.masked_fill(past > at, float("-inf")).softmax(-1).sum((0, 1))
        ).double()
        weights = summed / summed.sum(1, keepdim=True)  # the weights of every head sum to 1
        behind = past < at
        x = (at - past).clamp(min=1).double().log()
        y = weights.clamp(min=FLOOR).log()
        for row, term in enumerate((weights, x * y, x * x)):
            sums[row, :stop] += (term * behind).sum(0)

    followers = (count - 1 - here).double()
    mean, xy, xx = sums / followers.clamp(min=1)
    exponent = -xy / xx
    exponent[followers < ENOUGH] = float("inf")
    return Received(mean.float(), exponent.float())


def by_block(received: Received, block_size: int) -> BlockImportance:
    """Choose the token of each block that receives most attention as its representative (Appendix
    A.1).
    """
    count = received.mean.numel()
    padded = torch.nn.functional.pad(received.mean, (0, -count % block_size), value=-1.0)
    representative = padded.view(-1, block_size).argmax(1)
    representative += block_size * torch.arange(
        representative.numel(), device=representative.device
    )
    return BlockImportance(
        representative, received.exponent[representative], received.mean[representative]
    )


def exceptionally_small(values: Tensor) -> Tensor:
    """Return which values are more than three standard deviations below the mean, bool [B] (PauTa
    criterion).

    Infinite values do not count. Among fewer than eleven values none can be.
    """
    finite = values[values.isfinite()]
    if finite.numel() < 2:
        return torch.zeros_like(values, dtype=torch.bool)
    return values < finite.mean() - SIGMAS * finite.std()


def ranks(values: Tensor) -> Tensor:
    """Return the place of each value in ascending order, int64 [..., B] from 0. Ties keep their
    order.
    """
    return values.argsort(stable=True, dim=-1).argsort(-1)
