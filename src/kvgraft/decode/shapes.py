"""Shapes of results for one request. Functions raise ValueError where no shape fits."""

import math
from collections.abc import Sequence
from typing import Any, cast

from kvgraft.decode.vtensor import Dim, NumBlocks, Shape
from kvgraft.methods import require_at_least, require_share


def block_axis(shape: Shape) -> int | None:
    """Return the axis over blocks, or None."""
    return next((axis for axis, size in enumerate(shape) if isinstance(size, NumBlocks)), None)


def align(shape: Shape, rank: int) -> Shape:
    """Return the shape with axes of size 1 after the first, up to this rank."""
    return shape and (*shape[:1], *(1,) * (rank - len(shape)), *shape[1:])


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of an elementwise result. Shapes of lower rank get axes of size 1 after the
    first.
    """
    rank = max(map(len, shapes))
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(align(shape, rank)):
            if size != 1 and result[axis] not in (1, size):
                raise ValueError(
                    f"shapes {' and '.join(map(describe, filter(None, shapes)))} do not fit"
                )
            result[axis] = size if size != 1 else result[axis]
    return _checked(tuple(result))


def same_entries(x: Shape, y: Shape) -> bool:
    """Return whether two shapes differ by axes of size 1 only."""
    return [size for size in x if size != 1] == [size for size in y if size != 1]


def describe(shape: Shape) -> str:
    """Return a shape as text, such as [1, B, 64]."""
    return f"[{', '.join(map(str, shape))}]"


def _checked(shape: Shape) -> Shape:
    """Return the shape. Raise ValueError if it has two axes over blocks."""
    if sum(isinstance(size, NumBlocks) for size in shape) > 1:
        raise ValueError(f"the result {describe(shape)} would have two axes over blocks")
    return shape


def _axis(shape: Shape, dim: int) -> int:
    """Return `dim` counted from the beginning. Raise ValueError if it is out of range."""
    if not isinstance(dim, int) or not -len(shape) < dim < len(shape) or dim % len(shape) == 0:
        raise ValueError(
            f"dim must be from 1 to {len(shape) - 1} for {describe(shape)}, got {dim!r}"
        )
    return dim % len(shape)


def along(shape: Shape, *, dim: int, **_: Any) -> bool:
    """Return whether the operator works along the axis over blocks."""
    return block_axis(shape) == _axis(shape, dim)


def reduced(shape: Shape, *, dim: int) -> Shape:
    axis = _axis(shape, dim)
    return (*shape[:axis], 1, *shape[axis + 1 :])


def same(shape: Shape, *, dim: int | None = None, **_: Any) -> Shape:
    if dim is not None:
        _axis(shape, dim)
    return shape


def grouped(shape: Shape, *, dim: int, size: int) -> Shape:
    axis = _axis(shape, dim)
    count = shape[axis]
    if isinstance(count, NumBlocks) or not isinstance(size, int) or size < 1 or count % size:
        raise ValueError(
            f"the axis {dim} of {describe(shape)} cannot be cut into groups of {size!r}"
        )
    return (*shape[:axis], count // size, *shape[axis + 1 :])


def product(x: Shape, y: Shape) -> Shape:
    rank = max(len(x), len(y))
    x, y = align(x, rank), align(y, rank)
    if rank < 3 or x[-1] != y[-2]:
        raise ValueError(
            f"{describe(x)} and {describe(y)}: the last axis of one must be the last but one of "
            "the other"
        )
    return _checked((*broadcast(x[:-2], y[:-2]), x[-2], y[-1]))


def contracts_blocks(x: Shape, y: Shape) -> bool:
    return bool(x) and isinstance(x[-1], NumBlocks)


def kron(x: Shape, y: Shape) -> Shape:
    rank = max(len(x), len(y))
    x, y = align(x, rank), align(y, rank)
    inner = [(a, b) for a, b in zip(x[-2:], y[-2:], strict=True)]
    if rank < 4 or any(isinstance(size, NumBlocks) for pair in inner for size in pair):
        raise ValueError(
            f"{describe(x)} and {describe(y)}: the last two axes must be behind the axis over "
            "blocks"
        )
    return (*broadcast(x[:-2], y[:-2]), *(a * b for a, b in inner))  # type: ignore[operator]


def reshaped(shape: Shape, *, shape_to: Shape) -> Shape:
    def sizes(of: Shape) -> tuple[int, int]:
        """Return the products of the sizes before and after B; without B, the second is that of
        all.
        """
        axis = block_axis(of) or 0
        return math.prod(cast(Sequence[int], of[:axis])), math.prod(
            cast(Sequence[int], of[axis + 1 :])
        )

    if (
        shape_to[:1] != shape[:1]
        or block_axis(shape_to) != block_axis(shape)
        or sizes(shape) != sizes(shape_to)
    ):
        raise ValueError(
            f"{describe(shape)} cannot become {describe(shape_to)}: as many entries, and B where "
            "it was"
        )
    return shape_to


def transposed(shape: Shape) -> Shape:
    if len(shape) < 3:
        raise ValueError(f"{describe(shape)} has no two axes to swap")
    return (*shape[:-2], shape[-1], shape[-2])


def convolved(shape: Shape, *, dim: int, kernel: tuple[float, ...]) -> Shape:
    if len(kernel) % 2 == 0:
        raise ValueError(f"the kernel must have an odd number of entries, got {len(kernel)}")
    return same(shape, dim=dim)


def saved(cache: Shape, x: Shape) -> Shape:
    if not same_entries(cache, x):
        raise ValueError(f"{describe(x)} cannot be left in a cache of {describe(cache)}")
    return cache


def selection(shape: Shape, *, k: int, tolerance: float | None = None) -> Shape:
    require_at_least("k", k, 1)
    if tolerance is not None:
        require_share("tolerance", tolerance)
    if (
        not any(isinstance(size, NumBlocks) for size in shape)
        or math.prod(x for x in shape if isinstance(x, int)) != 1
    ):
        raise ValueError(
            f"{describe(shape)} has not one score for each block: reduce it to [1, B, 1]"
        )
    return (1, k)


def union(x: Shape, y: Shape) -> Shape:
    if len(x) != 2 or len(y) != 2:
        raise ValueError(f"{describe(x)} and {describe(y)} are not both selections")
    return (1, x[1] + y[1])  # type: ignore[operator]
