"""The operators of Vortex's Table 1: what shape each gives, and the PyTorch operator that it is.

All work on tensors [S, ...] of S independent sequences. One whose axis over blocks is padded, since sequences differ in
length, is right for operators that do not look across blocks; for the others the padding must hold what they pass by
(`Operator.neutral`), or they are told the lengths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.decode.vtensor import Blocks, Dim, Shape
from kvgraft.kernels.dispatch import radix_topk
from kvgraft.methods import require_at_least, require_share


class Stage(Enum):
    """Where in a flow an operator may stand."""

    CACHE = "forward_cache"
    INDEXER = "forward_indexer"


BOTH = (Stage.CACHE, Stage.INDEXER)
CACHE, INDEXER = (Stage.CACHE,), (Stage.INDEXER,)


@dataclass(frozen=True)
class Operator:
    """One of Table 1's.

    Attributes:
        infer: shapes of its tensors, () for a number, and its options -> the shape that it gives; raises ValueError.
        run: its tensors [S, ...] or numbers, and its options -> [S, ...].
        crosses: shapes and options -> whether it looks across blocks.
        neutral: what padding must hold that it looks across.
        takes_lengths: `run` is given the option `lengths`, int64 [S], if the axis over blocks is padded.
        of_cache: its first tensor must be a cache of the flow's own.
        selects: the result, int64 [S, n], says which blocks to attend to; -1 is none.
    """

    name: str
    stages: tuple[Stage, ...]
    infer: Callable[..., Shape]
    run: Callable[..., Tensor]
    crosses: Callable[..., bool] = lambda *shapes, **options: False
    neutral: float = 0.0
    takes_lengths: bool = False
    of_cache: bool = False
    selects: bool = False


def block_axis(shape: Shape) -> int | None:
    """The axis over blocks."""
    return next((axis for axis, size in enumerate(shape) if isinstance(size, Blocks)), None)


def align(shape: Shape, rank: int) -> Shape:
    """With axes of size 1 after the first, up to this rank."""
    return shape and (*shape[:1], *(1,) * (rank - len(shape)), *shape[1:])


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an elementwise result; tensors of lower rank get axes of size 1 after the first."""
    rank = max(map(len, shapes))
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(align(shape, rank)):
            if size != 1 and result[axis] not in (1, size):
                raise ValueError(f"shapes {' and '.join(map(describe, filter(None, shapes)))} do not fit")
            result[axis] = size if size != 1 else result[axis]
    return _checked(tuple(result))


def same_entries(x: Shape, y: Shape) -> bool:
    """Whether two shapes differ by axes of size 1 only."""
    return [size for size in x if size != 1] == [size for size in y if size != 1]


def describe(shape: Shape) -> str:
    """[1, B, 64]."""
    return f"[{', '.join(map(str, shape))}]"


def aligned(*tensors: Tensor | float) -> list[Any]:
    """Tensors of one rank; see `align`."""
    rank = max(x.dim() for x in tensors if isinstance(x, Tensor))

    def raised(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:1], *[1] * (rank - x.dim()), *x.shape[1:]) if x.dim() else x

    return [raised(x) if isinstance(x, Tensor) else x for x in tensors]


def _checked(shape: Shape) -> Shape:
    if sum(isinstance(size, Blocks) for size in shape) > 1:
        raise ValueError(f"the result {describe(shape)} would have two axes over blocks")
    return shape


def _axis(shape: Shape, dim: int) -> int:
    if not isinstance(dim, int) or not -len(shape) < dim < len(shape) or dim % len(shape) == 0:
        raise ValueError(f"dim must be from 1 to {len(shape) - 1} for {describe(shape)}, got {dim!r}")
    return dim % len(shape)


def _along(shape: Shape, *, dim: int, **_: Any) -> bool:
    return block_axis(shape) == _axis(shape, dim)


def _reduced(shape: Shape, *, dim: int) -> Shape:
    axis = _axis(shape, dim)
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _same(shape: Shape, *, dim: int | None = None, **_: Any) -> Shape:
    if dim is not None:
        _axis(shape, dim)
    return shape


def _groups(shape: Shape, *, dim: int, size: int) -> Shape:
    axis = _axis(shape, dim)
    count = shape[axis]
    if isinstance(count, Blocks) or not isinstance(size, int) or size < 1 or count % size:
        raise ValueError(f"the axis {dim} of {describe(shape)} cannot be cut into groups of {size!r}")
    return (*shape[:axis], count // size, *shape[axis + 1 :])


def _product(x: Shape, y: Shape) -> Shape:
    rank = max(len(x), len(y))
    x, y = align(x, rank), align(y, rank)
    if rank < 3 or x[-1] != y[-2]:
        raise ValueError(f"{describe(x)} and {describe(y)}: the last axis of one must be the last but one of the other")
    return _checked((*broadcast(x[:-2], y[:-2]), x[-2], y[-1]))


def _contracts_blocks(x: Shape, y: Shape) -> bool:
    return bool(x) and isinstance(x[-1], Blocks)


def _kron_shape(x: Shape, y: Shape) -> Shape:
    rank = max(len(x), len(y))
    x, y = align(x, rank), align(y, rank)
    inner = [(a, b) for a, b in zip(x[-2:], y[-2:], strict=True)]
    if rank < 4 or any(isinstance(size, Blocks) for pair in inner for size in pair):
        raise ValueError(f"{describe(x)} and {describe(y)}: the last two axes must be behind the axis over blocks")
    return (*broadcast(x[:-2], y[:-2]), *(a * b for a, b in inner))  # type: ignore[operator]


def _reshaped(shape: Shape, *, shape_to: Shape) -> Shape:
    def sizes(of: Shape) -> tuple[int, int]:
        """Of what lies before B and behind it; of everything without."""
        axis = block_axis(of) or 0
        return math.prod(cast(Sequence[int], of[:axis])), math.prod(cast(Sequence[int], of[axis + 1 :]))

    if shape_to[:1] != shape[:1] or block_axis(shape_to) != block_axis(shape) or sizes(shape) != sizes(shape_to):
        raise ValueError(f"{describe(shape)} cannot become {describe(shape_to)}: as many entries, and B where it was")
    return shape_to


def _transposed(shape: Shape) -> Shape:
    if len(shape) < 3:
        raise ValueError(f"{describe(shape)} has no two axes to swap")
    return (*shape[:-2], shape[-1], shape[-2])


def _kernel(shape: Shape, *, dim: int, kernel: tuple[float, ...]) -> Shape:
    if len(kernel) % 2 == 0:
        raise ValueError(f"the kernel must have an odd number of entries, got {len(kernel)}")
    return _same(shape, dim=dim)


def _saved(cache: Shape, x: Shape) -> Shape:
    if not same_entries(cache, x):
        raise ValueError(f"{describe(x)} cannot be left in a cache of {describe(cache)}")
    return cache


def _selection(shape: Shape, *, k: int, tolerance: float | None = None) -> Shape:
    require_at_least("k", k, 1)
    if tolerance is not None:
        require_share("tolerance", tolerance)
    if not any(isinstance(size, Blocks) for size in shape) or math.prod(x for x in shape if isinstance(x, int)) != 1:
        raise ValueError(f"{describe(shape)} has not one score for each block: reduce it to [1, B, 1]")
    return (1, k)


def _mean(x: Tensor, *, dim: int, lengths: Tensor | None = None) -> Tensor:
    if lengths is None:
        return x.mean(dim, keepdim=True)
    return x.sum(dim, keepdim=True) / lengths.clamp(min=1).view(-1, *(1,) * (x.dim() - 1))


def _interleave(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def grouped(x: Tensor, *, dim: int, size: int) -> Tensor:
        axis = dim % x.dim()
        return run(x.unflatten(axis, (-1, size)), dim=axis + 1).squeeze(axis + 1)

    return grouped


def _kron(x: Tensor, y: Tensor) -> Tensor:
    x, y = aligned(x, y)
    return (x[..., :, None, :, None] * y[..., None, :, None, :]).flatten(-2, -1).flatten(-3, -2)


def _conv1d(x: Tensor, *, dim: int, kernel: Sequence[float]) -> Tensor:
    last = x.movedim(dim, -1)
    weight = torch.tensor(kernel, dtype=x.dtype, device=x.device)[None, None]
    found = F.conv1d(last.reshape(-1, 1, last.shape[-1]), weight, padding=len(kernel) // 2)
    return found.view(last.shape).movedim(-1, dim)


def _mask_slice(
    x: Tensor, *, start: int, stop: int | None, dim: int, fill: float, lengths: Tensor | None = None
) -> Tensor:
    if lengths is None:
        lengths = torch.tensor([x.shape[dim]], device=x.device)
    ends = [lengths if end is None else end + lengths * (end < 0) for end in (start, stop)]
    here = torch.arange(x.shape[dim], device=x.device)
    inside = (here >= ends[0][:, None]) & (here < ends[1][:, None])  # [S or 1, size]
    shape = [1] * x.dim()
    shape[0], shape[dim] = inside.shape
    return torch.where(inside.view(shape), x, fill)


def _where(compare: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    def choose(x: Any, y: Any, then: Any, otherwise: Any) -> Tensor:
        return torch.where(compare(x, y), then, otherwise)

    return choose


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor | float) -> Tensor:
        parts = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32) for x in tensors]
        return function(*aligned(*parts))

    return run


def _top(scores: Tensor, *, k: int, tolerance: float | None = None, lengths: Tensor | None = None) -> Tensor:
    """int64 [S, k]; on CPU always exact, since nothing beats PyTorch's own (docs/results/flows.md)."""
    flat = scores.flatten(1)
    if lengths is None:
        lengths = torch.full((len(flat),), flat.shape[1], device=flat.device)
    torchs = "reference" if flat.device.type == "cpu" else None
    return radix_topk(flat, lengths, k, tolerance or 0.0, implementation=torchs)


def _union_shape(x: Shape, y: Shape) -> Shape:
    if len(x) != 2 or len(y) != 2:
        raise ValueError(f"{describe(x)} and {describe(y)} are not both selections")
    return (1, x[1] + y[1])  # type: ignore[operator]


def _union(x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat((x, y), dim=1).sort(dim=1).values
    return torch.cat((both[:, :1], both[:, 1:].masked_fill(both[:, 1:] == both[:, :-1], -1)), dim=1)


_REDUCTIONS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "Mean": (_mean, 0.0),
    "Max": (lambda x, *, dim: x.amax(dim, keepdim=True), -math.inf),
    "Min": (lambda x, *, dim: x.amin(dim, keepdim=True), math.inf),
    "L2Norm": (lambda x, *, dim: x.norm(dim=dim, keepdim=True), 0.0),
    "Sum": (lambda x, *, dim: x.sum(dim, keepdim=True), 0.0),
}
_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "Multiply": torch.mul, "Add": torch.add, "Maximum": torch.maximum, "Minimum": torch.minimum,
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Silu": F.silu, "Exp": torch.exp, "Log": torch.log, "Abs": torch.abs,
    "Add_Mul": lambda x, scale, shift: x * scale + shift,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "Eq": torch.eq, "Ne": torch.ne, "Gt": torch.gt, "Ge": torch.ge, "Lt": torch.lt, "Le": torch.le,
}  # fmt: skip
OPERATORS = {
    operator.name: operator
    for operator in (
        *(
            Operator(name, INDEXER if name == "Sum" else BOTH, _reduced, run, _along, neutral, name == "Mean")
            for name, (run, neutral) in _REDUCTIONS.items()
        ),
        *(
            Operator(f"{name}Interleave", CACHE, _groups, _interleave(run))
            for name, (run, _) in _REDUCTIONS.items()
            if name != "Sum"
        ),
        *(Operator(name, BOTH, broadcast, _elementwise(function)) for name, function in _ELEMENTWISE.items()),
        *(
            Operator(f"Where{name}", BOTH, broadcast, _elementwise(_where(compare)))
            for name, compare in _COMPARISONS.items()
        ),
        Operator("GeMM", BOTH, _product, lambda x, y: torch.matmul(*aligned(x, y)), _contracts_blocks),
        Operator("Kron", INDEXER, _kron_shape, _kron),
        Operator("Softmax", INDEXER, _same, lambda x, *, dim: x.softmax(dim), _along, -math.inf),
        Operator("Normalize", INDEXER, _same, lambda x, *, dim: F.normalize(x, dim=dim), _along),
        Operator("Conv1d", INDEXER, _kernel, _conv1d, _along),
        Operator("Reshape", BOTH, _reshaped, lambda x, *, shape_to: x.reshape(*x.shape[:1], *_sizes(x, shape_to))),
        Operator("Transpose", INDEXER, _transposed, lambda x: x.transpose(-2, -1)),
        Operator("MaskSlice", BOTH, _same, _mask_slice, _along, takes_lengths=True),
        Operator("Fill", CACHE, _same, lambda x, *, value: torch.full_like(x, value)),
        Operator("CFill", CACHE, _same, torch.zeros_like),
        Operator("Load", INDEXER, _same, lambda x: x, of_cache=True),
        Operator("Save", INDEXER, _saved, lambda cache, x: x.reshape(cache.shape), of_cache=True),
        *(
            Operator(name, INDEXER, _selection, _top, lambda *_, **__: True, takes_lengths=True, selects=True)
            for name in ("topK", "approxTopK")
        ),
        Operator("Union", INDEXER, _union_shape, _union, selects=True),
    )
}


def _sizes(x: Tensor, shape_to: Shape) -> list[int]:
    """Sizes of the axes behind the first, the one over blocks as it is in this tensor."""
    return [x.shape[axis] if isinstance(size, Blocks) else size for axis, size in enumerate(shape_to) if axis]
