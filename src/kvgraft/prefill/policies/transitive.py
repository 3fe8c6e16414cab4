"""Transitive selection: what the question asks for, and what that in turn was made from."""

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.methods import count_layers, require_at_least, require_layers, require_share
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.selection import Rows, SelectsByAttention, shares_by_round


@dataclass(frozen=True)
class Transitive(SelectsByAttention):
    """A sparse probe chooses tokens, whose queries choose further tokens; all of them run from layer 0.

    KVGraft's own method. No dense pass: the first layers (`probe_layers`) run on the fresh tokens alone, against
    aligned KV, and the question's queries at the next layer score the grafted keys. Each hop then probes with the
    tokens just chosen, and with fresh tokens inside the text (segment edges) that scored as well.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "transitive"

    rows: Rows = "question"
    probe_layers: int | None = None  # computed before keys are scored; None: `probe_share` of all
    probe_share: float = 0.1  # of all layers, rounded up
    recompute_share: float = 0.05  # of the grafted tokens, recomputed
    continued_share: float = 0.02  # of those that an earlier prompt has left in place; no more than recompute_share
    hops: int = 2  # rounds in which chosen tokens choose further ones
    first_share: float = 0.4  # of the chosen tokens, which the question chooses; the hops share the rest evenly
    tail_tokens: int = 64  # tokens recomputed, and asking, at the end of a prompt that ends in known text

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "probe_layers")
        require_share("recompute_share", self.recompute_share)
        require_share("continued_share", self.continued_share)
        require_at_least("hops", self.hops, 0)
        require_share("first_share", self.first_share)
        require_at_least("tail_tokens", self.tail_tokens, 1)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft everything, probe and hop, then recompute fresh and chosen tokens."""
        plan, layers = ctx.plan, range(ctx.num_layers)
        probe = min(count_layers(self.probe_layers, self.probe_share, ctx.num_layers), ctx.num_layers - 1)
        ctx.graft(layers)
        chosen = plan.tail(self.tail_tokens)
        computed, asking = plan.fresh | chosen, self.asking(plan) | chosen
        in_place = min(1.0, self.continued_share / max(self.recompute_share, 1e-9))
        for share in shares_by_round(self.recompute_share, self.first_share, self.hops):
            ctx.project(probe, ctx.run(range(probe), ctx.embed(computed)))
            scores = self.score(ctx, probe, asking)
            found = plan.top_share(scores, share, plan.grafted & ~chosen, in_place)
            if not found.any():
                break
            chosen = chosen | found
            computed = asking = found | (plan.reaching(scores, found) & plan.fresh & ~plan.question)
        return ctx.run(layers, ctx.embed(plan.fresh | chosen))
