"""SparseX: Sparse-Q driven recomputation."""

import math
from dataclasses import dataclass
from typing import ClassVar

from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.prefill.options import require_at_least, require_share


@dataclass(frozen=True)
class SparseX(Policy):
    """Dense layers up to a boundary, then only the tokens that fresh queries attend to (SparseX, Algorithm 1).

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "sparsex"

    boundary: int | float = (
        0.18  # dense layers: a number (int; 0 allowed), or a share of all layers (float), rounded up
    )
    topk: float = 0.10  # share of the grafted tokens recomputed above the boundary
    overflow_blocks: int = 1  # blocks recomputed on each side of every fresh interval
    tail_tokens: int = 64  # tokens recomputed at the end of a prompt that ends in known text

    def __post_init__(self) -> None:
        if isinstance(self.boundary, float):
            require_share("boundary", self.boundary)
        else:
            require_at_least("boundary", self.boundary, 0)
        require_share("topk", self.topk)
        require_at_least("overflow_blocks", self.overflow_blocks, 0)
        require_at_least("tail_tokens", self.tail_tokens, 1)

    def num_dense_layers(self, num_layers: int) -> int:
        """The boundary l* as a number of layers."""
        if isinstance(self.boundary, float):
            return math.ceil(self.boundary * num_layers - 1e-9)
        return min(self.boundary, num_layers)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Algorithm 1, phases 1 to 3; the dense layers overwrite grafted KV, so they need no graft."""
        plan, boundary = ctx.plan, self.num_dense_layers(ctx.num_layers)
        deep = range(boundary, ctx.num_layers)
        ctx.graft(deep)
        hidden = ctx.run(range(boundary), ctx.embed(plan.active))
        if boundary == 0:
            ctx.project(0, hidden.only(plan.fresh))
        scores = ctx.scores(max(boundary - 1, 0), plan.fresh)
        chosen = plan.top_share(scores, self.topk, among=plan.grafted)
        recompute = plan.fresh | chosen | plan.overflow(self.overflow_blocks) | plan.tail(self.tail_tokens)
        return ctx.run(deep, hidden.only(recompute))
