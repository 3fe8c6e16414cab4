"""Writer of Triton kernels. Values are tensors [tile, ...] of one sequence's blocks, padded to
powers of two.
"""

import math
from collections.abc import Iterator
from itertools import count

from kvgraft.decode.graph import Value
from kvgraft.decode.shapes import align, block_axis
from kvgraft.decode.vtensor import NumBlocks, Shape


class Writer:
    """Body of a kernel, which operators write line by line. Inputs are loaded at their first use.

    Args:
        tile: blocks of a program.
        before: writer of the code in front of this body. Its values without blocks are known here
            too.

    Attributes:
        lines: lines in order.
        inputs: loaded values, and the names of their arguments.
    """

    def __init__(self, tile: int, before: "Writer | None" = None) -> None:
        self.lines: list[str] = []
        self.inputs: dict[Value, str] = before.inputs if before else {}
        self._tile = tile
        names = before._names.items() if before else ()
        self._names: dict[Value, str] = {
            value: name for value, name in names if block_axis(value.shape) is None
        }
        self._count: Iterator[int] = before._count if before else count()

    def define(self, value: Value, expression: str) -> None:
        """Write a value as an expression. Later lines can use it."""
        self._names[value] = self.let(expression)

    def name(self, value: Value, name: str) -> None:
        """Give an existing name to a value."""
        self._names[value] = name

    def store(self, name: str, value: Value, cached: bool) -> None:
        """Write a value to an argument: a cache, or a tensor [S, ...]."""
        at, mask = self._address(name, value.shape, cached)
        self.lines.append(f"tl.store({at}, {self.operand(value)}{mask})")

    def operand(self, given: Value | float, rank: int = 0) -> str:
        """Return the code for a value as a tensor of at least this rank, or for a number."""
        if not isinstance(given, Value):
            return number(given)
        if given not in self._names:
            self._names[given] = self._load(given)
        name, own = self._names[given], len(given.shape) - 1
        return (
            name if own >= rank else f"{name}[{', '.join(['None'] * (rank - own) + [':'] * own)}]"
        )

    def masked(self, value: Value, axis: int, neutral: float, rank: int = 0) -> str:
        """Return the code for a value, raised to a rank, with `neutral` in the padding along an
        axis of the tile.
        """
        rank = max(rank, len(value.shape) - 1)
        size, name = align(value.shape, rank + 1)[axis + 1], self.operand(value, rank)
        if isinstance(size, NumBlocks) or size == power(size):
            return name
        return self.let(
            f"tl.where({self.index(size, axis, rank)} < {size}, {name}, {number(neutral)})"
        )

    def index(self, size: int, axis: int, rank: int) -> str:
        """Return the code for the numbers of the entries along an axis of a tensor of this rank."""
        return _placed(f"tl.arange(0, {power(size)})", axis, rank)

    def shape(self, shape: Shape) -> list[int]:
        """Return the shape of the tile."""
        return [self._tile if isinstance(size, NumBlocks) else power(size) for size in shape[1:]]

    def let(self, expression: str) -> str:
        """Write an assignment of an expression, and return the new name."""
        name = f"x{next(self._count)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _load(self, value: Value) -> str:
        name = self.inputs.setdefault(value, f"in{len(self.inputs)}")
        at, mask = self._address(name, value.shape, is_cache(value), by_head=is_of_model(value))
        return self.let(f"tl.load({at}{mask}{', other=0.0' if mask else ''}).to(tl.float32)")

    def _address(
        self, name: str, shape: Shape, cached: bool, by_head: bool = False
    ) -> tuple[str, str]:
        """Return pointers to a tile of a tensor, and the mask argument for its real entries.

        A cache is addressed by row. The model's keys and values are addressed by block and head.
        """
        rank, parts, inside = len(shape) - 1, [name], []
        place = "row % heads" if by_head else "row" if cached else "b"
        if not cached:
            parts.append(f"s * {name}_0")

        for axis, size in enumerate(shape[1:]):
            stride = f"{name}_{axis if cached and not by_head else axis + 1}"
            if isinstance(size, NumBlocks):
                if by_head:
                    parts.append(f"{_placed('row // heads', axis, rank)} * {name}_0")
                parts.append(f"{_placed(place, axis, rank)} * {stride}")
                inside.append(_placed("there", axis, rank))
            else:
                index = self.index(size, axis, rank)
                parts.append(f"{index} * {stride}")
                if size != power(size):
                    inside.append(f"({index} < {size})")

        return " + ".join(parts), f", mask={' & '.join(inside)}" if inside else ""


def number(x: float) -> str:
    """Return the literal of a number."""
    return repr(float(x)) if math.isfinite(x) else f"float('{x}')"


def _placed(vector: str, axis: int, rank: int) -> str:
    """Return a vector along one axis of a tensor."""
    if rank == 1:
        return f"({vector})"
    return f"({vector})[{', '.join(':' if here == axis else 'None' for here in range(rank))}]"


def power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def is_cache(value: Value) -> bool:
    """Return whether a value is read from pages."""
    return value.name not in ("", "q")


def is_of_model(value: Value) -> bool:
    """Return whether a value is the model's keys or values."""
    return value.name in ("k", "v")
