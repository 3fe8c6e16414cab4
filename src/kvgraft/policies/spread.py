"""Spread: apply the KV change of the recomputed tokens of a segment to its other tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgraft.kernels.layout import joined
from kvgraft.methods import require_at_least, require_share
from kvgraft.prefill.context import DeviceHidden, Hidden, LaterHidden, PrefillContext
from kvgraft.prefill.contrast import distinguishing_tokens
from kvgraft.prefill.device_tokens import DeviceTokens, FoundTokens, TokenSet, are_equal
from kvgraft.prefill.selection import SelectsInRounds
from kvgraft.prefill.spreading import DeviceSpreading, Spreading, anchors_of


@dataclass(frozen=True)
class Spread(SelectsInRounds):
    """Recompute segment starts and the tokens that the question attends to. All other grafted
    tokens get half of the interpolated KV change of their neighbours.

    KVGraft's own method. KV of text in another context differs from the cached KV by a change that
    its tokens have in common. On a real model the mean over a segment explains 30 to 50 % of the
    squared change of keys before RoPE, and a few tokens are enough to estimate it. In every layer,
    the differences between new and cached keys and values of the recomputed tokens are averaged
    over their neighbours (at distance `spread_tokens` the weight is 1/e). They are then
    interpolated along the segment, with keys rotated to their new position, and `spread_share` of
    the result is added, since the interpolation is not certain. This computes no further tokens.
    The first tokens of a segment are no anchors: new text before them, such as an edit, changes
    them in their own way. One or two anchors are too few.

    Tokens are chosen as in `transitive`, with two differences. First, the first tokens of each
    segment, which were attention sinks at their source (EPIC), are always recomputed, and take part
    in the rounds that choose. Second, the second layer chooses (`score_layer`), where keys hardly
    depend on context. Deeper layers also attend to tokens whose cached keys share one error, and
    spreading their change turns attention away from the whole segment.

    Segments of the same wording that were read separately (price lists, tickets, table rows) cannot
    be distinguished by their cached KV. The tokens in which they differ are also recomputed, before
    the rounds (`prefill.contrast`).

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "spread"

    start_tokens: int = 8  # recomputed at the beginning of each segment
    start_share: float = 0.025  # greatest share of a segment that these are
    # share of shared wording in phrases above which differing tokens are recomputed
    alike_share: float = 0.65
    score_layer: int = 1  # layer that chooses, among the layers that see the whole prompt
    recompute_share: float = 0.025
    first_share: float = 0.6
    spread_share: float = 0.5  # share of a change that is applied to other tokens
    spread_tokens: int = 64  # distance in tokens over which changes are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("start_tokens", self.start_tokens, 0)
        require_share("start_share", self.start_share)
        require_share("alike_share", self.alike_share)
        require_at_least("score_layer", self.score_layer, 0)
        require_share("spread_share", self.spread_share)
        require_at_least("spread_tokens", self.spread_tokens, 1)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft the scoring layers, choose tokens, then run fresh and chosen tokens and spread
        their changes in each layer."""
        plan, first = ctx.plan, FirstLayer(ctx)
        scored = ctx.scoring_layers[: self.score_layer + 1][-1]
        ctx.graft(range(scored + 1))
        chosen = ctx.settled(self._choose(ctx, first, scored))
        hidden = LaterHidden(chosen | plan.fresh, first.left)
        # The first tokens of segments are no anchors.
        starts, given = (
            plan.segment_starts(self.start_tokens),
            (self.spread_tokens, self.spread_share),
        )
        spreading = (
            Spreading(plan, anchors_of(plan, chosen, starts), chosen, *given)
            if isinstance(chosen, Tensor)
            else DeviceSpreading(plan, chosen, starts, *given)
        )
        if not (spreading.has_anchors and self.spread_share):
            ctx.graft(range(scored + 1, ctx.num_layers))
            return ctx.run(range(1, ctx.num_layers), hidden)
        return ctx.run(range(1, ctx.num_layers), hidden, spreading)

    def _choose(self, ctx: PrefillContext, first: "FirstLayer", scored: int) -> TokenSet:
        """Return the grafted tokens to recompute. The rounds compute some of them in the first
        layers."""

        def compute(tokens: TokenSet) -> None:
            hidden = first.left(tokens)
            if scored == 0:
                first.query(tokens)
            else:
                ctx.project(scored, ctx.run(range(1, scored), hidden))

        starts = ctx.plan.segment_starts(self.start_tokens, self.start_share)
        if scored:
            # Launch device work before the host compares texts.
            first.left(ctx.plan.fresh | starts)
        differing = distinguishing_tokens(ctx.plan, ctx.token_ids, self.alike_share)
        for counts, prompt in zip(ctx.counts, ctx.plan.prompts, strict=True):
            counts["distinguishing_tokens"] += int(differing[prompt].sum())
        # Each round would run the layers between once more.
        device = self.chooses_on(ctx) if scored <= 1 else None
        return self.choose(ctx, scored, starts | differing, compute, device)


class FirstLayer:
    """States that leave layer 0, computed once for each token.

    Keys and values of layer 0 depend only on a token and its position. So copied ones are exact,
    and the states do not depend on which tokens are recomputed.
    """

    def __init__(self, ctx: PrefillContext) -> None:
        self._ctx = ctx
        self._left: Hidden | None = None
        self._part: Hidden | None = None  # latest part of it
        self._found: dict[FoundTokens, Tensor] = {}  # states of tokens that the device has chosen
        self._latest: TokenSet | None = None  # tokens that the last call has computed

    def left(self, tokens: TokenSet) -> Hidden:
        """Return the states of these tokens that enter layer 1."""
        return self._of_known(tokens) if isinstance(tokens, Tensor) else self._of_device(tokens)

    def _of_known(self, where: Tensor) -> Hidden:
        known, self._latest = self._left, None
        missing = where if known is None else where & ~known.where
        if known is None or missing.any():
            new, self._latest = self._compute(missing), missing
            self._left = known = new if known is None else known.joined(new)
            if where.equal(missing):
                return new
        if where.equal(known.where):
            return known
        if self._part is None or not where.equal(self._part.where):
            self._part = known.only(where)
        return self._part

    def _of_device(self, tokens: DeviceTokens) -> Hidden:
        latest, states = None, list[Tensor]()
        if tokens.known.any():
            states.append(self._of_known(tokens.known).states)
        missing = tuple(part for part in tokens.found if part not in self._found)
        if missing:
            latest = DeviceTokens(torch.zeros_like(tokens.known), missing)
            parts = self._compute(latest).states.split([len(part.tokens) for part in missing])
            self._found.update(zip(missing, parts, strict=True))
        states += [self._found[part] for part in tokens.found]
        self._latest = latest
        return DeviceHidden(joined(states), tokens)

    def _compute(self, tokens: TokenSet) -> Hidden:
        return self._ctx.layer(0, self._ctx.embed(tokens))

    def query(self, tokens: TokenSet) -> None:
        """Make the host hold the queries of these tokens, if they were not computed last."""
        if self._latest is None or not are_equal(self._latest, tokens):
            self._ctx.project(0, self._ctx.embed(tokens))
