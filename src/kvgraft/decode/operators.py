"""Operators of Vortex's Table 1: the shape of each result, and the PyTorch operator that makes it.

All operators work on tensors [S, ...] of S independent sequences. Sequences differ in length, so an
axis over blocks may be padded. Operators that do not look across blocks give correct results for
the real blocks. The others need neutral padding (`Operator.neutral`) or the lengths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.decode import shapes
from kvgraft.decode.vtensor import NumBlocks, Shape
from kvgraft.kernels.dispatch import radix_topk


class Stage(Enum):
    """Stage of a flow in which an operator is allowed."""

    CACHE = "forward_cache"
    INDEXER = "forward_indexer"


BOTH = (Stage.CACHE, Stage.INDEXER)
CACHE, INDEXER = (Stage.CACHE,), (Stage.INDEXER,)


@dataclass(frozen=True)
class Operator:
    """One operator of Table 1.

    Attributes:
        infer: returns the shape of the result from the shapes of the inputs, () for a number, and
            the options; raises ValueError.
        run: returns the result [S, ...] from the inputs, tensors [S, ...] or numbers, and the
            options.
        crosses: returns from shapes and options whether the operator looks across blocks.
        neutral: value of the padding that leaves the result unchanged.
        takes_lengths: `run` gets the option `lengths`, int64 [S], if the axis over blocks is
            padded.
        of_cache: the first input must be one of the flow's own caches.
        selects: the result is a selection of blocks, int64 [S, n]; -1 is none.
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


def aligned(*tensors: Tensor | float) -> list[Any]:
    """Return tensors with one common rank; see `align`."""
    rank = max(x.dim() for x in tensors if isinstance(x, Tensor))

    def raised(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:1], *[1] * (rank - x.dim()), *x.shape[1:]) if x.dim() else x

    return [raised(x) if isinstance(x, Tensor) else x for x in tensors]


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
    weight = torch.tensor(kernel, dtype=x.dtype, device=x.device)
    beside = len(kernel) // 2
    # CUDA's convolutions may round to TF32
    found = F.pad(last, (beside, beside)).unfold(-1, len(kernel), 1) @ weight
    return found.movedim(-1, dim)


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
        parts = [
            x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32) for x in tensors
        ]
        return function(*aligned(*parts))

    return run


def _top(
    scores: Tensor, *, k: int, tolerance: float | None = None, lengths: Tensor | None = None
) -> Tensor:
    """Return the k best blocks, int64 [S, k]. On the CPU the result is always exact, because
    PyTorch's own top-k is the fastest there (docs/results/flows.md).
    """
    flat = scores.flatten(1)
    if lengths is None:
        lengths = torch.full((len(flat),), flat.shape[1], device=flat.device)
    torchs = "reference" if flat.device.type == "cpu" else None
    return radix_topk(flat, lengths, k, tolerance or 0.0, implementation=torchs)


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
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Silu": F.silu, "Exp": torch.exp,
    "Log": torch.log, "Abs": torch.abs,
    "Add_Mul": lambda x, scale, shift: x * scale + shift,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "Eq": torch.eq, "Ne": torch.ne, "Gt": torch.gt, "Ge": torch.ge, "Lt": torch.lt, "Le": torch.le,
}  # fmt: skip
OPERATORS = {
    operator.name: operator
    for operator in (
        *(
            Operator(
                name,
                INDEXER if name == "Sum" else BOTH,
                shapes.reduced,
                run,
                shapes.along,
                neutral,
                name == "Mean",
            )
            for name, (run, neutral) in _REDUCTIONS.items()
        ),
        *(
            Operator(f"{name}Interleave", CACHE, shapes.grouped, _interleave(run))
            for name, (run, _) in _REDUCTIONS.items()
            if name != "Sum"
        ),
        *(
            Operator(name, BOTH, shapes.broadcast, _elementwise(function))
            for name, function in _ELEMENTWISE.items()
        ),
        *(
            Operator(f"Where{name}", BOTH, shapes.broadcast, _elementwise(_where(compare)))
            for name, compare in _COMPARISONS.items()
        ),
        Operator(
            "GeMM",
            BOTH,
            shapes.product,
            lambda x, y: torch.matmul(*aligned(x, y)),
            shapes.contracts_blocks,
        ),
        Operator("Kron", INDEXER, shapes.kron, _kron),
        Operator(
            "Softmax",
            INDEXER,
            shapes.same,
            lambda x, *, dim: x.softmax(dim),
            shapes.along,
            -math.inf,
        ),
        Operator(
            "Normalize",
            INDEXER,
            shapes.same,
            lambda x, *, dim: F.normalize(x, dim=dim),
            shapes.along,
        ),
        Operator("Conv1d", INDEXER, shapes.convolved, _conv1d, shapes.along),
        Operator(
            "Reshape",
            BOTH,
            shapes.reshaped,
            lambda x, *, shape_to: x.reshape(*x.shape[:1], *_sizes(x, shape_to)),
        ),
        Operator("Transpose", INDEXER, shapes.transposed, lambda x: x.transpose(-2, -1)),
        Operator("MaskSlice", BOTH, shapes.same, _mask_slice, shapes.along, takes_lengths=True),
        Operator("Fill", CACHE, shapes.same, lambda x, *, value: torch.full_like(x, value)),
        Operator("CFill", CACHE, shapes.same, torch.zeros_like),
        Operator("Load", INDEXER, shapes.same, lambda x: x, of_cache=True),
        Operator(
            "Save", INDEXER, shapes.saved, lambda cache, x: x.reshape(cache.shape), of_cache=True
        ),
        *(
            Operator(
                name,
                INDEXER,
                shapes.selection,
                _top,
                lambda *_, **__: True,
                takes_lengths=True,
                selects=True,
            )
            for name in ("topK", "approxTopK")
        ),
        Operator("Union", INDEXER, shapes.union, _union, selects=True),
    )
}


def _sizes(x: Tensor, shape_to: Shape) -> list[int]:
    """Return the sizes of all axes after the first. The axis over blocks keeps its size in this
    tensor.
    """
    return [
        x.shape[axis] if isinstance(size, NumBlocks) else size
        for axis, size in enumerate(shape_to)
        if axis
    ]
