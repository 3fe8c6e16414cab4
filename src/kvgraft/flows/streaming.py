"""StreamingLLM (Xiao et al., 2023), by blocks."""

from kvgraft.decode import Caches, Flow, Selection, Value


class Streaming(Flow):
    """The last k blocks, for every query. The first block, which holds the sinks, is always
    attended to.
    """

    name = "streaming"

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        num_blocks = c["k"].shape[1]
        return [num_blocks - count for count in range(1, self.topk_blocks + 1)]
