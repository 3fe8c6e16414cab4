"""Double Sparsity (Yang et al., 2024), by blocks."""

from dataclasses import dataclass

from kvgraft.decode import (
    Abs,
    Caches,
    Flow,
    GeMM,
    Max,
    Mean,
    Multiply,
    Selection,
    Value,
    WhereGt,
    topK,
)


@dataclass(frozen=True)
class DoubleSparse(Flow):
    """Blocks by their best token's inner product with a query, over the channels that weigh most.

    The paper finds these channels offline; here they are those where the group's mean query exceeds
    `heavy` times the mean over channels. All keys are read: a choice of the query's leaves no
    narrower copy to read instead."""

    name = "double_sparse"

    heavy: float = 1.0

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        weight = Abs(Mean(q, dim=1))  # [1, 1, d]
        chosen = WhereGt(weight, Multiply(Mean(weight, dim=2), self.heavy), q, 0.0)
        return topK(Max(Max(GeMM(c["k"], chosen.T), dim=2), dim=3), self.topk_blocks)
