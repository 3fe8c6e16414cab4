"""The selection of Native Sparse Attention (Yuan et al., 2025), without training."""

from kvgraft.decode import (
    Add,
    Caches,
    Exp,
    Flow,
    GeMM,
    Log,
    Max,
    MeanInterleave,
    Multiply,
    Selection,
    Sum,
    Value,
    topK,
)


class NSABlockTopK(Flow):
    """Blocks by the attention that their compressed keys receive from all queries of the group.

    A compressed key is the mean of half a block; the paper uses a trained network.
    """

    name = "nsa_block_topk"

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"compressed": (2, head_dim)}

    def forward_cache(self, c: Caches) -> None:
        c["compressed"] = MeanInterleave(c["k"], dim=2, size=c["k"].size(2) // 2)

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        logits = Multiply(GeMM(c["compressed"], q.T), q.size(2) ** -0.5)  # [1, B, 2, g]
        weights = Exp(Add(logits, Multiply(Max(Max(logits, dim=1), dim=2), -1.0)))
        received = Multiply(weights, Exp(Multiply(Log(Sum(Sum(weights, dim=1), dim=2)), -1.0)))
        return topK(Sum(Sum(received, dim=2), dim=3), self.topk_blocks)
