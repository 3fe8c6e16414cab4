"""Head classes, and how they share pages: the SegPaged layout (RedKnot, sections 3.2 and 4.3).

The tokens of one KV head of one layer are a *stream*. Streams whose tokens live equally long share
a page list: all heads that keep everything follow the first list; local heads, of which only sinks
and a window are kept, the others. Every page holds `block_size` tokens of as many streams as there
are in the first list, so that one pool of equal pages serves all lists. Without a head map all
streams share one list, and a page is what it is in any paged cache."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kv.profiles import ModelProfile

HEAD_MAP_FILE = "heads.json"  # in a model directory


class HeadClass(StrEnum):
    """What a KV head needs.

    GLOBAL: its output shifts with the text before it, so that it is recomputed, over everything.
    RETRIEVAL: it sees everything, but its cached KV stays right when it moves. LOCAL: it sees the
    sinks and a window."""

    GLOBAL = "global"
    RETRIEVAL = "retrieval"
    LOCAL = "local"


class HeadMap(ModelProfile, frozen=True, forbid_unknown_fields=True):
    """The classes of a model's KV heads, found offline (`kvgraft profile-heads`).

    Attributes:
        sinks, window: what local heads see: first tokens of a prompt, and last tokens up to the
            query's own.
        classes: of every layer and KV head.
        shift, far_mass, effect: what the profiler measured of every layer and KV head; empty if it
            did not.
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
        """Heads, over all layers, that keep every token."""
        return sum(found is not HeadClass.LOCAL for layer in self.classes for found in layer)

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of what decides which tokens are kept."""
        kept = (
            self.sinks,
            self.window,
            [self.heads(layer, HeadClass.LOCAL) for layer in range(len(self.classes))],
        )
        return hashlib.sha256(msgspec.json.encode(kept)).hexdigest()

    def heads(self, layer: int, *classes: HeadClass) -> tuple[bool, ...]:
        """Which KV heads of a layer are of one of these classes."""
        return tuple(found in classes for found in self.classes[layer])


@dataclass(frozen=True)
class StreamLayout:
    """Where the stream of every layer and KV head lies.

    Attributes:
        layers: of every layer the stream and the page list of its heads.
        width: streams of a page.
        num_lists: page lists of a sequence; the first keeps every token.
        sinks, window: what the other lists keep.
    """

    layers: tuple[LayerHeads, ...]
    width: int
    num_lists: int = 1
    sinks: int = 0
    window: int = 1

    @classmethod
    def dense(cls, num_layers: int, num_kv_heads: int) -> "StreamLayout":
        """All heads keep everything."""
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
        """Local heads keep sinks and window only. Their last list is padded; what that costs is a
        window's pages."""
        width, counts, layers = head_map.num_kept, {True: 0, False: 0}, []
        for index in range(len(head_map.classes)):
            local = head_map.heads(index, HeadClass.LOCAL)
            numbers = []  # of each head among the streams of its kind
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
        """The streams that these layers have in a list; they are consecutive if the layers are."""
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
        """bool [b]: whether local heads see anything of blocks int [b] from a query at position
        `first`, or later."""
        seen: np.ndarray = blocks * block_size < self.sinks
        return seen | ((blocks + 1) * block_size > first - self.window + 1)

    @property
    def num_local_lists(self) -> int:
        """Lists that keep sinks and window."""
        return self.num_lists - 1

    def window_blocks(self, block_size: int) -> int:
        """Blocks that a local list holds at most between two decode steps."""
        return -(-self.sinks // block_size) + -(-(self.window - 1) // block_size) + 1
