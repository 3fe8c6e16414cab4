"""Transitive selection: tokens that the question attends to, and tokens that those attend to in
turn."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvgraft.methods import count_layers, require_layers
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.device_tokens import TokenSet
from kvgraft.prefill.selection import SelectsInRounds


@dataclass(frozen=True)
class Transitive(SelectsInRounds):
    """Choose tokens by a sparse probe; their queries choose further tokens. All of them run from
    layer 0.

    KVGraft's own method, without a dense pass. The first layers (`probe_layers`) run on the fresh
    tokens alone, against aligned KV. The question's queries at the next layer then score the
    grafted keys. Each hop probes with the tokens just chosen, and with fresh tokens inside the text
    (segment edges) that scored at least as high.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "transitive"

    probe_layers: int | None = None  # computed before keys are scored; None: `probe_share` of all
    probe_share: float = 0.1  # share of all layers, rounded up

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "probe_layers")

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft all layers, probe and hop, then run fresh and chosen tokens."""
        plan, layers = ctx.plan, range(ctx.num_layers)
        least = count_layers(self.probe_layers, self.probe_share, ctx.num_layers)
        probe = next(
            (index for index in ctx.scoring_layers if index >= least), ctx.scoring_layers[-1]
        )
        ctx.graft(layers)

        def compute(tokens: TokenSet) -> None:
            ctx.project(probe, ctx.run(range(probe), ctx.embed(tokens)))

        chosen = self.choose(ctx, probe, torch.zeros_like(plan.fresh), compute)
        return ctx.run(layers, ctx.embed(chosen | plan.fresh))
