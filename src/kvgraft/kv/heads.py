"""Head classes and their shared pages: the SegPaged layout (RedKnot, sections 3.2 and 4.3).

The tokens of one KV head of one layer are a *stream*. Streams whose tokens live equally long share
a page list. Heads that keep all tokens follow the first list. Local heads keep only sinks and a
window, and follow the other lists. Every page holds `block_size` tokens of a fixed number of
streams, that of the first list, so one pool of equal pages serves all lists. Without a head map all
streams share one list, as in any paged cache.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kv.profiles import ModelProfile

# name of the file in a model directory
HEAD_MAP_FILE = "heads.json"


class HeadClass(StrEnum):
    """Class of a KV head.

    GLOBAL: sees all tokens, and its output depends on the text before, so its KV is recomputed.
    RETRIEVAL: sees all tokens, but its cached KV stays right at another position. LOCAL: sees the
    sinks and a window.
    """

    GLOBAL = "global"
    RETRIEVAL = "retrieval"
    LOCAL = "local"


class HeadMap(ModelProfile, frozen=True, forbid_unknown_fields=True):
    """Classes of a model's KV heads, measured offline (`kvgraft profile-heads`).

    Attributes:
        sinks, window: number of tokens that local heads see at the beginning of a prompt, and up to
            the query's own.
        classes: class of each layer and KV head.
        shift, far_mass, effect: measurements of each layer and KV head; empty if not measured.
    """

    sinks: int
    window: int
    classes: tuple[tuple[HeadClass, ...], ...]
    shift: tuple[tuple[float, ...], ...] = ()
    far_mass: tuple[tuple[float, ...], ...] = ()
    effect: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def describe(cls) -> str:
        return "head map"

    def check(self, model: str, num_layers: int, num_kv_heads: int) -> None:
        """Raise ValueError unless the map was made for this model and can be used."""
        self.check_model(model)
        if [len(layer) for layer in self.classes] != [num_kv_heads] * num_layers:
            raise ValueError(
                f"the head map must give {num_kv_heads} classes in each of {num_layers} layers"
            )
        if self.sinks < 0 or self.window < 1:
            raise ValueError(
                f"sinks must be at least 0 and window at least 1, got {self.sinks} and "
                f"{self.window}"
            )
        if not self.num_kept:
            raise ValueError(
                "the head map calls every head local: at least one must see everything"
            )

    @property
    def num_kept(self) -> int:
        """Number of heads, over all layers, that keep every token."""
        return sum(found is not HeadClass.LOCAL for layer in self.classes for found in layer)

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the settings that determine which tokens are kept."""
        kept = (
            self.sinks,
            self.window,
            [self.heads(layer, HeadClass.LOCAL) for layer in range(len(self.classes))],
        )
        return hashlib.sha256(msgspec.json.encode(kept)).hexdigest()

    def levelled(self, parts: int) -> "HeadMap":
        """Return a map in which each of `parts` equal parts of a layer's heads has the same number
        of local heads, for tensor-parallel ranks with one block table for all.

        The last local heads of the other parts are global instead.
        """
        rows = []
        for row in self.classes:
            size = max(1, len(row) // parts)
            starts = range(0, len(row), size)
            least = min(row[at : at + size].count(HeadClass.LOCAL) for at in starts)
            rows.append(
                tuple(kind for at in starts for kind in _keeping(row[at : at + size], least))
            )
        return msgspec.structs.replace(self, classes=tuple(rows))

    def heads(self, layer: int, *classes: HeadClass) -> tuple[bool, ...]:
        """Return for each KV head of a layer whether it is of one of these classes."""
        return tuple(found in classes for found in self.classes[layer])


def _keeping(classes: Sequence[HeadClass], num_local: int) -> Iterator[HeadClass]:
    """Yield the classes of heads, of which only the first `num_local` local ones stay local."""
    for kind in classes:
        num_local -= kind is HeadClass.LOCAL
        yield HeadClass.GLOBAL if kind is HeadClass.LOCAL and num_local < 0 else kind


@dataclass(frozen=True)
class StreamLayout:
    """Places of the streams of all layers and KV heads.

    Attributes:
        layers: streams and page lists of each layer's heads.
        width: streams of a page.
        num_lists: page lists of a sequence; the first keeps every token.
        sinks, window: tokens that the other lists keep.
    """

    layers: tuple[LayerHeads, ...]
    width: int
    num_lists: int = 1
    sinks: int = 0
    window: int = 1

    @classmethod
    def dense(cls, num_layers: int, num_kv_heads: int) -> "StreamLayout":
        """Return the layout in which all heads keep all tokens."""
        shared = ((0,) * num_kv_heads, (False,) * num_kv_heads)
        starts = range(0, num_layers * num_kv_heads, num_kv_heads)
        return cls(
            tuple(
                LayerHeads(tuple(range(first, first + num_kv_heads)), *shared) for first in starts
            ),
            num_layers * num_kv_heads,
        )

    @classmethod
    def by_class(cls, head_map: HeadMap) -> "StreamLayout":
        """Return the layout in which local heads keep only sinks and window.

        The last local list is padded, which costs the pages of one window.
        """
        width, counts, layers = head_map.num_kept, {True: 0, False: 0}, []
        for index in range(len(head_map.classes)):
            local = head_map.heads(index, HeadClass.LOCAL)
            # number of each head among the streams of its kind
            numbers = []
            for kind in local:
                numbers.append(counts[kind])
                counts[kind] += 1
            streams = tuple(number % width for number in numbers)
            lists = tuple(
                (1 + number // width) * kind for number, kind in zip(numbers, local, strict=True)
            )
            layers.append(LayerHeads(streams, lists, local))

        return cls(
            tuple(layers), width, 1 + -(-counts[True] // width), head_map.sinks, head_map.window
        )

    def streams(self, page_list: int, layers: range) -> range:
        """Return the streams of these layers in a list. They are consecutive if the layers are."""
        found = [
            stream
            for index in layers
            for stream, own in zip(
                self.layers[index].streams, self.layers[index].page_lists, strict=True
            )
            if own == page_list
        ]
        return range(min(found), max(found) + 1) if found else range(0)

    def seen(self, blocks: np.ndarray, first: int, block_size: int) -> np.ndarray:
        """Return whether local heads see any token of blocks int [b] from a query at position
        `first` or later, bool [b].
        """
        seen: np.ndarray = blocks * block_size < self.sinks
        return seen | ((blocks + 1) * block_size > first - self.window + 1)

    @property
    def num_local_lists(self) -> int:
        """Number of lists that keep sinks and window."""
        return self.num_lists - 1

    def window_blocks(self, block_size: int) -> int:
        """Return the maximum number of blocks in a local list between two decode steps."""
        return -(-self.sinks // block_size) + -(-(self.window - 1) // block_size) + 1
