"""Text that is known only approximately, and grafted all the same: what to read anew, exactly,
while nothing else runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.methods import require_share
from kvgraft.reuse.index import ReuseIndex
from kvgraft.segments.table import EntryTable

LEAST_USES = 1  # of a block before it is read anew, and again before it is read once more
LEAST_TOKENS = 64  # of a text: shorter ones would cut what is grafted into pieces
NAMESPACES = 4096  # that are remembered: those that grafted last


@dataclass(frozen=True, eq=False)
class TextToRead:
    """Tokens int64 [n], whole blocks, and the namespace whose they are."""

    namespace: str
    tokens: np.ndarray


@dataclass
class Allowance:
    """How much may be read anew: at most a share of the prompt tokens that requests have
    brought."""

    share: float
    num_brought: int = 0
    num_read: int = 0

    def __post_init__(self) -> None:
        require_share("idle_refresh", self.share)

    @property
    def left(self) -> int:
        """Tokens."""
        return int(self.share * self.num_brought) - self.num_read


class Refresh:
    """Counts what is grafted, and says what of it should be exact.

    A run of blocks that were computed over grafts, one after the other in one prompt, and that
    others have grafted from since, is read anew if no exact KV of the same content is known in its
    namespace. Read as a prompt of its own it is registered at depth 0, which matching prefers; and
    it carries nobody else's context."""

    def __init__(self, index: ReuseIndex) -> None:
        self._index = index
        # by page, of the content of that version
        self._uses = np.zeros(index.pool.num_pages + 1, np.int32)
        self._versions = np.zeros(index.pool.num_pages + 1, np.int64)
        self._namespaces: dict[bytes, str] = {}  # by scope, the last one that grafted last

    def note(self, scope: bytes, namespace: str, pages: Sequence[int]) -> None:
        """A request of this namespace grafts from these distinct pages, which are held."""
        self._namespaces.pop(scope, None)
        self._namespaces[scope] = namespace
        if len(self._namespaces) > NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]
        where, versions = np.array(pages, np.int64), self._index.pool.versions_of(pages)
        self._uses[where[self._versions[where] != versions]] = 0
        self._versions[where] = versions
        self._uses[where] += 1

    def choose(self, most_tokens: int, longest: int) -> TextToRead | None:
        """The text whose approximate blocks are grafted from most, if there is one of at most so
        many tokens. It is not chosen again before it has been used again.

        Args:
            longest: tokens that a prompt may have; a text that is longer is cut.
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
        """Entries of consecutive blocks of a source that are approximate, live and used, int32 [n];
        at either end is one whose content is not known exactly."""
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
        """How often blocks were grafted that are not known exactly."""
        return int(self._uses_of(run)[~self._is_exact(run)].sum())

    def _uses_of(self, ids: np.ndarray) -> np.ndarray:
        pages = self._entries.page[ids]
        return np.where(self._versions[pages] == self._entries.version[ids], self._uses[pages], 0)

    def _is_exact(self, ids: np.ndarray) -> np.ndarray:
        """Whether exact KV of the same content is known in the same scope, bool [n]."""
        entries = self._entries
        rows, others = entries.beside(ids)
        same = (entries.depth[others] == 0) & entries.is_same(others, ids[rows])
        exact = np.zeros(len(ids), bool)
        exact[rows[same]] = True
        return exact

    def _namespace(self, run: np.ndarray) -> str | None:
        """Whose text it is; None if that is not remembered."""
        return self._namespaces.get(self._entries.scope[run[0]].tobytes())
