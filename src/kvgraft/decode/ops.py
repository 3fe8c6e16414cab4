"""Operators that a flow may apply (Vortex, Table 1).

Tensors are those of one request: [1, B, ...] has an axis over its blocks, [1, ...] has none.
Reductions leave an axis of size 1. Where ranks differ, the lower one gets axes of size 1 after the
first. Numbers may replace tensors.

Applied to values of a flow, a function records the operator. Applied to a `VTensor`, it runs the
PyTorch operator on each sequence separately. All other implementations are tested against that
result.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from kvgraft.decode.graph import Value, record
from kvgraft.decode.operators import OPERATORS, Operator
from kvgraft.decode.shapes import block_axis
from kvgraft.decode.vtensor import Shape, VTensor

# the result has the kind of the inputs
Operand = TypeVar("Operand", Value, VTensor)


def apply(name: str, *inputs: Operand | float, **options: Any) -> Operand:
    """Apply one operator by its name."""
    return cast(Operand, _apply(OPERATORS[name], inputs, options))


def _apply(operator: Operator, inputs: tuple[Any, ...], options: dict[str, Any]) -> Value | VTensor:
    """Record an operator on values of a flow, or run it on each sequence of vTensors."""
    if any(isinstance(given, Value) for given in inputs):
        return record(operator, inputs, options)
    vtensors = [given for given in inputs if isinstance(given, VTensor)]
    shapes = [given.shape if isinstance(given, VTensor) else () for given in inputs]
    axis = 1 if operator.selects else block_axis(operator.infer(*shapes, **options))
    results = [
        operator.run(
            *(given.sequence(i) if isinstance(given, VTensor) else given for given in inputs),
            **options,
        )
        for i in range(vtensors[0].num_sequences)
    ]
    return VTensor.of(results, axis)


def Mean(x: Operand, dim: int) -> Operand:
    """Average along an axis."""
    return apply("Mean", x, dim=dim)


def Max(x: Operand, dim: int) -> Operand:
    """Greatest entry along an axis."""
    return apply("Max", x, dim=dim)


def Min(x: Operand, dim: int) -> Operand:
    """Smallest entry along an axis."""
    return apply("Min", x, dim=dim)


def L2Norm(x: Operand, dim: int) -> Operand:
    """Euclidean norm along an axis."""
    return apply("L2Norm", x, dim=dim)


def Sum(x: Operand, dim: int) -> Operand:
    """Sum along an axis. Not in forward_cache."""
    return apply("Sum", x, dim=dim)


def MeanInterleave(x: Operand, dim: int, size: int) -> Operand:
    """Average of each group of `size` consecutive entries along an axis."""
    return apply("MeanInterleave", x, dim=dim, size=size)


def MaxInterleave(x: Operand, dim: int, size: int) -> Operand:
    """Greatest entry of each group of `size` consecutive entries along an axis."""
    return apply("MaxInterleave", x, dim=dim, size=size)


def MinInterleave(x: Operand, dim: int, size: int) -> Operand:
    """Smallest entry of each group of `size` consecutive entries along an axis."""
    return apply("MinInterleave", x, dim=dim, size=size)


def L2NormInterleave(x: Operand, dim: int, size: int) -> Operand:
    """Euclidean norm of each group of `size` consecutive entries along an axis."""
    return apply("L2NormInterleave", x, dim=dim, size=size)


def GeMM(x: Operand, y: Operand) -> Operand:
    """Matrix product over the last two axes, [..., m, n] and [..., n, p]."""
    return apply("GeMM", x, y)


def Multiply(x: Operand, y: Operand | float) -> Operand:
    """x * y."""
    return apply("Multiply", x, y)


def Add(x: Operand, y: Operand | float) -> Operand:
    """x + y."""
    return apply("Add", x, y)


def Maximum(x: Operand, y: Operand | float) -> Operand:
    """Greater one of both."""
    return apply("Maximum", x, y)


def Minimum(x: Operand, y: Operand | float) -> Operand:
    """Smaller one of both."""
    return apply("Minimum", x, y)


def Add_Mul(x: Operand, scale: Operand | float, shift: Operand | float) -> Operand:
    """x * scale + shift."""
    return apply("Add_Mul", x, scale, shift)


def Kron(x: Operand, y: Operand) -> Operand:
    """Kronecker product over the last two axes, [..., m, n] and [..., p, q] -> [..., m * p, n *
    q]."""
    return apply("Kron", x, y)


def Relu(x: Operand) -> Operand:
    """max(x, 0)."""
    return apply("Relu", x)


def Sigmoid(x: Operand) -> Operand:
    """1 / (1 + exp(-x))."""
    return apply("Sigmoid", x)


def Silu(x: Operand) -> Operand:
    """x * Sigmoid(x)."""
    return apply("Silu", x)


def Exp(x: Operand) -> Operand:
    """e to the x."""
    return apply("Exp", x)


def Log(x: Operand) -> Operand:
    """Natural logarithm."""
    return apply("Log", x)


def Abs(x: Operand) -> Operand:
    """Absolute value."""
    return apply("Abs", x)


def WhereEq(
    x: Operand, y: Operand | float, then: Operand | float, otherwise: Operand | float
) -> Operand:
    """`then` where x = y, else `otherwise`."""
    return apply("WhereEq", x, y, then, otherwise)


def WhereNe(
    x: Operand, y: Operand | float, then: Operand | float, otherwise: Operand | float
) -> Operand:
    """`then` where x and y differ, else `otherwise`."""
    return apply("WhereNe", x, y, then, otherwise)


def WhereGt(
    x: Operand, y: Operand | float, then: Operand | float, otherwise: Operand | float
) -> Operand:
    """`then` where x > y, else `otherwise`."""
    return apply("WhereGt", x, y, then, otherwise)


def WhereGe(
    x: Operand, y: Operand | float, then: Operand | float, otherwise: Operand | float
) -> Operand:
    """`then` where x >= y, else `otherwise`."""
    return apply("WhereGe", x, y, then, otherwise)


def WhereLt(
    x: Operand, y: Operand | float, then: Operand | float, otherwise: Operand | float
) -> Operand:
    """`then` where x < y, else `otherwise`."""
    return apply("WhereLt", x, y, then, otherwise)


def WhereLe(
    x: Operand, y: Operand | float, then: Operand | float, otherwise: Operand | float
) -> Operand:
    """`then` where x <= y, else `otherwise`."""
    return apply("WhereLe", x, y, then, otherwise)


def Softmax(x: Operand, dim: int) -> Operand:
    """exp(x), divided by its sum along an axis."""
    return apply("Softmax", x, dim=dim)


def Normalize(x: Operand, dim: int) -> Operand:
    """x, divided by its Euclidean norm along an axis."""
    return apply("Normalize", x, dim=dim)


def Conv1d(x: Operand, kernel: Sequence[float], dim: int = 1) -> Operand:
    """Convolution along an axis with an odd number of weights. The ends are padded with zeros."""
    return apply("Conv1d", x, dim=dim, kernel=tuple(kernel))


def Reshape(x: Operand, shape: Shape) -> Operand:
    """x in another shape [1, ...] with the same number of entries. The axis over blocks,
    `x.shape[1]`, stays the second.
    """
    return apply("Reshape", x, shape_to=tuple(shape))


def Transpose(x: Operand) -> Operand:
    """The last two axes swapped."""
    return apply("Transpose", x)


def MaskSlice(x: Operand, start: int, stop: int | None, dim: int = 1, fill: float = 0.0) -> Operand:
    """x in [start, stop) along an axis, and `fill` outside. Negative ends count from the end; None
    is the end.
    """
    return apply("MaskSlice", x, start=start, stop=stop, dim=dim, fill=fill)


def Fill(cache: Operand, value: float) -> Operand:
    """Constant for every entry of a cache."""
    return apply("Fill", cache, value=value)


def CFill(cache: Operand) -> Operand:
    """Zeros for every entry of a cache: the initial state for Save."""
    return apply("CFill", cache)


def Load(cache: Operand) -> Operand:
    """Entries of a cache, from Save in the previous step, else from forward_cache."""
    return apply("Load", cache)


def Save(cache: Operand, x: Operand) -> Operand:
    """Leave x [1, B, ...] in a cache for the next step, and return x."""
    return apply("Save", cache, x)


def topK(scores: Operand, k: int) -> Operand:
    """The k blocks with the best scores [1, B, 1]. A block with a score of minus infinity is never
    chosen.
    """
    return apply("topK", scores, k=k)


def approxTopK(scores: Operand, k: int, tolerance: float = 0.1) -> Operand:
    """topK, except that a share `tolerance` of the k blocks may be any blocks with scores near the
    k-th best (section 5.2).
    """
    return apply("approxTopK", scores, k=k, tolerance=tolerance)


def Union(x: Operand, y: Operand) -> Operand:
    """Blocks of two selections, each once."""
    return apply("Union", x, y)


TopK = topK
__all__ = [
    "Abs",
    "Add",
    "Add_Mul",
    "CFill",
    "Conv1d",
    "Exp",
    "Fill",
    "GeMM",
    "Kron",
    "L2Norm",
    "L2NormInterleave",
    "Load",
    "Log",
    "MaskSlice",
    "Max",
    "MaxInterleave",
    "Maximum",
    "Mean",
    "MeanInterleave",
    "Min",
    "MinInterleave",
    "Minimum",
    "Multiply",
    "Normalize",
    "Relu",
    "Reshape",
    "Save",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Sum",
    "TopK",
    "Transpose",
    "Union",
    "WhereEq",
    "WhereGe",
    "WhereGt",
    "WhereLe",
    "WhereLt",
    "WhereNe",
    "approxTopK",
    "topK",
]
