"""Triton code of each operator, on the tensors of `writer.py`."""

import math
from collections.abc import Callable
from typing import cast

from kvgraft.decode.graph import Value
from kvgraft.decode.shapes import same_entries
from kvgraft.decode.writer import Writer, number, power

# least entries that `tl.dot` sums, and greatest number of parts that a sum is cut into
LEAST_DOT = 16
MOST_PARTS = 32


class CannotGenerate(ValueError):
    """Error of a group that Triton cannot run on tensors whose sizes are powers of two."""


def emit(writer: Writer, value: Value) -> None:
    """Write the operator that makes a value.

    Raises:
        CannotGenerate: only batched torch can run the operator.
    """
    name = value.made_by.name
    kind = next((kind for kind in ("Interleave", "Where") if kind in name), name)
    writer.define(value, _EMIT[kind](writer, value))


def entries_of(value: Value) -> int:
    """Return the entries of a value for a block, with padding."""
    return math.prod(power(size) for size in value.shape[1:] if isinstance(size, int))


def entries(value: Value) -> int:
    """Return the entries of the largest tensor that an operator needs for a block."""
    num_entries = entries_of(value)
    given = [entries_of(given) for given in value.inputs if isinstance(given, Value)]
    if value.made_by.name == "GeMM" and not dots(value):
        return num_entries * power(_size(_tensor(value), -1))

    return (
        num_entries * power(_size(value, _axis(value) + 1))
        if value.made_by.name == "Conv1d"
        else max([num_entries, *given])
    )


def dots(value: Value) -> bool:
    """Return whether `tl.dot` makes a product: by one matrix of several columns and enough
    rows."""
    if value.made_by.name != "GeMM":
        return False
    x, y = _tensor(value), _tensor(value, 1)
    one = all(size == 1 for size in y.shape[:-2])
    return one and y.shape[-1] != 1 and power(_size(x, -1)) >= LEAST_DOT


def _axis(value: Value) -> int:
    """Return the axis of the tile along which an operator works."""
    found: int = value.options["dim"] % len(_tensor(value).shape) - 1
    return found


def _tensor(value: Value, at: int = 0) -> Value:
    """Return the input at `at`, which must not be a number."""
    return cast(Value, value.inputs[at])


def _size(value: Value, axis: int) -> int:
    """Return the size of an axis that is not over blocks."""
    return cast(int, value.shape[axis])


def _elementwise(template: str) -> Callable[[Writer, Value], str]:
    """Return an emitter that formats its operands into a template."""

    def emit(writer: Writer, value: Value) -> str:
        rank = len(value.shape) - 1
        return template.format(*(writer.operand(given, rank) for given in value.inputs))

    return emit


def _where(writer: Writer, value: Value) -> str:
    sign = {"Eq": "==", "Ne": "!=", "Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}[
        value.made_by.name[-2:]
    ]
    return _elementwise(f"tl.where({{0}} {sign} {{1}}, {{2}}, {{3}})")(writer, value)


# name -> the reduction of an axis, and the neutral value of its padding
_REDUCED = {
    "Sum": ("tl.sum({x}, {axis}{keep})", 0.0),
    "Mean": ("tl.sum({x}, {axis}{keep}) / {size}.0", 0.0),
    "Max": ("tl.max({x}, {axis}{keep})", -math.inf),
    "Min": ("tl.min({x}, {axis}{keep})", math.inf),
    "L2Norm": ("tl.sqrt(tl.sum({x} * {x}, {axis}{keep}))", 0.0),
}


def _reduce(writer: Writer, value: Value) -> str:
    axis, given = _axis(value), _tensor(value)
    template, neutral = _REDUCED[value.made_by.name]
    x = writer.masked(given, axis, neutral)
    return template.format(x=x, axis=axis, keep=", keep_dims=True", size=given.shape[axis + 1])


def _interleave(writer: Writer, value: Value) -> str:
    given, axis, size = _tensor(value), _axis(value), value.options["size"]
    if size != power(size):
        raise CannotGenerate("groups of a size that is no power of two")
    shape = writer.shape(given.shape)
    grouped = [*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :]]
    template, _ = _REDUCED[value.made_by.name.removesuffix("Interleave")]
    x = writer.let(f"tl.reshape({writer.operand(given)}, {grouped})")
    return template.format(x=x, axis=axis + 1, keep="", size=size)


def _product(writer: Writer, value: Value) -> str:
    (x, y), rank = (_tensor(value, at) for at in (0, 1)), len(value.shape) - 1
    a, b = writer.masked(x, rank - 1, 0.0, rank), writer.masked(y, rank - 2, 0.0, rank)
    if dots(value):
        inner, columns = writer.shape(y.shape)[-2:]
        rows = math.prod(writer.shape(x.shape)[:-1])
        # A thread holds all that it sums, and a row of 576 channels does not fit its registers. So
        # the parts of a sum run side by side. Their results need registers, too.
        part = min(inner, max(LEAST_DOT, inner // MOST_PARTS, columns))
        left = f"tl.permute(tl.reshape({a}, {[rows, inner // part, part]}), [1, 0, 2])"
        right = f"tl.reshape({b}, {[inner // part, part, columns]})"
        product = f"tl.dot({left}, {right}, input_precision='ieee')"
        return f"tl.reshape(tl.sum({product}, 0), {writer.shape(value.shape)})"
    outer = [":"] * (rank - 2)
    left, right = ", ".join([*outer, ":", ":", "None"]), ", ".join([*outer, "None", ":", ":"])
    return f"tl.sum({a}[{left}] * {b}[{right}], {rank - 1})"


def _kron(writer: Writer, value: Value) -> str:
    _require_powers(value, *value.inputs)
    rank = len(value.shape) - 1
    a, b = (writer.operand(given, rank) for given in value.inputs)
    outer = ", ".join([":"] * (rank - 2))
    both = f"{a}[{outer}, :, None, :, None] * {b}[{outer}, None, :, None, :]"
    return f"tl.reshape({both}, {writer.shape(value.shape)})"


def _softmax(writer: Writer, value: Value) -> str:
    axis = _axis(value)
    x = writer.masked(_tensor(value), axis, -math.inf)
    weights = writer.let(f"tl.exp({x} - tl.max({x}, {axis}, keep_dims=True))")
    return f"{weights} / tl.sum({weights}, {axis}, keep_dims=True)"


def _normalize(writer: Writer, value: Value) -> str:
    axis = _axis(value)
    x = writer.masked(_tensor(value), axis, 0.0)
    return f"{x} / tl.maximum(tl.sqrt(tl.sum({x} * {x}, {axis}, keep_dims=True)), 1e-12)"


def _conv1d(writer: Writer, value: Value) -> str:
    """Write a convolution along an axis without blocks, as a product with a band matrix."""
    axis, rank, weights = _axis(value), len(value.shape) - 1, value.options["kernel"]
    x, size = writer.masked(_tensor(value), axis, 0.0), _size(value, axis + 1)
    apart = writer.let(
        f"{writer.index(size, axis, rank + 1)} - {writer.index(size, axis + 1, rank + 1)}"
    )
    band = "0.0"
    for at, weight in enumerate(weights):
        band = f"tl.where({apart} == {at - len(weights) // 2}, {number(weight)}, {band})"
    wide = ", ".join("None" if here == axis + 1 else ":" for here in range(rank + 1))
    return f"tl.sum({x}[{wide}] * {band}, {axis})"


def _reshape(writer: Writer, value: Value) -> str:
    given = _tensor(value)
    if not same_entries(given.shape, value.shape):
        _require_powers(value, given)
    return f"tl.reshape({writer.operand(given)}, {writer.shape(value.shape)})"


def _transpose(writer: Writer, value: Value) -> str:
    rank = len(value.shape) - 1
    return (
        f"tl.permute({writer.operand(value.inputs[0])}, {[*range(rank - 2), rank - 1, rank - 2]})"
    )


def _mask_slice(writer: Writer, value: Value) -> str:
    axis, rank = _axis(value), len(value.shape) - 1
    size = _size(value, axis + 1)
    start, stop, _ = slice(value.options["start"], value.options["stop"]).indices(size)
    index = writer.let(writer.index(size, axis, rank))
    inside = f"({index} >= {start}) & ({index} < {stop})"
    return f"tl.where({inside}, {writer.operand(_tensor(value))}, {number(value.options['fill'])})"


def _fill(writer: Writer, value: Value) -> str:
    return (
        f"tl.full({writer.shape(value.shape)}, {number(value.options.get('value', 0.0))}, "
        "tl.float32)"
    )


def _require_powers(*values: Value | float) -> None:
    """Raise CannotGenerate unless all sizes are powers of two: axes with padding cannot be joined
    or cut.
    """
    for value in values:
        shape = value.shape if isinstance(value, Value) else ()
        if any(isinstance(size, int) and size != power(size) for size in shape[1:]):
            raise CannotGenerate(f"sizes {shape} that are no powers of two")


_EMIT: dict[str, Callable[[Writer, Value], str]] = {
    **dict.fromkeys(_REDUCED, _reduce),
    "Interleave": _interleave,
    "Where": _where,
    "Multiply": _elementwise("{0} * {1}"),
    "Add": _elementwise("{0} + {1}"),
    "Divide": _elementwise("{0} / {1}"),
    "Maximum": _elementwise("tl.maximum({0}, {1})"),
    "Minimum": _elementwise("tl.minimum({0}, {1})"),
    "Add_Mul": _elementwise("{0} * {1} + {2}"),
    "Relu": _elementwise("tl.maximum({0}, 0.0)"),
    "Sigmoid": _elementwise("tl.sigmoid({0})"),
    "Silu": _elementwise("{0} * tl.sigmoid({0})"),
    "Exp": _elementwise("tl.exp({0})"),
    "Log": _elementwise("tl.log({0})"),
    "Abs": _elementwise("tl.abs({0})"),
    "GeMM": _product,
    "Kron": _kron,
    "Softmax": _softmax,
    "Normalize": _normalize,
    "Conv1d": _conv1d,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "MaskSlice": _mask_slice,
    "Fill": _fill,
    "CFill": _fill,
    "Load": lambda writer, value: writer.operand(value.inputs[0]),
}
