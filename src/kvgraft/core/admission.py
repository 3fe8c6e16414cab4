"""Admission: the decisions about one prompt over a pool of pages.

`Admission` knows no tensor and no scheduler. Both hosts, the native engine and the vLLM connector,
ask it in this order:

1. `make_room`: release approximate blocks beyond their budget.
2. `find_approximate`: find blocks of an earlier prompt that this one continues from.
3. `decide`: match known text, choose what is worth a graft, and make the plan.
4. `mark`: note what makes the prompt's KV approximate.
5. `learn`: update the cost model with the work of the recovery.
6. `register`: let other prompts find the computed blocks.
7. `leave`: note which blocks of an ending request only continuations want.

The hosts look up exact prefixes, allocate pages, pin the sources and run the policy.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from kvgraft.core.approximate_prefix import ApproximatePrefixCache, Continued
from kvgraft.core.cost_model import CostModel
from kvgraft.core.matches import Match, MatchQuery, in_blocks
from kvgraft.core.pages import Pages
from kvgraft.core.pins import PinnedDocuments
from kvgraft.core.plan import Plan
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.readings import Span, spans_of
from kvgraft.core.report import PrefillReport, unknown_reason
from kvgraft.core.retention import GraftedBlockRetention, is_copied
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.kv.pages import distinct

PoolT = TypeVar("PoolT", bound=Pages)


class PromptState(Protocol):
    """A prompt as its host keeps it.

    Attributes:
        provenance: origin of the KV in the blocks that it leaves for others.
        continued: approximate blocks of an earlier prompt that it continues from, if any.
    """

    provenance: BlockProvenance
    continued: Continued[Any] | None

    @property
    def input_ids(self) -> np.ndarray:
        """Tokens of the prompt and of its answer so far: int64 [T]."""

    @property
    def scopes(self) -> tuple[bytes, ...]:
        """Scopes that it may read, its own first: see `MatchQuery`."""

    @property
    def policy_name(self) -> str:
        """Policy that its costs are estimated for, with options: the most careful of
        `Policy.choices`."""

    @property
    def recovery_name(self) -> str:
        """Policy that has recovered its grafts, with options."""

    @property
    def matches_similar(self) -> bool:
        """Whether near-duplicates are grafted, too."""

    @property
    def grafts_local_heads(self) -> bool:
        """Whether it needs the KV of local heads from its sources."""

    @property
    def recovers_in_place(self) -> bool:
        """Whether its policy recomputes grafted tokens of the blocks that it continues from."""

    @property
    def recovery_key(self) -> Hashable:
        """Settings of its recovery. Only prompts with an equal key continue from its approximate
        KV. None: it neither continues nor is continued."""

    @property
    def documents(self) -> Sequence[range]:
        """Spans that its policy keeps in part; these lie outside the pool."""

    @property
    def refusal(self) -> str | None:
        """Reason why it must not use approximate KV, or None."""

    @property
    def plan(self) -> Plan | None:
        """Its plan after admission."""

    @property
    def report(self) -> PrefillReport:
        """Report that `Admission` adds its findings to."""


@dataclass(frozen=True, eq=False)
class Reuse:
    """Decision about the cached KV that a prompt reuses.

    Attributes:
        plan: origin of the KV of each token.
        hits: page of each block of the prompt that is used where it is.
        matches: text that is grafted.
        sources: distinct pages that are grafted from, ascending.
        versions: versions of `sources` at the decision: int64 [sources].
        in_place: pages of `hits` whose grafted tokens the policy may recompute. No other request
            holds or grafts from them.
        copied: blocks of `hits` that the host copies, since local heads of this prompt see them.
        refused: reason why known text is not grafted, or None.
    """

    plan: Plan
    hits: Mapping[int, int] = field(default_factory=dict)
    matches: Sequence[Match] = ()
    sources: list[int] = field(default_factory=list)
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    in_place: tuple[int, ...] = ()
    copied: Sequence[int] = ()
    refused: str | None = None

    @property
    def num_known(self) -> int:
        """Tokens of `hits`."""
        return len(self.hits) * self.plan.block_size

    @property
    def needs_recovery(self) -> bool:
        """Whether the policy has grafted tokens to recover."""
        return bool(self.plan.grafted.any())

    @property
    def reason(self) -> str | None:
        """Reason why nothing is recovered, or None."""
        if self.needs_recovery:
            return None
        return self.refused or unknown_reason(int(self.plan.fresh.sum()), self.plan.block_size)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Depths of the KV behind the grafts: see `BlockProvenance.mark_approximate`."""
        return [(match.start, match.depth + 1) for match in self.matches]

    @property
    def spans(self) -> list[Span]:
        """Text that the KV behind the grafts was computed behind: see `Readings.add`."""
        return list(spans_of(self.matches))


class Admission(Generic[PoolT]):
    """Decisions about prompts over one pool.

    Args:
        pool: pages of the host.
        index: index of the text that can be grafted from the pool.
        pins: pinned documents of the pool.
        cost_model: decides what is worth a graft; None grafts all matches.
        continuation: whether prompts continue from approximate blocks of earlier prompts.
        recovers_in_place: whether the host can recompute blocks that a prompt continues from.
    """

    def __init__(
        self,
        pool: PoolT,
        index: ReuseIndex,
        pins: PinnedDocuments,
        cost_model: CostModel | None = None,
        *,
        continuation: bool = True,
        recovers_in_place: bool = True,
    ) -> None:
        self.pool = pool
        self.index = index
        self.pins = pins
        self.cost_model = cost_model
        self.continuation = continuation
        self._recovers_in_place = recovers_in_place
        self.approximate = ApproximatePrefixCache[Any](
            lambda key: pool.lookup_all([key]) != [None], pool.num_pages
        )
        self.retention = GraftedBlockRetention(pool)

    def make_room(self) -> None:
        """Release grafted copies that occupy room for pages in greater demand."""
        self.retention.learn(self.approximate.take_lost(), self.index.take_lost())
        self.retention.trim()

    def find_approximate(self, prompt: PromptState, num_exact: int) -> Continued[Any] | None:
        """Return the approximate blocks that a prompt continues from, or None.

        Args:
            num_exact: leading blocks that the host has as an exact prefix.
        """
        if not self.continuation or prompt.recovery_key is None or prompt.refusal is not None:
            return None
        # The last token is always computed, so its block is never shared.
        chains = prompt.provenance.chains(prompt.input_ids[:-1], self.pool.block_size)
        weight = 0.0 if self.cost_model is None else self.cost_model.exactness_weight
        return self.approximate.find(prompt.recovery_key, chains, num_exact, weight)

    def decide(
        self, prompt: PromptState, hits: Mapping[int, int], earlier: Reuse | None = None
    ) -> Reuse:
        """Decide what a prompt reuses in addition to the blocks that the host has found.

        Args:
            hits: page of each exact block, and of each block that it continues from.
            earlier: decision that waits to be carried out. It is returned if it still holds.
        """
        tokens, size = prompt.input_ids, self.pool.block_size
        if prompt.documents:
            return Reuse(Plan.for_documents(len(tokens), size, prompt.documents))
        if prompt.refusal is not None:
            plan = Plan.for_prompt(len(tokens), size, hits)
            return Reuse(plan, hits, refused=prompt.refusal)

        if earlier is not None and self._still_holds(earlier, prompt, hits):
            return earlier

        free = np.ones(len(tokens), bool)
        in_blocks(free, size)[list(hits)] = False
        matches = self.index.match(self.query(prompt, tokens, free), prompt.report)
        matches, refused = self._choose(prompt, matches, len(hits) * size)
        in_place = self._in_place(prompt, hits, matches)
        cached, matches = self.index.label(hits, matches)
        continues = prompt.continued is not None
        plan = Plan.for_prompt(
            len(tokens), size, hits, matches, in_place, cached, continues=continues
        )
        sources = distinct(plan.graft_sources.numpy() // size).tolist()
        pages = tuple(in_place.values())
        versions = self.pool.versions_of(sources)
        return Reuse(plan, hits, matches, sources, versions, pages, refused=refused)

    def query(self, prompt: PromptState, tokens: np.ndarray, free: np.ndarray) -> MatchQuery:
        """Return the query for text in a prompt that can be grafted.

        Args:
            tokens: the prompt or the first tokens of it, int64 [t].
            free: bool [t], see `MatchQuery`.
        """
        return self.index.query(
            tokens,
            prompt.scopes,
            free,
            similar=prompt.matches_similar,
            whole=prompt.grafts_local_heads,
        )

    def mark(self, prompt: PromptState, reuse: Reuse | None = None) -> None:
        """Note what makes a prompt's KV approximate: blocks that it continues from, and grafts."""
        prompt.provenance.reset()
        if prompt.continued is not None:
            steps = prompt.continued.steps(self.pool.block_size)
            prompt.provenance.mark_approximate(steps)
        if reuse is not None:
            prompt.provenance.mark_approximate(reuse.steps, reuse.spans)

    def learn(self, prompt: PromptState, num_computed: float) -> None:
        """Update the cost model after a pass that computed `num_computed` tokens in all layers."""
        plan = prompt.plan
        if self.cost_model is None or plan is None or prompt.documents:
            return
        num_new = int(plan.fresh.sum())
        num_recovered = num_computed - num_new
        self.cost_model.learn(prompt.recovery_name, num_recovered, int(plan.grafted.sum()), num_new)

    def register(
        self,
        prompt: PromptState,
        pages: np.ndarray,
        depths: np.ndarray,
        keys: Sequence[Any] = (),
        *,
        unlimited: bool = False,
    ) -> None:
        """Let other prompts find the first n blocks of a prompt.

        They can graft from the blocks up to `max_depth`. Prompts that begin with the same text can
        continue from the approximate ones.

        Args:
            pages: int64 [n].
            depths: int16 [n], see `BlockProvenance.depths`.
            keys: keys of the blocks in the host's cache, from the first approximate one on.
            unlimited: see `ReuseIndex.register`.
        """
        provenance = prompt.provenance
        tokens = prompt.input_ids[: len(pages) * self.pool.block_size]
        self.index.register(provenance, tokens, pages, depths, unlimited=unlimited)
        first = int(np.argmax(depths > 0)) if (depths > 0).any() else len(pages)
        if (
            not self.continuation
            or prompt.recovery_key is None
            or max(first, provenance.num_continuable) >= len(pages)
        ):
            return

        # Blocks of the answer hold no grafted tokens.
        is_grafted = np.zeros(len(pages), bool)
        if prompt.plan is not None:
            grafted = prompt.plan.grafted_blocks[: len(pages)]
            is_grafted[: len(grafted)] = grafted

        num_added = self.approximate.add(
            prompt.recovery_key,
            provenance.chains(tokens, self.pool.block_size),
            first,
            keys,
            depths[first:].tolist(),
            is_grafted[first:].tolist(),
        )
        provenance.num_continuable = first + num_added

    def leave(self, prompt: PromptState, pages: Sequence[int], depths: np.ndarray) -> None:
        """Note, before a request releases these first blocks, which of them only prompts that
        continue from it can use.

        Args:
            depths: int16 [pages].
        """
        self.retention.add(pages, is_copied(prompt.plan, depths, self.index.max_depth))

    def clear(self) -> None:
        """Unpin all documents, and forget everything."""
        for entry in self.pins.list():
            self.pins.delete(entry.name, entry.namespace)
        self.index.clear()
        self.approximate.clear()
        self.retention = GraftedBlockRetention(self.pool)

    def _choose(
        self, prompt: PromptState, matches: list[Match], num_known: int
    ) -> tuple[list[Match], str | None]:
        """Return the matches that are worth grafting, and the reason if none is."""
        if self.cost_model is None or not matches:
            return matches, None
        chosen, estimate = self.cost_model.choose(
            matches,
            len(prompt.input_ids),
            num_known,
            prompt.policy_name,
            approximate=prompt.continued is not None,
        )
        report = prompt.report
        report.estimated_full_s, report.estimated_reuse_s = estimate.full_s, estimate.reuse_s
        return chosen, estimate.reason

    def _still_holds(self, reuse: Reuse, prompt: PromptState, hits: Mapping[int, int]) -> bool:
        """Return whether a decision that waits still holds with what the host finds now."""
        sources = np.array(reuse.sources, np.int64)
        is_whole = self.index.is_whole if prompt.grafts_local_heads else None
        return (
            reuse.plan.num_tokens == len(prompt.input_ids)
            and reuse.hits.keys() == hits.keys()
            and reuse.in_place == tuple(self._in_place(prompt, hits, reuse.matches).values())
            and bool(self.pool.is_live(sources, reuse.versions).all())
            and (is_whole is None or bool(is_whole(sources).all()))
        )

    def _in_place(
        self, prompt: PromptState, hits: Mapping[int, int], matches: Sequence[Match]
    ) -> dict[int, int]:
        """Return the pages that the policy may recompute, by block.

        They hold grafted tokens of an earlier prompt, and nobody else reads them.
        """
        if prompt.continued is None or not (prompt.recovers_in_place and self._recovers_in_place):
            return {}
        sources = {page for match in matches for page in match.pages.tolist()}
        grafted = {block: hits[block] for block in prompt.continued.grafted_blocks if block in hits}
        return {
            block: page
            for block, page in grafted.items()
            if page not in sources and not self.pool.ref_count(page)
        }
