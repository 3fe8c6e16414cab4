"""Selection rules: choose grafted tokens to recompute by the attention that they receive."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.methods import require_at_least, require_choice, require_share
from kvgraft.prefill.context import Policy, PrefillContext, Reduction
from kvgraft.prefill.device_selection import choose_on_device
from kvgraft.prefill.device_tokens import TokenSet

Rows = Literal["all_fresh", "question"]
Unit = Literal["token", "block"]


@dataclass(frozen=True)
class SelectsByAttention(Policy):
    """A policy that chooses tokens by attention scores of a layer, with the options of the rule.

    SparseX's rule is all_fresh, sum, token (Eq. 1 and 2).

    Raises:
        ValueError: an option is not one of its choices.
    """

    # whose queries count: every fresh token, or the fresh tokens behind the last graft
    rows: Rows = "all_fresh"
    reduction: Reduction = "sum"  # reduction of attention weights over queries and heads
    # choose single tokens, or blocks by the mean score of their grafted tokens
    unit: Unit = "token"

    def __post_init__(self) -> None:
        require_choice("rows", self.rows, get_args(Rows))
        require_choice("reduction", self.reduction, get_args(Reduction))
        require_choice("unit", self.unit, get_args(Unit))

    def query_tokens(self, plan: Plan) -> Tensor:
        """Tokens whose queries score in the first round: bool [T]."""
        return plan.question if self.rows == "question" else plan.fresh

    def score(self, ctx: PrefillContext, layer: int, queries: Tensor) -> Tensor:
        """Scores of all keys at a layer, float32 [T]. With unit=block, tokens of one block share a
        score."""
        scores = ctx.scores(layer, queries, self.reduction)
        return scores if self.unit == "token" else _by_block(scores, ctx.plan)

    def chooses_on(self, ctx: PrefillContext) -> torch.device | None:
        """Device on which tokens can be chosen; None for the CPU.

        Tokens in place count less than others, so that the number of chosen tokens depends on
        which ones are chosen.
        """
        return None if self.unit == "block" or ctx.plan.in_place.any() else ctx.chooses_on


@dataclass(frozen=True)
class SelectsInRounds(SelectsByAttention):
    """A policy in which the question chooses tokens, whose queries choose further tokens.

    Raises:
        ValueError: an option outside its range.
    """

    rows: Rows = "question"
    recompute_share: float = 0.05  # share of the grafted tokens that is recomputed
    # of the grafted tokens that an earlier prompt has left in place; at most recompute_share
    continued_share: float = 0.02
    hops: int = 2  # rounds in which chosen tokens choose further ones
    # share of the chosen tokens that the question chooses; the hops share the rest evenly
    first_share: float = 0.4
    # tokens at the end of a prompt that ends in known text: recomputed, and used as queries
    tail_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("recompute_share", self.recompute_share)
        require_share("continued_share", self.continued_share)
        require_at_least("hops", self.hops, 0)
        require_share("first_share", self.first_share)
        require_at_least("tail_tokens", self.tail_tokens, 1)

    def choose(
        self,
        ctx: PrefillContext,
        layer: int,
        always_recompute: Tensor,
        compute: Callable[[TokenSet], None],
        device: torch.device | None = None,
    ) -> TokenSet:
        """Return the grafted tokens to recompute: `always_recompute` bool [T], the tail, and the
        choice of the rounds.

        Args:
            layer: layer that scores.
            compute: compute these tokens up to the queries, keys and values of the layer.
            device: CUDA device that chooses, without waiting for it; None for the CPU. It computes
                all fresh tokens inside the text in every round, not only those that score high.
        """
        plan, tail = ctx.plan, ctx.plan.tail(self.tail_tokens)
        chosen = tail | always_recompute
        computed, asking = plan.fresh | chosen, self.query_tokens(plan) | tail
        shares = shares_by_round(self.recompute_share, self.first_share, self.hops)
        if device is not None:

            def probe(computed: TokenSet, asking: TokenSet) -> Tensor:
                compute(computed)
                return ctx.device_scores(layer, asking, self.reduction)

            return choose_on_device(plan, device, chosen, asking, shares, probe)

        in_place = min(1.0, self.continued_share / max(self.recompute_share, 1e-9))
        for share in shares:
            left = plan.grafted & ~chosen
            if not left.any():
                break
            compute(computed)
            scores = self.score(ctx, layer, asking)
            found = plan.top_share(scores, share, left, in_place)
            if not found.any():
                break
            chosen = chosen | found
            computed = asking = found | (plan.reaching(scores, found) & plan.fresh & ~plan.question)

        return chosen


def shares_by_round(recompute_share: float, first_share: float, hops: int) -> list[float]:
    """Return the share of the remaining tokens that each of 1 + hops rounds chooses.

    Together the rounds choose recompute_share. The first chooses `first_share` of it, the others
    divide the rest evenly.
    """
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
