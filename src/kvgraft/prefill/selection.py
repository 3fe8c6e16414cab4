"""Selection rules: which grafted tokens are worth computing again, by the attention that they receive."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from kvgraft.methods import require_choice
from kvgraft.prefill.context import Policy, PrefillContext, Reduction
from kvgraft.prefill.plan import Plan

Rows = Literal["all_fresh", "question"]
Unit = Literal["token", "block"]


@dataclass(frozen=True)
class SelectsByAttention(Policy):
    """A policy that chooses tokens by the attention scores of a layer, with the options of the rule.

    SparseX's rule is all_fresh, sum, token (Eq. 1 and 2).

    Raises:
        ValueError: an option that is no choice.
    """

    rows: Rows = "all_fresh"  # whose queries count: every fresh token, or the fresh tokens behind the last graft
    reduction: Reduction = "sum"  # of the attention weights over queries and heads
    unit: Unit = "token"  # choose single tokens, or blocks by the mean score of their grafted tokens

    def __post_init__(self) -> None:
        require_choice("rows", self.rows, get_args(Rows))
        require_choice("reduction", self.reduction, get_args(Reduction))
        require_choice("unit", self.unit, get_args(Unit))

    def asking(self, plan: Plan) -> Tensor:
        """bool [T]: the tokens whose queries choose first."""
        return plan.question if self.rows == "question" else plan.fresh

    def score(self, ctx: PrefillContext, layer: int, queries: Tensor) -> Tensor:
        """float32 [T]: the scores of all keys at a layer; tokens of one block share theirs if blocks are chosen."""
        scores = ctx.scores(layer, queries, self.reduction)
        return scores if self.unit == "token" else _by_block(scores, ctx.plan)


def shares_by_round(recompute_share: float, first_share: float, hops: int) -> list[float]:
    """Share that each of 1 + hops rounds chooses of what the rounds before it left, so that all of them together choose
    recompute_share: the first one `first_share` of it, the others the rest, evenly."""
    first = first_share if hops else 1.0
    parts = [recompute_share * first, *[recompute_share * (1 - first) / max(1, hops)] * hops]
    used = accumulate(parts, initial=0.0)
    return [part / (1 - before) if part else 0.0 for part, before in zip(parts, used, strict=False)]


def _by_block(scores: Tensor, plan: Plan) -> Tensor:
    """Mean score of the grafted tokens in each token's block."""
    means = torch.zeros_like(scores)
    for prompt in plan.prompts:
        block = plan.positions[prompt] // plan.block_size
        grafted = plan.grafted[prompt].float()
        sums, counts = torch.zeros(2, int(block[-1]) + 1)
        sums.index_add_(0, block, scores[prompt] * grafted)
        counts.index_add_(0, block, grafted)
        means[prompt] = (sums / counts.clamp(min=1))[block]
    return means
