"""Trace of a flow: values in the order in which the author's lines make them."""

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgraft.decode.operators import OPERATORS, Operator, Stage
from kvgraft.decode.vtensor import Shape

HERE = Path(__file__).parent


class FlowError(ValueError):
    """Error of an invalid flow; the message begins with the author's file and line."""


@dataclass(frozen=True)
class SourceLine:
    """A line of a source file."""

    path: str
    number: int

    @classmethod
    def of_author(cls) -> "SourceLine":
        """Return the innermost line on the stack outside of this folder.

        The flows in the folder below count as an author's code.
        """
        frame = sys._getframe(1)
        while frame.f_back and Path(frame.f_code.co_filename).parent == HERE:
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno)

    @property
    def code(self) -> str:
        """Text of the line."""
        return linecache.getline(self.path, self.number).strip()

    def error(self, message: object) -> FlowError:
        """Return an error that points at this line."""
        return FlowError(f"{self.path}:{self.number}: {message}\n    {self.code}")


@dataclass(frozen=True, eq=False)
class Value:
    """The result of one line of a flow, or an input of the flow: the query or a cache.

    Attributes:
        shape: shape for one request.
        line: line of the author that makes it.
        operator: operator that makes it; None for an input of the flow.
        inputs: inputs of the operator, in its order.
        options: options of the operator.
        name: `q`, `k`, `v` or the name of a cache; empty for the result of an operator.
    """

    shape: Shape
    line: SourceLine
    operator: Operator | None = None
    inputs: "tuple[Value | float, ...]" = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def T(self) -> "Value":  # the name is PyTorch's
        """The value with its last two axes swapped."""
        return record(OPERATORS["Transpose"], (self,), {})

    def size(self, dim: int) -> int:
        """Return the size of an axis. Raise TypeError for the axis over blocks."""
        found = self.shape[dim]
        if not isinstance(found, int):
            raise TypeError(f"the axis {dim} is over blocks: requests differ in it")
        return found

    @property
    def made_by(self) -> Operator:
        """The operator that makes the value; raises ValueError for an input of the flow."""
        if self.operator is None:
            raise ValueError(f"{self.name!r} is given, not made")
        return self.operator

    @property
    def saves_to(self) -> str:
        """Name of the cache that the value changes, or an empty string."""
        cache = (
            self.inputs[0] if self.operator is not None and self.operator.name == "Save" else None
        )
        return cache.name if isinstance(cache, Value) else ""

    @property
    def selects(self) -> bool:
        """True if the value is a selection of blocks."""
        return self.operator is not None and self.operator.selects


@dataclass
class Trace:
    """Values of one stage, in the order in which they are made."""

    stage: Stage
    values: list[Value] = field(default_factory=list)


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def tracing(stage: Stage) -> Iterator[Trace]:
    """Record all operators that are applied to values within this context."""
    trace = Trace(stage)
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def record(
    operator: Operator, inputs: tuple[Value | float, ...], options: Mapping[str, Any]
) -> Value:
    """Record an operator and return its result.

    Raises:
        FlowError: the operator is not allowed in this stage, or its inputs do not fit.
    """
    line, trace = SourceLine.of_author(), _current.get()
    if trace is None:
        raise line.error(f"{operator.name} is applied to a value of a flow outside of that flow")
    if trace.stage not in operator.stages:
        allowed = " or ".join(stage.value for stage in operator.stages)
        raise line.error(f"{operator.name} may stand in {allowed} only, not in {trace.stage.value}")

    for given in inputs:
        if isinstance(given, Value) and given.selects and not operator.selects:
            raise line.error(
                f"{operator.name} cannot work on a selection of blocks: only Union can"
            )

    if operator.of_cache and (
        not isinstance(inputs[0], Value) or inputs[0].name in ("", "q", "k", "v")
    ):
        raise line.error(f"{operator.name} works on a cache of the flow's own, and on nothing else")

    shapes = [given.shape if isinstance(given, Value) else () for given in inputs]
    try:
        shape = operator.infer(*shapes, **options)
        if trace.stage is Stage.CACHE and operator.crosses(*shapes, **options):
            raise ValueError("forward_cache sees one block at a time: this looks across blocks")
    except ValueError as error:
        raise line.error(f"{operator.name}: {error}") from None

    value = Value(shape, line, operator, inputs, options)
    trace.values.append(value)
    return value
