"""Spread: what changes in the recomputed tokens of a segment changes in the others, too."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvgraft.methods import require_at_least, require_share
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.contrast import distinguishing_tokens
from kvgraft.prefill.plan import Plan
from kvgraft.prefill.selection import SelectsInRounds
from kvgraft.prefill.spreading import Spreading

FEWEST_ANCHORS = 3  # of a segment; else none of its changes are applied to others


@dataclass(frozen=True)
class Spread(SelectsInRounds):
    """Segment starts and what the question asks for are recomputed; all other grafted tokens take
    over half of what that has changed in the nearest ones of their segment.

    KVGraft's own method. Text that is read in another context differs from what is cached by
    something that its tokens have in common: the mean over a segment explains 30 to 50 % of the
    squared change of keys before RoPE on a real model, and a few tokens tell it. So in every layer
    the differences between new and cached keys and values of the recomputed tokens are averaged
    over their neighbours (`spread_tokens` away they weigh 1/e) and interpolated along the segment,
    keys turned to where they are added (`spread_share` of them: what is interpolated is not
    certain). No tokens are computed for that. The first tokens of a segment tell nothing of the
    others, since what is new before them, as an edit, changes them in ways of its own; nor do one
    or two tokens.

    The tokens are chosen as `transitive` does, with two differences. The first tokens of each
    segment, which were attention sinks where it was read (EPIC), are always recomputed and already
    in the rounds that choose. And the second layer chooses (`score_layer`), in which keys hardly
    depend on context: deeper ones attend to those tokens, among others, whose cached keys are wrong
    in the same way, and spreading what changes in these turns attention away from the whole
    segment.

    Segments of the same wording that were read apart (price lists, tickets, table rows) cannot be
    told apart by what is cached of them. Where they differ they are recomputed, too, before the
    rounds (`prefill.contrast`).

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "spread"

    start_tokens: int = 8  # recomputed at the beginning of each segment
    start_share: float = 0.025  # of a segment, that these are at most
    # of shared wording in phrases, from which on what differs is recomputed
    alike_share: float = 0.65
    score_layer: int = 1  # whose attention chooses, among the layers that see the whole prompt
    recompute_share: float = 0.025
    first_share: float = 0.6
    spread_share: float = 0.5  # of a change that is taken over
    spread_tokens: int = 64  # over which changes are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("start_tokens", self.start_tokens, 0)
        require_share("start_share", self.start_share)
        require_share("alike_share", self.alike_share)
        require_at_least("score_layer", self.score_layer, 0)
        require_share("spread_share", self.spread_share)
        require_at_least("spread_tokens", self.spread_tokens, 1)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft what chooses, choose, then recompute fresh and chosen tokens, layer by layer with
        what that changes."""
        plan, first = ctx.plan, FirstLayer(ctx)
        scored = ctx.scoring_layers[: self.score_layer + 1][-1]
        ctx.graft(range(scored + 1))
        chosen = self._choose(ctx, first, scored)
        hidden = first.left(plan.fresh | chosen)
        spreading = Spreading(
            plan, self._anchors(plan, chosen), chosen, self.spread_tokens, self.spread_share
        )
        if not (spreading.where.any() and self.spread_share):
            ctx.graft(range(scored + 1, ctx.num_layers))
            return ctx.run(range(1, ctx.num_layers), hidden)
        return ctx.run(range(1, ctx.num_layers), hidden, spreading)

    def _choose(self, ctx: PrefillContext, first: "FirstLayer", scored: int) -> Tensor:
        """bool [T]: grafted tokens that are recomputed; the rounds compute some of them in the
        first layers."""

        def score(computed: Tensor, asking: Tensor) -> Tensor:
            hidden = first.left(computed)
            if scored == 0:
                first.query(computed)
            else:
                ctx.project(scored, ctx.run(range(1, scored), hidden))
            return self.score(ctx, scored, asking)

        starts = ctx.plan.segment_starts(self.start_tokens, self.start_share)
        if scored:
            first.left(ctx.plan.fresh | starts)  # launched before the host compares texts
        differing = distinguishing_tokens(ctx.plan, ctx.token_ids, self.alike_share)
        for counts, prompt in zip(ctx.counts, ctx.plan.prompts, strict=True):
            counts["distinguishing_tokens"] += int(differing[prompt].sum())
        return self.choose(ctx.plan, starts | differing, score)

    def _anchors(self, plan: Plan, chosen: Tensor) -> Tensor:
        """bool [T]: recomputed tokens whose changes are spread: no segment starts, nor less than a
        few of a segment."""
        anchors = chosen & (plan.segments >= 0) & ~plan.segment_starts(self.start_tokens)
        few = plan.segments[anchors].bincount(minlength=plan.num_tokens) < FEWEST_ANCHORS
        return anchors & ~few[plan.segments]


class FirstLayer:
    """What leaves layer 0, computed once for each token.

    Keys and values of layer 0 depend on a token and its position alone. So copied ones are exact,
    and what leaves the layer does not depend on which tokens are recomputed."""

    def __init__(self, ctx: PrefillContext) -> None:
        self._ctx = ctx
        self._left: Hidden | None = None
        self._latest: Hidden | None = None  # what the last call has computed

    def left(self, where: Tensor) -> Hidden:
        """Return the states of these tokens, bool [T], that enter layer 1."""
        known, self._latest = self._left, None
        missing = where if known is None else where & ~known.where
        if known is None or missing.any():
            self._latest = new = self._ctx.layer(0, self._ctx.embed(missing))
            self._left = known = new if known is None else known.joined(new)
            if where.equal(missing):
                return new
        return known if where.equal(known.where) else known.only(where)

    def query(self, where: Tensor) -> None:
        """Have the host hold the queries of these tokens, bool [T], if they were not computed
        last."""
        if self._latest is None or not where.equal(self._latest.where):
            self._ctx.project(0, self._ctx.embed(where))
