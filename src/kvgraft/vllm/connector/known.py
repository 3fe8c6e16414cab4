"""What has been read and can be grafted: virtual blocks, frozen blocks, pins, all in vLLM's own block pool."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvgraft.prefill.plan import Plan
from kvgraft.segments.frozen import FrozenPool
from kvgraft.segments.index import VirtualBlockIndex
from kvgraft.segments.matches import Lineage, Match
from kvgraft.segments.similar import SimilarIndex
from kvgraft.vllm.connector.tracked import Candidate, Tracked
from kvgraft.vllm.options import Control, RequestOptions
from kvgraft.vllm.pool import SharedPool
from kvgraft.vllm.settings import Settings


class KnownText:
    """Finds known text for a prompt and names what requests have read.

    Args:
        kv_cache_manager: vLLM's, with one group of full attention.
        settings: of the server.
        frozen_capacity: share of the pool that frozen blocks may take.
        anchors: token sequences that begin a segment, for near-duplicates.
    """

    def __init__(
        self,
        kv_cache_manager: Any,
        block_size: int,
        settings: Settings,
        frozen_capacity: float,
        anchors: Iterable[Sequence[int]] = (),
    ) -> None:
        self.pool = SharedPool(kv_cache_manager.block_pool)
        self.index = VirtualBlockIndex(block_size, self.pool.is_live)
        self.cuts = similarity, anchors = settings.similarity, list(anchors)
        self.similar = SimilarIndex(self.index, similarity, anchors) if similarity else None
        self.frozen = FrozenPool(self.pool, settings.watermark, frozen_capacity)
        self.block_size = block_size
        self.approximate_sources = settings.approximate_sources
        self.require_clean_context = settings.require_clean_context
        self._shortest = settings.min_graft_tokens

    def find(self, tracked: Tracked, num_prefix: int) -> Candidate | None:
        """A plan for the request's tokens, of which vLLM has num_prefix; None if nothing else is known.

        The plan of an earlier call is kept while the prompt's exact hits are the same and its sources live. A prompt
        of which a part is kept has no sources: its documents are read on their own.
        """
        kept = tracked.candidate
        tokens = np.array(tracked.token_ids, np.int64)
        if tracked.whole:
            plan = Plan.for_documents(len(tokens), self.block_size, tracked.documents)
            return Candidate(plan, 0, [], np.zeros(0, np.int64))
        if kept and kept.num_prefix == num_prefix and kept.plan.num_tokens == len(tokens) and self._is_live(kept):
            return kept
        free = np.ones(len(tokens), bool)
        free[:num_prefix] = False
        matches = self.match(tracked, tokens, free)
        plan = Plan.for_prompt(len(tokens), self.block_size, range(num_prefix // self.block_size), matches)
        if not plan.graft_targets.numel():
            return None
        sources = sorted(set((plan.graft_sources // self.block_size).tolist()))
        return Candidate(plan, num_prefix, sources, self.pool.versions(sources))

    def documents(self, tracked: Tracked) -> tuple[range, ...]:
        """Stretches of a prompt that were read before, each in one piece, if they are worth it; not its last token."""
        tokens = np.array(tracked.token_ids[:-1], np.int64)
        matches = self.match(tracked, tokens)
        spans = (range(match.start, match.start + match.length) for match in matches)
        return tuple(span for span in spans if len(span) >= self._shortest)

    def make_room(self, tracked: Tracked, num_blocks: int) -> None:
        """Shed frozen blocks of the request's own namespace if num_blocks more would pass the watermark."""
        self.frozen.shed(tracked.namespace, num_blocks)

    def pin(self, candidate: Candidate) -> None:
        """Hold the sources: nothing that vLLM allocates may take them before they are copied."""
        self.pool.acquire(candidate.sources)

    def offer(self, tracked: Tracked, blocks: list[int], num_tokens: int) -> None:
        """Name the full blocks of the first num_tokens tokens that were not named before.

        Blocks that hold or follow grafts are named only with `approximate_sources`.
        """
        first, stop = tracked.num_offered, min(num_tokens // self.block_size, len(blocks))
        if not self.approximate_sources:
            stop = min(stop, tracked.first_approximate // self.block_size)
        if stop <= first:
            return
        versions = self.pool.versions(blocks[first:stop])
        if not versions.all():  # from here on vLLM does not know the content (yet)
            stop = first + int(np.flatnonzero(versions == 0)[0])
            versions = versions[: stop - first]
        tokens = np.array(tracked.request.all_token_ids[first * self.block_size : stop * self.block_size], np.int64)
        exact = min(max(tracked.first_approximate // self.block_size - first, 0), stop - first)
        for lineage, part in ((Lineage.EXACT, slice(0, exact)), (Lineage.APPROXIMATE, slice(exact, stop - first))):
            self._name(tracked, blocks[first:stop][part], versions[part], tokens, first, part, lineage)
        tracked.num_offered = max(stop, first)

    def apply(self, tracked: Tracked, blocks: list[int]) -> dict[str, Any]:
        """Carry out a control request that has finished.

        Returns:
            `list`: all `segments` of the namespace. Others: the `segment` as it is or was, and `num_segments` that
            there are now. Or an `error` and its `status`.
        """
        control, namespace = tracked.options, tracked.namespace
        if not isinstance(control, Control):
            raise TypeError(f"{control!r} is no control operation")
        if control.op == "freeze":
            num_blocks = tracked.request.num_prompt_tokens // self.block_size
            if not num_blocks:
                return _error(400, f"nothing to freeze: the text fills no block of {self.block_size} tokens")
            held = self.frozen.pages
            self.pool.hit_counts[[page for page in blocks[:num_blocks] if page not in held]] = 0
            try:
                pages, owner = blocks[:num_blocks], control.owner or namespace
                entry = self.frozen.insert(control.name, namespace, pages, owner, control.quota)
            except ValueError as error:
                return _error(409, str(error))
            return {"segment": self._describe(entry), "num_segments": len(self.frozen.list(namespace))}
        entries = self.frozen.list(namespace)
        if control.op == "list":
            return {"segments": [self._describe(entry) for entry in entries]}
        named = next((entry for entry in entries if entry.name == control.name), None)
        if named is None:
            return _error(404, f"no frozen segment {control.name!r}")
        self.frozen.delete(control.name, namespace)
        return {"segment": self._describe(named), "num_segments": len(entries) - 1}

    def clear(self) -> bool:
        """Let go of all frozen text, unless more is held: then vLLM refuses to forget, and so do we (False)."""
        if self.pool.num_used > len(self.frozen.pages):
            return False
        for entry in self.frozen.list():
            self.frozen.delete(entry.name, entry.namespace)
        return True

    def matches_similar(self, tracked: Tracked) -> bool:
        """Whether near-duplicates are grafted into a request, too."""
        return isinstance(tracked.options, RequestOptions) and tracked.options.match_similar

    def name(self, tokens: np.ndarray, pages: list[int], source: int, source_start: int, scope: bytes) -> None:
        """Let exact blocks that came from elsewhere be grafted: consecutive ones of one source, in these pages."""
        versions = self.pool.versions(pages)
        at = (np.array(pages), versions)
        ids = self.index.insert(tokens, *at, source=source, source_start=source_start, scope=scope)
        if self.similar is not None:
            self.similar.insert(ids, scope)

    def match(self, tracked: Tracked, tokens: np.ndarray, free: np.ndarray | None = None) -> list[Match]:
        """What of a request's tokens int64 [T] is in vLLM's blocks and can be grafted where `free` bool [T] is set."""
        index = self.similar if self.matches_similar(tracked) and self.similar is not None else self.index
        return index.match(
            tokens,
            tracked.scope,
            free=free,
            allow_approximate=self.approximate_sources,
            require_clean_context=self.require_clean_context,
        )

    def _name(
        self,
        tracked: Tracked,
        pages: list[int],
        versions: np.ndarray,
        tokens: np.ndarray,
        first: int,
        part: slice,
        lineage: Lineage,
    ) -> None:
        if not pages:
            return
        size = self.block_size
        ids = self.index.insert(
            tokens[part.start * size : part.stop * size],
            np.array(pages),
            versions,
            source=tracked.source,
            source_start=(first + part.start) * size,
            scope=tracked.scope,
            lineage=lineage,
            after=tracked.last_entry,
            unlimited=isinstance(tracked.options, Control),
        )
        if self.similar is not None:
            self.similar.insert(ids, tracked.scope)
        tracked.last_entry = int(ids[-1])
        tracked.num_sources += int((ids >= 0).sum())

    def _is_live(self, candidate: Candidate) -> bool:
        return bool(self.pool.is_live(np.array(candidate.sources), candidate.versions).all())

    def _describe(self, entry: Any) -> dict[str, Any]:
        return {
            "name": entry.name,
            "num_tokens": len(entry.pages) * self.block_size,
            "num_blocks": len(entry.pages),
            "num_shed": entry.num_shed,
            "hits": int(self.pool.hit_counts[list(entry.pages)].max(initial=0)),
        }


def _error(status: int, text: str) -> dict[str, Any]:
    return {"error": text, "status": status}
