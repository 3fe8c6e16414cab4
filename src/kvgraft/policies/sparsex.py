"""SparseX: Sparse-Q driven recomputation."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from kvgraft.methods import (
    count_layers,
    require_at_least,
    require_choice,
    require_layers,
    require_share,
)
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.selection import SelectsByAttention

Shallow = Literal["all", "fresh"]


@dataclass(frozen=True)
class SparseX(SelectsByAttention):
    """Run dense layers up to a boundary, then only the tokens that fresh queries attend to
    (SparseX, Algorithm 1).

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "sparsex"

    # dense layers (l*), 0 allowed; None: `boundary_share` of all
    boundary_layers: int | None = None
    boundary_share: float = 0.18  # share of all layers, rounded up
    recompute_share: float = 0.10  # share of the grafted tokens, above the boundary (top-k)
    overflow_blocks: int = 1  # blocks recomputed on each side of every fresh interval
    tail_tokens: int = 64  # tokens recomputed at the end of a prompt that ends in known text
    # tokens that dense layers run; with "fresh", grafted tokens enter the boundary as stored
    shallow: Shallow = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "boundary_layers")
        require_share("recompute_share", self.recompute_share)
        require_at_least("overflow_blocks", self.overflow_blocks, 0)
        require_at_least("tail_tokens", self.tail_tokens, 1)
        require_choice("shallow", self.shallow, get_args(Shallow))

    def residual_layers(self, num_layers: int) -> tuple[int, ...]:
        """The boundary layer, if only fresh tokens are computed below it."""
        boundary = self._boundary(num_layers)
        return (boundary,) if self.shallow == "fresh" and 0 < boundary < num_layers else ()

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Run Algorithm 1, phases 1 to 3.

        The dense layers overwrite grafted KV, so they need no graft. The last dense layer scores
        with its queries and keys. Its output is only needed for tokens that are recomputed, so all
        others end at its keys and values. With shallow=fresh, grafted tokens enter the boundary
        with the residual stream of their source (cross-query reuse).
        """
        plan, boundary = ctx.plan, self._boundary(ctx.num_layers)
        scoring = max(boundary - 1, 0)
        if self.residual_layers(ctx.num_layers):
            ctx.graft(range(ctx.num_layers))
            stored, rest = ctx.residual(boundary, plan.grafted), range(boundary, ctx.num_layers)
            hidden = ctx.run(range(boundary), ctx.embed(plan.fresh)).joined(stored)
        else:
            ctx.graft(range(boundary, ctx.num_layers))
            hidden, rest = (
                ctx.run(range(scoring), ctx.embed(plan.active)),
                range(scoring, ctx.num_layers),
            )
            ctx.project(scoring, hidden if boundary else hidden.only(plan.fresh))

        scores = self.score(ctx, scoring, self.query_tokens(plan))
        chosen = plan.top_share(scores, self.recompute_share, among=plan.grafted)
        recompute = (
            plan.fresh | chosen | plan.overflow(self.overflow_blocks) | plan.tail(self.tail_tokens)
        )
        return ctx.run(rest, hidden.only(recompute))

    def _boundary(self, num_layers: int) -> int:
        return count_layers(self.boundary_layers, self.boundary_share, num_layers)
