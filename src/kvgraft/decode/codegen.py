"""Triton source for a group of operators that go block by block or need no blocks (Vortex, section 5.1).

A program of the kernel takes a tile of one sequence's blocks through all operators of the group, in registers: what the
group reads is read once, and only what others need is written. A value [1, B, ...] is a tensor [tile, ...] there, whose
other axes are padded to powers of two, as Triton wants them; operators that look along an axis mask its padding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from kvgraft.decode.graph import Value
from kvgraft.decode.operators import align, same_entries
from kvgraft.decode.planner import Group, Template
from kvgraft.decode.vtensor import Blocks, Shape

TILE_ENTRIES = 16384  # of the largest tensor of a program: what registers hold
MOST_ENTRIES = 4 * TILE_ENTRIES  # with a single block
MOST_BLOCKS = 64
NAME = "fused"  # of the function
HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


@dataclass(frozen=True)
class Source:
    """A kernel.

    Attributes:
        text: of a module. Arguments of its function: the inputs and outputs, then, if there are blocks, the table
            int64 [S, B], its distance from row to row, and the blocks of each sequence, int64 [S]; then the strides of
            every input and output. Programs: sequences, and tiles.
        inputs: tensors that it reads: the query [S, g, d], caches [rows, ...], other groups' values [S, ...].
        outputs: what it writes: values [S, ...], or of forward_cache what becomes of caches [rows, ...].
        tile: blocks of a program; 0 without blocks.
    """

    text: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    tile: int


class _CannotGenerate(ValueError):
    """A group has what Triton cannot do with tensors whose sizes are powers of two."""


@lru_cache(maxsize=1024)
def source_of(group: Group, stores: tuple[tuple[str, Value], ...] = ()) -> Source | None:
    """The kernel of a query or chunk group, or of forward_cache's, which `stores` values in caches; None where batched
    torch must do."""
    try:
        return _Writer(group, [value for _, value in stores] or group.outputs, to_caches=bool(stores)).source()
    except _CannotGenerate:
        return None


class _Writer:
    def __init__(self, group: Group, outputs: Sequence[Value], *, to_caches: bool) -> None:
        self._group, self._outputs, self._to_caches = group, outputs, to_caches
        self._lines: list[str] = []
        self._names: dict[Value, str] = {}
        self._inputs: dict[Value, str] = {}
        self._blocks = group.template is Template.CHUNK
        widest = max(_entries(value) for value in group.values) if group.values else 1
        if widest > MOST_ENTRIES:
            raise _CannotGenerate(f"{widest} entries of a block do not fit registers")
        self._tile = min(MOST_BLOCKS, max(1, TILE_ENTRIES // _power(widest))) if self._blocks else 0

    def source(self) -> Source:
        """Of all values and their stores."""
        for value in self._group.values:
            self._names[value] = self.let(_EMIT[_kind(value)](self, value))
        for number, value in enumerate(self._outputs):
            at, mask = self._address(f"out{number}", value.shape, self._to_caches)
            self._lines.append(f"tl.store({at}, {self.operand(value)}{mask})")
        tensors = [(name, len(value.shape) - _is_cache(value)) for value, name in self._inputs.items()]
        tensors += [(f"out{n}", len(value.shape) - self._to_caches) for n, value in enumerate(self._outputs)]
        strides = [f"{name}_{axis}" for name, rank in tensors for axis in range(rank)]
        arguments = [name for name, _ in tensors]
        head = ["s = tl.program_id(0).to(tl.int64)"]
        if self._blocks:
            arguments += ["table", "table_row", "counts"]
            head += [
                f"b = tl.program_id(1) * {self._tile} + tl.arange(0, {self._tile})",
                "there = b < tl.load(counts + s)",
                "row = tl.load(table + s * table_row + b, mask=there, other=0)",
            ]
        body = "".join(f"    {line}\n" for line in [*head, *self._lines])
        return Source(
            f"{HEAD}def {NAME}({', '.join([*arguments, *strides])}):\n{body}",
            tuple(self._inputs),
            tuple(self._outputs),
            self._tile,
        )

    def operand(self, given: Value | float, rank: int = 0) -> str:
        """A value as a tensor of at least this rank, or a number."""
        if not isinstance(given, Value):
            return _number(given)
        if given not in self._names:
            self._names[given] = self._load(given)
        name, own = self._names[given], len(given.shape) - 1
        return name if own >= rank else f"{name}[{', '.join(['None'] * (rank - own) + [':'] * own)}]"

    def masked(self, value: Value, axis: int, neutral: float, rank: int = 0) -> str:
        """A value, maybe of a higher rank, whose padding along an axis of the tile holds what an operator passes by."""
        rank = max(rank, len(value.shape) - 1)
        size, name = align(value.shape, rank + 1)[axis + 1], self.operand(value, rank)
        if isinstance(size, Blocks) or size == _power(size):
            return name
        return self.let(f"tl.where({self.index(size, axis, rank)} < {size}, {name}, {_number(neutral)})")

    def index(self, size: int, axis: int, rank: int) -> str:
        """Numbers of the entries along an axis of a tensor of this rank."""
        return _placed(f"tl.arange(0, {_power(size)})", axis, rank)

    def shape(self, shape: Shape) -> list[int]:
        """Of the tile."""
        return [self._tile if isinstance(size, Blocks) else _power(size) for size in shape[1:]]

    def let(self, expression: str) -> str:
        """The name that an expression gets."""
        name = f"x{len(self._lines)}"
        self._lines.append(f"{name} = {expression}")
        return name

    def _load(self, value: Value) -> str:
        name = self._inputs[value] = f"in{len(self._inputs)}"
        at, mask = self._address(name, value.shape, _is_cache(value))
        return self.let(f"tl.load({at}{mask}{', other=0.0' if mask else ''}).to(tl.float32)")

    def _address(self, name: str, shape: Shape, cached: bool) -> tuple[str, str]:
        """Pointers to a tile of a tensor, and an argument that says which are there; a cache is addressed by row."""
        rank, parts, inside = len(shape) - 1, [name], []
        if not cached:
            parts.append(f"s * {name}_0")
        for axis, size in enumerate(shape[1:]):
            stride = f"{name}_{axis if cached else axis + 1}"
            if isinstance(size, Blocks):
                parts.append(f"{_placed('row' if cached else 'b', axis, rank)} * {stride}")
                inside.append(_placed("there", axis, rank))
            else:
                index = self.index(size, axis, rank)
                parts.append(f"{index} * {stride}")
                if size != _power(size):
                    inside.append(f"({index} < {size})")
        return " + ".join(parts), f", mask={' & '.join(inside)}" if inside else ""


def _number(x: float) -> str:
    return repr(float(x)) if math.isfinite(x) else f"float('{x}')"


def _placed(vector: str, axis: int, rank: int) -> str:
    """A vector along one axis of a tensor."""
    if rank == 1:
        return vector
    return f"{vector}[{', '.join(':' if here == axis else 'None' for here in range(rank))}]"


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _is_cache(value: Value) -> bool:
    return value.name not in ("", "q")


def _kind(value: Value) -> str:
    name = value.made_by.name
    return next((kind for kind in ("Interleave", "Where") if kind in name), name)


def _entries(value: Value) -> int:
    """Of the largest tensor that an operator needs for a block."""
    own = math.prod(_power(size) for size in value.shape[1:] if isinstance(size, int))
    shapes = [given.shape for given in value.inputs if isinstance(given, Value)]
    widest = max([own, *(math.prod(_power(size) for size in x[1:] if isinstance(size, int)) for x in shapes)])
    if value.made_by.name == "GeMM" and not _dots(value):
        return own * _power(_size(_tensor(value), -1))
    return own * _power(_size(value, _axis(value) + 1)) if value.made_by.name == "Conv1d" else widest


def _dots(value: Value) -> bool:
    """Whether a product is by one matrix, and sums over as many entries as `tl.dot` needs."""
    x, y = _tensor(value), _tensor(value, 1)
    return all(size == 1 for size in y.shape[:-2]) and _power(_size(x, -1)) >= 16


def _axis(value: Value) -> int:
    """The axis of the tile that an operator works along."""
    found: int = value.options["dim"] % len(_tensor(value).shape) - 1
    return found


def _tensor(value: Value, number: int = 0) -> Value:
    """An input that is no number."""
    return cast(Value, value.inputs[number])


def _size(value: Value, axis: int) -> int:
    """Of an axis that is not over blocks."""
    return cast(int, value.shape[axis])


def _elementwise(template: str) -> Callable[[_Writer, Value], str]:
    def emit(writer: _Writer, value: Value) -> str:
        rank = len(value.shape) - 1
        return template.format(*(writer.operand(given, rank) for given in value.inputs))

    return emit


def _where(writer: _Writer, value: Value) -> str:
    sign = {"Eq": "==", "Ne": "!=", "Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}[value.made_by.name[-2:]]
    return _elementwise(f"tl.where({{0}} {sign} {{1}}, {{2}}, {{3}})")(writer, value)


_REDUCED = {  # name -> what an axis becomes, and what its padding must hold
    "Sum": ("tl.sum({x}, {axis}{keep})", 0.0),
    "Mean": ("tl.sum({x}, {axis}{keep}) / {size}.0", 0.0),
    "Max": ("tl.max({x}, {axis}{keep})", -math.inf),
    "Min": ("tl.min({x}, {axis}{keep})", math.inf),
    "L2Norm": ("tl.sqrt(tl.sum({x} * {x}, {axis}{keep}))", 0.0),
}


def _reduce(writer: _Writer, value: Value) -> str:
    axis, given = _axis(value), _tensor(value)
    template, neutral = _REDUCED[value.made_by.name]
    x = writer.masked(given, axis, neutral)
    return template.format(x=x, axis=axis, keep=", keep_dims=True", size=given.shape[axis + 1])


def _interleave(writer: _Writer, value: Value) -> str:
    given, axis, size = _tensor(value), _axis(value), value.options["size"]
    if size != _power(size):
        raise _CannotGenerate("groups of a size that is no power of two")
    shape = writer.shape(given.shape)
    grouped = [*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :]]
    template, _ = _REDUCED[value.made_by.name.removesuffix("Interleave")]
    x = writer.let(f"tl.reshape({writer.operand(given)}, {grouped})")
    return template.format(x=x, axis=axis + 1, keep="", size=size)


def _product(writer: _Writer, value: Value) -> str:
    (x, y), rank = (_tensor(value, number) for number in (0, 1)), len(value.shape) - 1
    a, b = writer.masked(x, rank - 1, 0.0, rank), writer.masked(y, rank - 2, 0.0, rank)
    if _dots(value):
        inner, columns = writer.shape(y.shape)[-2:]
        rows = f"tl.reshape({a}, {[math.prod(writer.shape(x.shape)[:-1]), inner]})"
        matrix = f"tl.reshape({b}, {[inner, columns]})"
        return f"tl.reshape(tl.dot({rows}, {matrix}, input_precision='ieee'), {writer.shape(value.shape)})"
    outer = [":"] * (rank - 2)
    left, right = ", ".join([*outer, ":", ":", "None"]), ", ".join([*outer, "None", ":", ":"])
    return f"tl.sum({a}[{left}] * {b}[{right}], {rank - 1})"


def _kron(writer: _Writer, value: Value) -> str:
    _require_powers(value, *value.inputs)
    rank = len(value.shape) - 1
    a, b = (writer.operand(given, rank) for given in value.inputs)
    outer = ", ".join([":"] * (rank - 2))
    both = f"{a}[{outer}, :, None, :, None] * {b}[{outer}, None, :, None, :]"
    return f"tl.reshape({both}, {writer.shape(value.shape)})"


def _softmax(writer: _Writer, value: Value) -> str:
    axis = _axis(value)
    x = writer.masked(_tensor(value), axis, -math.inf)
    weights = writer.let(f"tl.exp({x} - tl.max({x}, {axis}, keep_dims=True))")
    return f"{weights} / tl.sum({weights}, {axis}, keep_dims=True)"


def _normalize(writer: _Writer, value: Value) -> str:
    axis = _axis(value)
    x = writer.masked(_tensor(value), axis, 0.0)
    return f"{x} / tl.maximum(tl.sqrt(tl.sum({x} * {x}, {axis}, keep_dims=True)), 1e-12)"


def _conv1d(writer: _Writer, value: Value) -> str:
    """Along an axis that is not over blocks: a product with a band matrix."""
    axis, rank, weights = _axis(value), len(value.shape) - 1, value.options["kernel"]
    x, size = writer.masked(_tensor(value), axis, 0.0), _size(value, axis + 1)
    apart = writer.let(f"{writer.index(size, axis, rank + 1)} - {writer.index(size, axis + 1, rank + 1)}")
    band = "0.0"
    for number, weight in enumerate(weights):
        band = f"tl.where({apart} == {number - len(weights) // 2}, {_number(weight)}, {band})"
    wide = ", ".join("None" if here == axis + 1 else ":" for here in range(rank + 1))
    return f"tl.sum({x}[{wide}] * {band}, {axis})"


def _reshape(writer: _Writer, value: Value) -> str:
    given = _tensor(value)
    if not same_entries(given.shape, value.shape):
        _require_powers(value, given)
    return f"tl.reshape({writer.operand(given)}, {writer.shape(value.shape)})"


def _transpose(writer: _Writer, value: Value) -> str:
    rank = len(value.shape) - 1
    return f"tl.permute({writer.operand(value.inputs[0])}, {[*range(rank - 2), rank - 1, rank - 2]})"


def _mask_slice(writer: _Writer, value: Value) -> str:
    axis, rank = _axis(value), len(value.shape) - 1
    size = _size(value, axis + 1)
    start, stop, _ = slice(value.options["start"], value.options["stop"]).indices(size)
    index = writer.let(writer.index(size, axis, rank))
    inside = f"({index} >= {start}) & ({index} < {stop})"
    return f"tl.where({inside}, {writer.operand(_tensor(value))}, {_number(value.options['fill'])})"


def _fill(writer: _Writer, value: Value) -> str:
    return f"tl.full({writer.shape(value.shape)}, {_number(value.options.get('value', 0.0))}, tl.float32)"


def _require_powers(*values: Value | float) -> None:
    """What joins or cuts axes must not meet their padding."""
    for value in values:
        shape = value.shape if isinstance(value, Value) else ()
        if any(isinstance(size, int) and size != _power(size) for size in shape[1:]):
            raise _CannotGenerate(f"sizes {shape} that are no powers of two")


_EMIT: dict[str, Callable[[_Writer, Value], str]] = {
    **dict.fromkeys(_REDUCED, _reduce),
    "Interleave": _interleave,
    "Where": _where,
    "Multiply": _elementwise("{0} * {1}"),
    "Add": _elementwise("{0} + {1}"),
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
