"""Quest (Tang et al., 2024)."""

from kvgraft.decode import Add, Caches, Flow, GeMM, Max, Min, Minimum, Relu, Selection, Value, topK


class Quest(Flow):
    """Blocks by the greatest inner product that a key within the block's envelope could have."""

    name = "quest"

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"low": (head_dim,), "high": (head_dim,)}

    def forward_cache(self, c: Caches) -> None:
        c["low"], c["high"] = Min(c["k"], dim=2), Max(c["k"], dim=2)

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        # sum of max(q high, q low)
        bound = Add(GeMM(c["high"], Relu(q).T), GeMM(c["low"], Minimum(q, 0.0).T))
        return topK(Max(bound, dim=2), self.topk_blocks)
