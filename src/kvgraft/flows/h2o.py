"""H2O (Zhang et al., 2023), by blocks."""

from kvgraft.decode import (
    Add,
    Caches,
    CFill,
    Flow,
    GeMM,
    Load,
    Mean,
    Save,
    Selection,
    Softmax,
    Sum,
    Value,
    topK,
)


class H2O(Flow):
    """Heavy hitters: blocks by the attention to their mean key in all steps so far."""

    name = "h2o"

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"centroids": (head_dim,), "acc": (1,)}

    def forward_cache(self, c: Caches) -> None:
        c["centroids"], c["acc"] = Mean(c["k"], dim=2), CFill(c["acc"])

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        received = Sum(Softmax(GeMM(c["centroids"], q.T), dim=1), dim=2)
        return topK(Save(c["acc"], Add(Load(c["acc"]), received)), self.topk_blocks)
