"""RedKnot: recovery head by head, with FFNs only for tokens that receive attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvgraft.kernels.layout import in_window
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.methods import (
    count_layers,
    require_at_least,
    require_choice,
    require_layers,
    require_share,
)
from kvgraft.prefill.context import Heads, Hidden, PrefillContext
from kvgraft.prefill.selection import Rows, SelectsByAttention

Switch = Literal["on", "off"]
EDGE = 0.25  # oldest part of the window, as a share


@dataclass(frozen=True)
class RedKnot(SelectsByAttention):
    """Elastic sparsity: all tokens go through all layers, but most heads and FFNs do little for
    them.

    Source: Liu et al., "RedKnot: Efficient Long-Context LLM Serving with Head-Aware KV Reuse and
    SegPagedAttention", 2026, Algorithm 1.

    Shallow layers recompute everything, with local heads over sinks and window. Deep layers
    recompute global heads over everything and reuse the aligned KV of the others. The sinks and
    windows of the query tokens are exceptions, and are recomputed. The FFN of deep layers runs on
    fresh and recent tokens and on those that receive most attention. Each part can be switched off:
    `windows`, `reuse`, `repair`, `mass_share=1.0`.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "redknot"
    recovers_in_place: ClassVar[bool] = False
    grafts_local_heads: ClassVar[bool] = False
    needs_head_map: ClassVar[bool] = True

    rows: Rows = "question"
    dense_layers: int | None = None  # shallow layers; None: `dense_share` of all
    dense_share: float = 0.3  # share of all layers, rounded up
    # share of the attention on grafted tokens; the tokens that hold it get the FFN in the first
    # deep layer
    mass_share: float = 0.5
    # the same in the last layer, between them even steps; None: as in the first
    last_mass_share: float | None = None
    recent_tokens: int = 128  # last ones of the prompt, which always get the FFN
    min_ffn_tokens: int = 64  # grafted ones that get the FFN at least
    # share of local attention on the oldest quarter of the window; above it a head sees all
    edge_mass_share: float = 0.2
    windows: Switch = "on"  # off: local heads see everything
    reuse: Switch = "on"  # off: the KV of all heads is recomputed in deep layers, too
    # off: the KV of reused heads stays as it was grafted, also where the question sees it
    repair: Switch = "on"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "dense_layers")
        for option in ("mass_share", "last_mass_share", "edge_mass_share"):
            if getattr(self, option) is not None:
                require_share(option, getattr(self, option))
        for option in ("recent_tokens", "min_ffn_tokens"):
            require_at_least(option, getattr(self, option), 0)
        for option in ("windows", "reuse", "repair"):
            require_choice(option, getattr(self, option), get_args(Switch))

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Run Algorithm 1, one prompt at a time."""
        if ctx.head_map is None:
            raise ValueError(f"policy {self.name!r} needs a host with a head map")
        shallow = count_layers(self.dense_layers, self.dense_share, ctx.num_layers)
        ctx.graft(range(shallow, ctx.num_layers))
        hidden = ctx.embed(ctx.plan.active)
        for index in range(ctx.num_layers):
            local = self._attend_to(ctx, index, hidden, ctx.head_map, reuses=index >= shallow)
            hidden = ctx.attend(index, hidden, local)
            hidden = ctx.feed_forward(index, hidden, self._important(ctx, index, shallow))
        return hidden

    def _attend_to(
        self, ctx: PrefillContext, index: int, hidden: Hidden, head_map: HeadMap, reuses: bool
    ) -> Heads:
        """Project, and return the heads that see a window.

        These are the local heads, except those whose attention reaches the edge of the window. Such
        heads are promoted: they are recomputed over everything. With head paging there is no
        promotion, since their older KV is not in the cache.
        """
        local = head_map.heads(index, HeadClass.LOCAL)
        reused = head_map.heads(index, HeadClass.LOCAL, HeadClass.RETRIEVAL)
        if self.reuse == "off" or not reuses:
            reused = (False,) * len(reused)

        kept = ctx.plan.grafted
        if self.repair == "on":
            kept = kept & ~self._near(ctx, head_map)

        ctx.project_heads(index, hidden, reused, kept)
        if self.windows == "off":
            return (False,) * len(local)

        promotes = self.edge_mass_share < 1.0 and not ctx.head_paging
        beyond = self._edge_mass(ctx, index, head_map) if promotes else [0.0] * len(local)
        promoted = [
            is_local and mass > self.edge_mass_share
            for is_local, mass in zip(local, beyond, strict=True)
        ]
        for counts in ctx.counts:  # prompts of one batch promote together
            counts["promoted_heads"] += sum(promoted)

        if any(was and now for was, now in zip(reused, promoted, strict=True)):
            ctx.project_heads(index, hidden, _without(reused, promoted), kept)

        return _without(local, promoted)

    def _edge_mass(self, ctx: PrefillContext, index: int, head_map: HeadMap) -> list[float]:
        """Share of each KV head's local attention that the oldest quarter of the window
        receives."""
        plan, sinks, window = ctx.plan, head_map.sinks, head_map.window
        asking, near = self.query_tokens(plan), self._near(ctx, head_map)
        at = plan.positions[asking][:, None]  # [n, 1]
        here = plan.positions[near]  # [m]
        query, keys = ctx.query()[asking[plan.active]].float(), ctx.keys(index, near).float()
        grouped = query.unflatten(1, (keys.shape[1], -1))  # [n, Hkv, G, d]
        logits = torch.einsum("nhgd,mhd->hgnm", grouped, keys).cpu() * keys.shape[-1] ** -0.5
        visible = in_window(here, at, sinks, window)
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        edge = visible & (here >= sinks) & (here <= at - int((1 - EDGE) * window))
        shares: list[float] = (weights * edge).sum(-1).mean((1, 2)).tolist()
        return shares

    def _near(self, ctx: PrefillContext, head_map: HeadMap) -> Tensor:
        """Sinks and windows of the query tokens: bool [T]."""
        positions = ctx.plan.positions
        first = int(positions[self.query_tokens(ctx.plan)].min())
        return (positions < head_map.sinks) | (positions > first - head_map.window)

    def _important(self, ctx: PrefillContext, index: int, shallow: int) -> Tensor:
        """Tokens whose FFN runs at a layer: bool [T]."""
        plan, deep = ctx.plan, max(1, ctx.num_layers - 1 - shallow)
        last_mass = self.mass_share if self.last_mass_share is None else self.last_mass_share
        mass = self.mass_share + (last_mass - self.mass_share) * (index - shallow) / deep
        if index < shallow or mass >= 1.0:
            return plan.active
        found = plan.top_mass(
            self.score(ctx, index, self.query_tokens(plan)), mass, plan.grafted, self.min_ffn_tokens
        )
        recent = plan.positions >= plan.num_tokens - self.recent_tokens
        return plan.active & (plan.fresh | found | recent)


def _without(heads: Heads, removed: list[bool]) -> Heads:
    return tuple(head and not gone for head, gone in zip(heads, removed, strict=True))
