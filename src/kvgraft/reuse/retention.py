"""Grafted copies that outlast their requests, so that prompts can go on with them, and how much
room they may take."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvgraft.prefill.plan import Plan
from kvgraft.reuse.pages import Pages

MEMORY = 0.9  # what is left of earlier losses when there are new ones


class GraftedBlockRetention:
    """Pages that only prompts find which go on with an earlier one, the least recently used first.

    In a full pool they take the place of text that is grafted from. Where prompts bring the same
    documents in ever new arrangements nobody goes on with them; where conversations go on they are
    what the next turn begins with. Which it is is learned from what is asked for when it has just
    been reclaimed: what was lost of one kind gets room at the cost of the other, page for page (the
    idea of ARC; Megiddo and Modha, FAST 2003).

    Attributes:
        budget: pages that copies may take.
    """

    def __init__(self, pool: Pages) -> None:
        self._pool = pool
        self._versions: OrderedDict[int, int] = OrderedDict()  # by page
        self.budget = pool.num_pages
        self._copies = self._sources = 0.0  # lost lately

    def __len__(self) -> int:
        """Pages noted, those that have been reclaimed since counted."""
        return len(self._versions)

    def add(self, pages: Sequence[int], is_copy: np.ndarray) -> None:
        """Note which of the pages that a request leaves are copies, bool [n]; those that it has
        found noted have been used again. The last ones are to go first."""
        versions = self._pool.versions_of(pages).tolist()
        for page, version, copied in list(zip(pages, versions, is_copy, strict=True))[::-1]:
            if copied or self._versions.get(page) == version:
                self._versions[page] = version
                self._versions.move_to_end(page)

    def learn(self, num_lost_copies: int, num_lost_sources: int) -> None:
        """So many pages were asked for that had been reclaimed. The kind of which more has been
        lost lately gets room that many times as fast."""
        if not (num_lost_copies or num_lost_sources):
            return
        self._copies = MEMORY * self._copies + num_lost_copies
        self._sources = MEMORY * self._sources + num_lost_sources
        ratio = (self._sources + 1) / (self._copies + 1)
        budget = min(self.budget, len(self)) if num_lost_sources else self.budget
        budget += round(num_lost_copies * max(1, 1 / ratio) - num_lost_sources * max(1, ratio))
        self.budget = min(max(budget, 0), self._pool.num_pages)

    def trim(self) -> None:
        """Forget the oldest beyond the budget that nobody holds: their pages are the next to be
        reclaimed."""
        for page, version in list(islice(self._versions.items(), max(len(self) - self.budget, 0))):
            is_live = self._pool.versions_of([page])[0] == version
            if is_live and self._pool.ref_count(page):
                continue
            if is_live:
                self._pool.forget([page])
            del self._versions[page]


def is_copied(plan: Plan | None, depths: np.ndarray, max_depth: int) -> np.ndarray:
    """Which blocks of a prompt nobody needs as a source: those that its plan has grafted, be it in
    part, and those of a depth (int [n], of all its blocks) that is too great for one. bool [n]."""
    is_copy: np.ndarray = depths > max_depth
    if plan is not None:
        grafted = plan.grafted_blocks[: len(is_copy)]
        is_copy[: len(grafted)] |= grafted
    return is_copy
