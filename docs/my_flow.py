"""A flow to begin with: copy this file, change it, and run `kvgraft flow explain my_flow.py`."""

from dataclasses import dataclass

from kvgraft.decode import (
    Add,
    Caches,
    Flow,
    GeMM,
    Max,
    Mean,
    MeanInterleave,
    Multiply,
    Reshape,
    Selection,
    Value,
    topK,
)


@dataclass(frozen=True)  # only a class with options of its own needs this line
class MyFlow(Flow):
    """Blocks by their mean key, and by the best of their quarters."""

    name = "my_flow"

    fine: float = 0.5  # an option: `my_flow.py:topk_blocks=32,fine=0.25`

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"mean": (head_dim,), "quarters": (4, head_dim)}

    def forward_cache(self, c: Caches) -> None:
        c["mean"] = Mean(c["k"], dim=2)  # [1, B, 1, d]
        c["quarters"] = MeanInterleave(c["k"], dim=2, size=c["k"].size(2) // 4)  # [1, B, 4, d]

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        coarse = Max(GeMM(c["mean"], q.T), dim=2)  # [1, B, g] -> [1, B, 1]
        best = Max(Max(GeMM(c["quarters"], q.T), dim=2), dim=3)  # [1, B, 4, g] -> [1, B, 1, 1]
        return topK(Add(coarse, Multiply(Reshape(best, coarse.shape), self.fine)), self.topk_blocks)
