"""Transitive selection: what the question asks for, and what that in turn was made from."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgraft.methods import count_layers, require_layers
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.selection import SelectsInRounds


@dataclass(frozen=True)
class Transitive(SelectsInRounds):
    """A sparse probe chooses tokens, whose queries choose further tokens; all of them run from
    layer 0.

    KVGraft's own method. No dense pass: the first layers (`probe_layers`) run on the fresh tokens
    alone, against aligned KV, and the question's queries at the next layer score the grafted keys.
    Each hop then probes with the tokens just chosen, and with fresh tokens inside the text (segment
    edges) that scored as well.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "transitive"

    probe_layers: int | None = None  # computed before keys are scored; None: `probe_share` of all
    probe_share: float = 0.1  # of all layers, rounded up

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "probe_layers")

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft everything, probe and hop, then recompute fresh and chosen tokens."""
        plan, layers = ctx.plan, range(ctx.num_layers)
        least = count_layers(self.probe_layers, self.probe_share, ctx.num_layers)
        probe = next(
            (index for index in ctx.scoring_layers if index >= least), ctx.scoring_layers[-1]
        )
        ctx.graft(layers)

        def score(computed: Tensor, asking: Tensor) -> Tensor:
            ctx.project(probe, ctx.run(range(probe), ctx.embed(computed)))
            return self.score(ctx, probe, asking)

        chosen = self.choose(plan, torch.zeros_like(plan.fresh), score)
        return ctx.run(layers, ctx.embed(plan.fresh | chosen))
