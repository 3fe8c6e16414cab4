"""Pinned documents: text whose physical blocks stay while others are reclaimed (SparseX, sections
4.1 and 4.2).

This module owns no memory. An entry names pages of the common pool, and holds one reference to
each.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvgraft.setting_schema import POSITIVE_SHARE


class PinnablePages(Protocol):
    """Operations of a page pool that pinned documents need; a host implements them."""

    hit_counts: np.ndarray  # int64 [pages], how often each page was reused

    @property
    def num_pages(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    def ref_count(self, page: int) -> int: ...
    def acquire(self, pages: Sequence[int]) -> None: ...
    def release(self, pages: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class PinnedDocument:
    """Document that is pinned under one name. `num_shed` of its pages were released under memory
    pressure. `owner`, who may have several namespaces, is charged for the others."""

    name: str
    namespace: str
    pages: tuple[int, ...]
    num_shed: int = 0
    owner: str = ""


class PinnedDocuments:
    """Named sets of pinned pages. The least-referenced pages are released when the pool fills up.

    A namespace only sheds its own pages, so that no tenant can evict another's documents.
    `capacity` leaves room for the requests of the others.

    Args:
        pool: the page pool that all requests share.
        watermark: share of used pages (0 to 1] above which `shed` releases pinned pages.
        capacity: share of the pool (0 to 1] that all pinned pages together may take.
    """

    def __init__(self, pool: PinnablePages, watermark: float = 0.9, capacity: float = 0.5) -> None:
        POSITIVE_SHARE.check("watermark", watermark)
        POSITIVE_SHARE.check("capacity", capacity)
        self.pool = pool
        self.watermark = watermark
        self.capacity = capacity
        self._entries: dict[tuple[str, str], PinnedDocument] = {}

    def insert(
        self,
        name: str,
        namespace: str,
        pages: Sequence[int],
        owner: str | None = None,
        quota: float = 1.0,
    ) -> PinnedDocument:
        """Pin pages that hold content. An entry of that name in this namespace is replaced.

        Args:
            owner: who is charged; None: the namespace.
            quota: share of the capacity that this owner may take.

        Raises:
            ValueError: there are no pages, or more than there is room for.
        """
        if not pages:
            raise ValueError(f"nothing to pin under {name!r}: the text fills no whole block")

        others = {
            page for key, e in self._entries.items() if key != (namespace, name) for page in e.pages
        }
        room = int(self.capacity * self.pool.num_pages)
        if len(others | set(pages)) > room:
            raise ValueError(
                f"{name!r} needs {len(set(pages) - others)} pinned pages, but {len(others)} of at "
                f"most {room} are taken"
            )

        owner = namespace if owner is None else owner
        mine = (
            e
            for e in self._entries.values()
            if e.owner == owner and (e.namespace, e.name) != (namespace, name)
        )
        charged = {page for entry in mine for page in entry.pages}
        if len(charged | set(pages)) > int(quota * room):
            raise ValueError(
                f"{name!r} needs {len(set(pages) - charged)} pinned pages, but its owner has "
                f"{len(charged)} of at most "
                f"{int(quota * room)}, a share of {quota:.2g}"
            )

        self.pool.acquire(pages)
        if (namespace, name) in self._entries:
            self.delete(name, namespace)

        entry = PinnedDocument(name, namespace, tuple(pages), owner=owner)
        self._entries[namespace, name] = entry
        return entry

    @property
    def pages(self) -> set[int]:
        """All pinned pages, each once."""
        return {page for entry in self._entries.values() for page in entry.pages}

    def __len__(self) -> int:
        """Entries of all namespaces."""
        return len(self._entries)

    def list(self, namespace: str | None = None) -> list[PinnedDocument]:
        """Entries in order of insertion, of one namespace or of all."""
        return [entry for (owner, _), entry in self._entries.items() if namespace in (None, owner)]

    def delete(self, name: str, namespace: str) -> None:
        """Unpin an entry; KeyError if the name is unknown. Its content stays findable until it is
        reclaimed."""
        if (namespace, name) not in self._entries:
            raise KeyError(f"no pinned entry {name!r} in namespace {namespace!r}")
        self.pool.release(self._entries.pop((namespace, name)).pages)

    @property
    def num_unpressed(self) -> int:
        """Pages that can be allocated before the watermark is reached, above which pinned pages are
        shed."""
        return max(int(self.watermark * self.pool.num_pages) - self.pool.num_used, 0)

    def num_sheddable(self, namespace: str, spare: Container[int] = ()) -> int:
        """Pages that would be freed by shedding everything of this namespace except `spare`."""
        return len(self._freeable(namespace, spare))

    def shed(self, namespace: str, num_needed: int = 0, spare: Container[int] = ()) -> int:
        """Release this namespace's least-referenced pages until `num_needed` more pages fit below
        the watermark.

        Pages in `spare` stay. Pages that a request also holds stay, since releasing them would free
        nothing. Entries that lose all their pages disappear.

        Returns:
            The number of pages released.
        """
        excess = max(self.pool.num_used + num_needed - int(self.watermark * self.pool.num_pages), 0)
        if not excess:
            return 0

        order = sorted(
            self._freeable(namespace, spare),
            key=lambda page: (int(self.pool.hit_counts[page]), page),
        )
        shed = set(order[:excess])
        for entry in self.list(namespace) if shed else ():
            gone = [page for page in entry.pages if page in shed]
            pages = tuple(page for page in entry.pages if page not in shed)
            self._entries[namespace, entry.name] = replace(
                entry, pages=pages, num_shed=entry.num_shed + len(gone)
            )
            self.pool.release(gone)

        self._entries = {key: entry for key, entry in self._entries.items() if entry.pages}
        return len(shed)

    def _freeable(self, namespace: str, spare: Container[int]) -> set[int]:
        """Pages, except `spare`, that only entries of this namespace hold."""
        held = Counter(page for entry in self.list(namespace) for page in entry.pages)
        return {
            page
            for page, count in held.items()
            if self.pool.ref_count(page) == count and page not in spare
        }
