"""Block top-k (Vortex, section 3.1, Equations 1 to 4)."""

from kvgraft.decode import Caches, Flow, GeMM, Max, Mean, Selection, Value, topK


class BlockTopK(Flow):
    """Blocks by the inner product of a query and their mean key. The best query of the group
    counts.
    """

    name = "block_topk"

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"centroids": (head_dim,)}

    def forward_cache(self, c: Caches) -> None:
        c["centroids"] = Mean(c["k"], dim=2)

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        return topK(Max(GeMM(c["centroids"], q.T), dim=2), self.topk_blocks)
