"""Retention of grafted copies after their requests end, so that prompts can continue from them,
within a budget."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvgraft.core.pages import Pages
from kvgraft.core.plan import Plan

# New losses multiply the weight of earlier ones by this.
MEMORY = 0.9


class GraftedBlockRetention:
    """Pages that only prompts which continue an earlier one can find, the least recently used
    first.

    In a full pool they occupy room of text that is grafted from. If prompts bring the same
    documents in new orders, no prompt continues from the copies. If conversations continue, the
    next turn begins with them. The budget adapts to what is requested soon after it was reclaimed:
    the kind that was lost gets room from the other, page for page (the idea of ARC; Megiddo and
    Modha, FAST 2003).

    Attributes:
        budget: pages that copies may take.
    """

    def __init__(self, pool: Pages) -> None:
        self._pool = pool
        self._versions: OrderedDict[int, int] = OrderedDict()  # by page
        self.budget = pool.num_pages
        # Pages of either kind that were recently lost.
        self._copies = self._sources = 0.0

    def __len__(self) -> int:
        """Pages noted, including those that have been reclaimed since."""
        return len(self._versions)

    def add(self, pages: Sequence[int], is_copy: np.ndarray) -> None:
        """Note which pages of an ending request are copies, bool [n].

        Noted pages that it has found count as used again. Its last pages are the first to be
        dropped.
        """
        versions = self._pool.versions_of(pages).tolist()
        for page, version, copied in list(zip(pages, versions, is_copy, strict=True))[::-1]:
            if copied or self._versions.get(page) == version:
                self._versions[page] = version
                self._versions.move_to_end(page)

    def learn(self, num_lost_copies: int, num_lost_sources: int) -> None:
        """Adapt the budget to the numbers of reclaimed pages that were requested.

        The kind with more recent losses gains room faster, by the ratio of the losses.
        """
        if not (num_lost_copies or num_lost_sources):
            return
        self._copies = MEMORY * self._copies + num_lost_copies
        self._sources = MEMORY * self._sources + num_lost_sources
        ratio = (self._sources + 1) / (self._copies + 1)
        budget = min(self.budget, len(self)) if num_lost_sources else self.budget
        budget += round(num_lost_copies * max(1, 1 / ratio) - num_lost_sources * max(1, ratio))
        self.budget = min(max(budget, 0), self._pool.num_pages)

    def trim(self) -> None:
        """Drop the oldest unused pages beyond the budget. They are the next to be reclaimed."""
        for page, version in list(islice(self._versions.items(), max(len(self) - self.budget, 0))):
            is_live = self._pool.versions_of([page])[0] == version
            if is_live and self._pool.ref_count(page):
                continue
            if is_live:
                self._pool.forget([page])
            del self._versions[page]


def is_copied(plan: Plan | None, depths: np.ndarray, max_depth: int) -> np.ndarray:
    """Return which blocks of a prompt no prompt needs as a source: bool [n].

    These are blocks with grafted tokens, and blocks whose depth (int [n]) exceeds max_depth.
    """
    is_copy: np.ndarray = depths > max_depth
    if plan is not None:
        grafted = plan.grafted_blocks[: len(is_copy)]
        is_copy[: len(grafted)] |= grafted
    return is_copy
