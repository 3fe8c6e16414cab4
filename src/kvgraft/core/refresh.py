"""Idle refresh: choose text that is grafted but known only approximately, to recompute it exactly
while nothing else runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.core.table import EntryTable
from kvgraft.methods import require_share

# Grafts of a block before it is refreshed, and between two refreshes.
LEAST_USES = 1
# Shortest text to refresh; shorter ones would split grafts into pieces.
LEAST_TOKENS = 64
# Number of namespaces that are remembered, the most recent ones.
NAMESPACES = 4096


@dataclass(frozen=True, eq=False)
class TextToRead:
    """Tokens int64 [n] of whole blocks, and the namespace that owns them."""

    namespace: str
    tokens: np.ndarray


@dataclass
class Allowance:
    """Budget of the idle refresh: at most a share of the prompt tokens that requests have
    brought."""

    share: float
    num_brought: int = 0
    num_read: int = 0

    def __post_init__(self) -> None:
        require_share("idle_refresh", self.share)

    @property
    def left(self) -> int:
        """Tokens that may still be refreshed."""
        return int(self.share * self.num_brought) - self.num_read


class Refresh:
    """Counts grafts by page, and chooses the text that should become exact.

    Candidates are runs of blocks that were computed over grafts, one after the other in one prompt,
    and that others have grafted from. A run is refreshed if its namespace knows no exact KV of the
    same content. Recomputed as a prompt of its own, the text is registered at depth 0, which
    matching prefers, and depends on no other text.
    """

    def __init__(self, index: ReuseIndex) -> None:
        self._index = index
        # Grafts of each page in that version of its content.
        self._uses = np.zeros(index.pool.num_pages + 1, np.int32)
        self._versions = np.zeros(index.pool.num_pages + 1, np.int64)
        # By scope, the most recent one last.
        self._namespaces: dict[bytes, str] = {}

    def note(self, scope: bytes, namespace: str, pages: Sequence[int]) -> None:
        """Count a request of this namespace that grafts from these distinct pages. The caller must
        hold the pages."""
        self._namespaces.pop(scope, None)
        self._namespaces[scope] = namespace
        if len(self._namespaces) > NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]
        where, versions = np.array(pages, np.int64), self._index.pool.versions_of(pages)
        self._uses[where[self._versions[where] != versions]] = 0
        self._versions[where] = versions
        self._uses[where] += 1

    def choose(self, most_tokens: int, longest: int) -> TextToRead | None:
        """Return the text of at most `most_tokens` tokens whose approximate blocks are grafted from
        most, or None.

        It is not chosen again before it has been used again.

        Args:
            longest: greatest number of tokens in a prompt; a longer text is cut.
        """
        entries, size = self._entries, self._index.pool.block_size
        for run in sorted(self._runs(), key=self._value, reverse=True):
            run = run[: longest // size]
            if not LEAST_TOKENS <= size * len(run) <= most_tokens:
                continue
            self._uses[entries.page[run]] = 0
            namespace = self._namespace(run)
            if namespace is not None:
                return TextToRead(namespace, entries.tokens[run].reshape(-1).astype(np.int64))
        return None

    @property
    def _entries(self) -> EntryTable:
        return self._index.segments.blocks.entries

    def _runs(self) -> Iterator[np.ndarray]:
        """Yield runs of entries of one source that are consecutive, approximate, live and used:
        int32 [n].

        The first and the last entry of a run have content that is not known exactly.
        """
        entries = self._entries
        ids = entries.held()
        ids = ids[(entries.depth[ids] > 0) & (self._uses_of(ids) >= LEAST_USES)]
        ids = ids[entries.live(ids)]
        ids = ids[np.lexsort((entries.source_start[ids], entries.source[ids]))]
        joined = np.diff(entries.source_start[ids]) == self._index.pool.block_size
        joined &= np.diff(entries.source[ids]) == 0
        for run in np.split(ids, np.flatnonzero(~joined) + 1):
            wanted = np.flatnonzero(~self._is_exact(run))
            if wanted.size:
                yield run[wanted[0] : wanted[-1] + 1]

    def _value(self, run: np.ndarray) -> int:
        """Number of grafts from blocks whose content is not known exactly."""
        return int(self._uses_of(run)[~self._is_exact(run)].sum())

    def _uses_of(self, ids: np.ndarray) -> np.ndarray:
        pages = self._entries.page[ids]
        return np.where(self._versions[pages] == self._entries.version[ids], self._uses[pages], 0)

    def _is_exact(self, ids: np.ndarray) -> np.ndarray:
        """Return whether exact KV of the same content is known in the same scope, bool [n]."""
        entries = self._entries
        rows, others = entries.beside(ids)
        same = (entries.depth[others] == 0) & entries.is_same(others, ids[rows])
        exact = np.zeros(len(ids), bool)
        exact[rows[same]] = True
        return exact

    def _namespace(self, run: np.ndarray) -> str | None:
        """Namespace that owns the run's text; None if it is not remembered."""
        return self._namespaces.get(self._entries.scope[run[0]].tobytes())
