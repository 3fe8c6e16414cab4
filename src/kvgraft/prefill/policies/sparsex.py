"""SparseX: Sparse-Q driven recomputation."""

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.methods import count_layers, require_at_least, require_layers, require_share
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.selection import SelectsByAttention


@dataclass(frozen=True)
class SparseX(SelectsByAttention):
    """Dense layers up to a boundary, then only the tokens that fresh queries attend to (SparseX, Algorithm 1).

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "sparsex"

    boundary: int | float = 0.18  # dense layers (l*): a number, 0 allowed, or a share of all layers, rounded up
    topk: float = 0.10  # share of the grafted tokens recomputed above the boundary
    overflow_blocks: int = 1  # blocks recomputed on each side of every fresh interval
    tail_tokens: int = 64  # tokens recomputed at the end of a prompt that ends in known text

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers("boundary", self.boundary)
        require_share("topk", self.topk)
        require_at_least("overflow_blocks", self.overflow_blocks, 0)
        require_at_least("tail_tokens", self.tail_tokens, 1)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Algorithm 1, phases 1 to 3; the dense layers overwrite grafted KV, so they need no graft."""
        plan, boundary = ctx.plan, count_layers(self.boundary, ctx.num_layers)
        deep = range(boundary, ctx.num_layers)
        ctx.graft(deep)
        hidden = ctx.run(range(boundary), ctx.embed(plan.active))
        if boundary == 0:
            ctx.project(0, hidden.only(plan.fresh))
        scores = self.score(ctx, max(boundary - 1, 0), self.asking(plan))
        chosen = plan.top_share(scores, self.topk, among=plan.grafted)
        recompute = plan.fresh | chosen | plan.overflow(self.overflow_blocks) | plan.tail(self.tail_tokens)
        return ctx.run(deep, hidden.only(recompute))
