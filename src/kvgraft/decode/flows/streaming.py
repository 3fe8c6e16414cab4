"""StreamingLLM (Xiao et al., 2023), by blocks."""

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.decode.flow import Caches, Flow, Selection
from kvgraft.decode.graph import Value


@dataclass(frozen=True)
class Streaming(Flow):
    """The last k blocks, whatever the query; the first, which holds the sinks, is always attended to."""

    name: ClassVar[str] = "streaming"

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        num_blocks = c["k"].shape[1]
        return [num_blocks - count for count in range(1, self.k + 1)]
