"""Shared parts of the proposed flows: statistics of a block, views of the query, and a class of
flows that only score.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from kvgraft.decode import (
    Abs,
    Add,
    Caches,
    CFill,
    Exp,
    Flow,
    GeMM,
    L2Norm,
    Load,
    Log,
    Max,
    MaxInterleave,
    Mean,
    MeanInterleave,
    Min,
    Minimum,
    MinInterleave,
    Multiply,
    Relu,
    Reshape,
    Save,
    Selection,
    Value,
    topK,
)

# number of regions of a block
PARTS = 4


class Statistic(NamedTuple):
    """Statistic of a block.

    Attributes:
        shape: returns its shape from the head size.
        of: computes it from k and v [1, B, b, d].
    """

    shape: Callable[[int], tuple[int, ...]]
    of: Callable[[Value, Value], Value]


def _vector(head_dim: int) -> tuple[int, ...]:
    return (head_dim,)


def _number(head_dim: int) -> tuple[int, ...]:
    return (1,)


def _regions(count: int) -> Callable[[int], tuple[int, ...]]:
    return lambda head_dim: (count, head_dim)


def _weighted(k: Value, v: Value) -> Value:
    norms = L2Norm(v, dim=3)
    return divide(Mean(Multiply(k, norms), dim=2), Mean(norms, dim=2))


STATISTICS = {
    "k_mean": Statistic(_vector, lambda k, v: Mean(k, dim=2)),
    "v_mean": Statistic(_vector, lambda k, v: Mean(v, dim=2)),
    "low": Statistic(_vector, lambda k, v: Min(k, dim=2)),
    "high": Statistic(_vector, lambda k, v: Max(k, dim=2)),
    "k_norm": Statistic(_number, lambda k, v: Mean(L2Norm(k, dim=3), dim=2)),
    "v_norm": Statistic(_number, lambda k, v: Mean(L2Norm(v, dim=3), dim=2)),
    "k_abs": Statistic(_vector, lambda k, v: Mean(Abs(k), dim=2)),
    "k_feature_norms": Statistic(_vector, lambda k, v: L2Norm(k, dim=2)),
    "v_feature_norms": Statistic(_vector, lambda k, v: L2Norm(v, dim=2)),
    "k_weighted": Statistic(_vector, _weighted),  # weighted by the norms of the values
    "halves": Statistic(_regions(2), lambda k, v: MeanInterleave(k, dim=2, size=k.size(2) // 2)),
    "parts": Statistic(
        _regions(PARTS), lambda k, v: MeanInterleave(k, dim=2, size=k.size(2) // PARTS)
    ),
    "low_parts": Statistic(
        _regions(PARTS), lambda k, v: MinInterleave(k, dim=2, size=k.size(2) // PARTS)
    ),
    "high_parts": Statistic(
        _regions(PARTS), lambda k, v: MaxInterleave(k, dim=2, size=k.size(2) // PARTS)
    ),
}


class Scored(Flow):
    """Choice of blocks by a score of their statistics.

    Attributes:
        uses: names of STATISTICS.
        state: numbers of each block that steps change, 0 at first.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[tuple[str, ...]] = ()

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {name: STATISTICS[name].shape(head_dim) for name in self.uses} | dict.fromkeys(
            self.state, (1,)
        )

    def forward_cache(self, c: Caches) -> None:
        for name in self.uses:
            c[name] = STATISTICS[name].of(c["k"], c["v"])
        for name in self.state:
            c[name] = CFill(c[name])

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        return topK(self.score(q, c), self.topk_blocks)

    @abstractmethod
    def score(self, q: Value, c: Caches) -> Value:
        """Return the score of each block, [1, B, 1], for queries [1, g, d]."""


def scaled(q: Value) -> Value:
    """Return queries whose inner products with keys are attention logits."""
    return Multiply(q, q.size(2) ** -0.5)


def routing(q: Value) -> Value:
    """Return the mean of the group's queries, [1, 1, d]."""
    return Mean(scaled(q), dim=1)


def relevance(q: Value, x: Value) -> Value:
    """Return inner products with the routing query: [1, B, 1] for vectors [1, B, d], [1, B, r, 1]
    for regions [1, B, r, d].
    """
    return GeMM(x, routing(q).T)


def heads(q: Value, x: Value) -> Value:
    """Return inner products with each query head: [1, B, g] or [1, B, r, g]."""
    return GeMM(x, scaled(q).T)


def bound(q: Value, low: Value, high: Value) -> Value:
    """Return the greatest logit that a key within an envelope can have for each query (Quest): [1,
    B, g] or [1, B, r, g].
    """
    return Add(GeMM(high, Relu(q).T), GeMM(low, Minimum(q, 0.0).T))


def over_regions(reduction: Callable[..., Value], x: Value) -> Value:
    """Reduce over the regions, [1, B, r, n] -> [1, B, n]."""
    found = reduction(x, dim=2)
    return Reshape(found, (*found.shape[:2], found.shape[3]))


def minus(x: Value, y: Value, share: float = 1.0) -> Value:
    """Return x - share * y."""
    return Add(x, Multiply(y, -share))


def divide(x: Value, y: Value) -> Value:
    """Return x / y for y > 0."""
    return Multiply(x, Exp(Multiply(Log(y), -1.0)))


def average(cache: Value, x: Value, rate: float) -> Value:
    """Update the running average of x over steps in a cache, and return it."""
    return Save(cache, Add(Multiply(Load(cache), 1.0 - rate), Multiply(x, rate)))
