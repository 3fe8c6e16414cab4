"""How much attention the tokens of a text receive from those behind them (SamKV, Appendix A)."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MOST_ROWS = 256  # queries whose attention weights are held at a time
MOST_WEIGHTS = 1 << 22  # of all heads together, that are held at a time
FLOOR = 1e-7  # least weight whose logarithm is taken
ENOUGH = 8  # tokens that must follow one, for a fit
SIGMAS = 3.0  # of the PauTa criterion


@dataclass(frozen=True, eq=False)
class Received:
    """Of every token, float32 [n]: `mean` attention from the tokens behind it, over all heads, and
    the `exponent` of the power law y = x ** -exponent by which it decays with the distance x;
    infinite if fewer than 8 follow. The law has no other factor: only so does a smaller exponent
    mean more attention everywhere."""

    mean: Tensor
    exponent: Tensor


@dataclass(frozen=True, eq=False)
class BlockImportance:
    """Of every block [B] the representative token (int64), its exponent and its mean attention
    (float32)."""

    representative: Tensor
    exponent: Tensor
    attention: Tensor


def received_attention(
    query: Tensor, keys: Tensor, over_heads: Callable[[Tensor], Tensor] = lambda weights: weights
) -> Received:
    """One layer of a text: query [n, Hq, d] and keys [n, Hkv, d], rotated. Least squares in log-log
    space, through the point (1, 1).

    Args:
        over_heads: what is summed over these heads -> over all, if there are others.
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
        weights = summed / summed.sum(1, keepdim=True)  # every head gives 1 in all
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
    """The token of each block that receives most stands for it (Appendix A.1)."""
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
    """bool [B]: more than three standard deviations below the mean (PauTa criterion); infinite
    values do not count. Among fewer than eleven values nothing can be."""
    finite = values[values.isfinite()]
    if finite.numel() < 2:
        return torch.zeros_like(values, dtype=torch.bool)
    return values < finite.mean() - SIGMAS * finite.std()


def ranks(values: Tensor) -> Tensor:
    """int64 [..., B]: the place of each value in ascending order, from 0; ties as they stand."""
    return values.argsort(stable=True, dim=-1).argsort(-1)
