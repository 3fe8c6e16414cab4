"""ProphetKV: recompute the tokens that the question attends to, over all layers."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvgraft.methods import require_share
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.device_selection import top_share_on_device
from kvgraft.prefill.selection import Rows, SelectsByAttention


@dataclass(frozen=True)
class Prophet(SelectsByAttention):
    """Collect the question's attention in every layer, in one pass of the fresh tokens over cached
    KV. Then recompute the best tokens.

    Source: Wang et al., "ProphetKV: User-Query-Driven Selective Recomputation for Efficient KV
    Cache Reuse in Retrieval-Augmented Generation", 2026: two stages, scores fused over layers by
    their mean, 20 % of the tokens.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "prophet"

    rows: Rows = "question"
    recompute_share: float = 0.20  # share of the grafted tokens that is recomputed

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("recompute_share", self.recompute_share)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Stage 1: sum the question's attention over layers. Stage 2: run fresh and chosen tokens
        from layer 0."""
        plan, layers, device = ctx.plan, range(ctx.num_layers), self.chooses_on(ctx)
        ctx.graft(layers)
        hidden, queries = ctx.embed(plan.fresh), self.query_tokens(plan)
        scores = torch.zeros(plan.num_tokens, device=device)
        for index in layers:
            hidden = ctx.layer(index, hidden)
            if index in ctx.scoring_layers:
                scores += (
                    self.score(ctx, index, queries)
                    if device is None
                    else ctx.device_scores(index, queries, self.reduction)
                )
        chosen = (
            plan.top_share(scores, self.recompute_share, among=plan.grafted)
            if device is None
            else top_share_on_device(plan, scores, self.recompute_share)
        )
        return ctx.run(layers, ctx.embed(ctx.settled(chosen) | plan.fresh))
