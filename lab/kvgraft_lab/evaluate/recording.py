"""Policy that runs another one and records the tokens that each layer computed, and their
scores.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.prefill.context import Heads, Hidden, Policy, PrefillContext, Reduction
from kvgraft.prefill.device_tokens import TokenSet
from kvgraft.prefill.spreading import Spreading


@dataclass
class PrefillRecord:
    """Record of one prompt's prefill.

    Attributes:
        plan: plan of the prompt.
        computed: bool [L, T], the tokens that each layer computed.
        scores: float32 [T] by layer, the last scores computed there.
        keys, values: float32 [L, T, Hkv, d], the cache after recovery, if requested.
    """

    plan: Plan | None = None
    computed: Tensor = field(default_factory=lambda: torch.zeros(0))
    scores: dict[int, Tensor] = field(default_factory=dict)
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Wrapped(Policy):
    """Another policy, whose passes a subclass wraps."""

    policy: Policy

    def __str__(self) -> str:
        return str(self.policy)

    @property
    def grafts_local_heads(self) -> bool:  # type: ignore[override]
        """Same as the policy's."""
        return self.policy.grafts_local_heads

    @property
    def recovers_in_place(self) -> bool:  # type: ignore[override]
        """Same as the policy's."""
        return self.policy.recovers_in_place

    @property
    def needs_head_map(self) -> bool:  # type: ignore[override]
        """Same as the policy's."""
        return self.policy.needs_head_map

    @property
    def uses_grafts(self) -> bool:  # type: ignore[override]
        """Same as the policy's."""
        return self.policy.uses_grafts

    def residual_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the policy's residual layers."""
        return self.policy.residual_layers(num_layers)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Run the policy's `recover` within `around`."""
        return self.around(self.policy.recover, ctx)

    def recompute(self, ctx: PrefillContext) -> Hidden:
        """Run the policy's `recompute` within `around`."""
        return self.around(self.policy.recompute, ctx)

    @abstractmethod
    def around(self, recover: Callable[[PrefillContext], Hidden], ctx: PrefillContext) -> Hidden:
        """Run a pass of the policy."""


@dataclass(frozen=True, eq=False)
class Recorded(Wrapped):
    """Policy that runs `policy` and fills `record`.

    Attributes:
        record: record to fill.
        keep_cache: also record keys and values.
        score_layers: also record the question's scores at every layer of a dense pass.
    """

    name: ClassVar[str] = "recorded"

    record: PrefillRecord = field(default_factory=PrefillRecord)
    keep_cache: bool = False
    score_layers: bool = False

    def around(self, recover: Callable[[PrefillContext], Hidden], ctx: PrefillContext) -> Hidden:
        record = self.record
        record.plan = ctx.plan
        record.computed = torch.zeros(ctx.num_layers, ctx.plan.num_tokens, dtype=torch.bool)
        hidden = recover(Recording(ctx, record, self.score_layers))
        if self.keep_cache:
            everything = torch.ones(ctx.plan.num_tokens, dtype=torch.bool)
            layers = range(ctx.num_layers)
            kept = zip(*(ctx.kv(index, everything) for index in layers), strict=True)
            record.keys, record.values = (torch.stack(part).float().cpu() for part in kept)
        return hidden


class Recording(PrefillContext):
    """Context that records the calls to another context."""

    def __init__(self, inner: PrefillContext, record: PrefillRecord, score_layers: bool) -> None:
        self.plan, self.token_ids, self.block_size = inner.plan, inner.token_ids, inner.block_size
        self.num_layers, self.num_kv_heads = inner.num_layers, inner.num_kv_heads
        self.head_map, self.head_paging = inner.head_map, inner.head_paging
        self.counts, self.residual_layers, self.local_layers = (
            inner.counts,
            inner.residual_layers,
            inner.local_layers,
        )
        self._inner, self._record, self._score_layers = inner, record, score_layers

    def embed(self, where: TokenSet) -> Hidden:
        return self._inner.embed(where)

    def graft(self, layers: range) -> None:
        self._inner.graft(layers)

    def layer(self, index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
        self._record.computed[index] |= hidden.where
        after = self._inner.layer(index, hidden, spreading)
        if self._score_layers:
            self._record.scores[index] = self._inner.scores(
                index, self.plan.question & hidden.where
            )
        return after

    def project(self, index: int, hidden: Hidden) -> None:
        self._inner.project(index, hidden)

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        self._inner.project_heads(index, hidden, reused, kept)

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        return self._inner.attend(index, hidden, local)

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        self._record.computed[index] |= where
        return self._inner.feed_forward(index, hidden, where)

    def query(self) -> Tensor:
        return self._inner.query()

    def keys(self, index: int, where: Tensor) -> Tensor:
        return self._inner.keys(index, where)

    def kv(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner.kv(index, where)

    def rotate_keys(self, shifts: Tensor) -> Callable[[int, Tensor], Tensor]:
        return self._inner.rotate_keys(shifts)

    def add(self, index: int, where: Tensor, keys: Tensor, values: Tensor) -> None:
        self._inner.add(index, where, keys, values)

    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        scores = self._inner.scores(index, queries, reduction)
        self._record.scores[index] = scores
        return scores

    def residual(self, index: int, where: Tensor) -> Hidden:
        return self._inner.residual(index, where)

    def logits(self, hidden: Hidden) -> Tensor:
        return self._inner.logits(hidden)

    def reject(self, where: Tensor) -> None:
        self._inner.reject(where)
