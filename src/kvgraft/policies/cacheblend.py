"""CacheBlend: recompute the tokens whose KV deviates most."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvgraft.methods import require_at_least, require_share
from kvgraft.prefill.context import Hidden, Policy, PrefillContext


@dataclass(frozen=True)
class CacheBlend(Policy):
    """Compute all tokens up to a check layer, then those whose KV there differs most from the
    cached KV.

    Source: Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge
    Fusion", 2024, section 4: high KV deviation tokens, selected at layer 1, 15 % of them. There is
    one selection for all deeper layers, as in its public code; the paper filters gradually from a
    slightly higher share.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "cacheblend"

    check_layer: int = 1  # where cached and computed KV are compared
    recompute_share: float = 0.15  # share of the grafted tokens that is recomputed from there on

    def __post_init__(self) -> None:
        require_at_least("check_layer", self.check_layer, 0)
        require_share("recompute_share", self.recompute_share)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Run dense layers below the check layer, compare KV, and run fresh and deviating tokens
        from there."""
        plan, check = ctx.plan, min(self.check_layer, ctx.num_layers - 1)
        deep = range(check, ctx.num_layers)
        ctx.graft(deep)
        hidden = ctx.run(range(check), ctx.embed(plan.active))
        cached = ctx.kv(check, plan.grafted)
        ctx.project(check, hidden)
        computed = ctx.kv(check, plan.grafted)
        deviation = torch.zeros(plan.num_tokens)
        for old, new in zip(cached, computed, strict=True):
            deviation[plan.grafted] += (new.float() - old.float()).square().sum((1, 2)).cpu()
        chosen = plan.top_share(ctx.over_heads(deviation), self.recompute_share, among=plan.grafted)
        return ctx.run(deep, hidden.only(plan.fresh | chosen))
