"""Rows of the paged pool that hold the KV heads of a layer, and the tokens that these heads see."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HeadSet:
    """KV heads of one layer in consecutive streams that follow one page list and see all its
    tokens.
    """

    heads: tuple[int, ...]
    streams: slice
    page_list: int

    @property
    def places(self) -> slice | tuple[int, ...]:
        """Index of these heads in tensors of all heads.

        It is a slice if the heads are consecutive, because a slice needs no index tensor on the
        device.
        """
        return index_of(self.heads)


def index_of(heads: tuple[int, ...]) -> slice | tuple[int, ...]:
    """Return an index of these heads in tensors of all heads, a slice if they are consecutive."""
    first, last = heads[0], heads[-1]
    return slice(first, last + 1) if heads == tuple(range(first, last + 1)) else heads


@dataclass(frozen=True)
class LayerHeads:
    """Places of the KV heads of one layer, and the tokens that they see (RedKnot, section 4.3).

    Attributes:
        streams: row of the pool that holds each head's tokens.
        page_lists: page list of each head (row of `Context.slots`).
        local: True for a head that sees only the sinks and the window of the layout.
    """

    streams: tuple[int, ...]
    page_lists: tuple[int, ...]
    local: tuple[bool, ...]

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Heads that see sinks and a window."""
        return tuple(head for head, is_local in enumerate(self.local) if is_local)

    @cached_property
    def of_windowed(self) -> "LayerHeads":
        """The heads that see sinks and a window, as heads of a layer of their own."""
        own = self.windowed
        streams, page_lists = (
            tuple(part[head] for head in own) for part in (self.streams, self.page_lists)
        )
        return LayerHeads(streams, page_lists, (True,) * len(own))

    @cached_property
    def whole(self) -> tuple[HeadSet, ...]:
        """Heads that see all tokens, in as few sets as possible."""
        return self.sets([head for head, is_local in enumerate(self.local) if not is_local])

    @cached_property
    def every(self) -> tuple[HeadSet, ...]:
        """All heads, in as few sets as possible."""
        return self.sets(range(len(self.streams)))

    def sets(self, heads: Sequence[int]) -> tuple[HeadSet, ...]:
        """Return sets of these heads, each with one page list and consecutive streams."""
        runs: list[list[int]] = []
        for head in sorted(heads, key=lambda head: (self.page_lists[head], self.streams[head])):
            before = runs[-1][-1] if runs else head
            same_pages = self.page_lists[before] == self.page_lists[head]
            if runs and same_pages and self.streams[head] == self.streams[before] + 1:
                runs[-1].append(head)
            else:
                runs.append([head])

        return tuple(
            HeadSet(
                tuple(run),
                slice(self.streams[run[0]], self.streams[run[-1]] + 1),
                self.page_lists[run[0]],
            )
            for run in runs
        )
