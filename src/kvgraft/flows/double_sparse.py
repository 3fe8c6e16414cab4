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
    """Blocks by their best token's inner product with a query, over the heaviest channels.

    The paper finds these channels offline. Here they are the channels in which the group's mean
    query exceeds `heavy` times the mean over channels. All keys are read: the channels depend on
    the query, so no narrower copy of the keys exists.
    """

    name = "double_sparse"

    heavy: float = 1.0

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        weight = Abs(Mean(q, dim=1))  # [1, 1, d]
        chosen = WhereGt(weight, Multiply(Mean(weight, dim=2), self.heavy), q, 0.0)
        return topK(Max(Max(GeMM(c["k"], chosen.T), dim=2), dim=3), self.topk_blocks)
