"""What tracing a flow gives: values in the order in which the author's lines make them."""

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
    """A flow cannot be right; the message begins with the author's file and line."""


@dataclass(frozen=True)
class SourceLine:
    """A line of a source file."""

    path: str
    number: int

    @classmethod
    def of_author(cls) -> "SourceLine":
        """The innermost line on the stack outside of this folder; the flows below it count as an
        author's."""
        frame = sys._getframe(1)
        while frame.f_back and Path(frame.f_code.co_filename).parent == HERE:
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno)

    @property
    def code(self) -> str:
        """Its text."""
        return linecache.getline(self.path, self.number).strip()

    def error(self, message: object) -> FlowError:
        """An error there."""
        return FlowError(f"{self.path}:{self.number}: {message}\n    {self.code}")


@dataclass(frozen=True, eq=False)
class Value:
    """What a line of a flow makes, or, without an operator, what the flow is given: the query, or a
    cache.

    Attributes:
        shape: as one request sees it.
        inputs: of the operator, in its order.
        options: of the operator.
        name: `q`, `k`, `v` or of a cache; of what an operator makes, none.
    """

    shape: Shape
    line: SourceLine
    operator: Operator | None = None
    inputs: "tuple[Value | float, ...]" = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def T(self) -> "Value":  # as in PyTorch
        """Its last two axes swapped."""
        return record(OPERATORS["Transpose"], (self,), {})

    def size(self, dim: int) -> int:
        """The size of an axis that is not over blocks; TypeError of the one that is."""
        found = self.shape[dim]
        if not isinstance(found, int):
            raise TypeError(f"the axis {dim} is over blocks: requests differ in it")
        return found

    @property
    def made_by(self) -> Operator:
        """The operator; ValueError if it is given."""
        if self.operator is None:
            raise ValueError(f"{self.name!r} is given, not made")
        return self.operator

    @property
    def saves_to(self) -> str:
        """The cache that it changes; empty for none."""
        cache = (
            self.inputs[0] if self.operator is not None and self.operator.name == "Save" else None
        )
        return cache.name if isinstance(cache, Value) else ""

    @property
    def selects(self) -> bool:
        """Whether it says which blocks to attend to."""
        return self.operator is not None and self.operator.selects


@dataclass
class Trace:
    """The values of one stage, as they are made."""

    stage: Stage
    values: list[Value] = field(default_factory=list)


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def tracing(stage: Stage) -> Iterator[Trace]:
    """Whatever operators are applied to values here is recorded."""
    trace = Trace(stage)
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def record(
    operator: Operator, inputs: tuple[Value | float, ...], options: Mapping[str, Any]
) -> Value:
    """The value that an operator gives.

    Raises:
        FlowError: it may not stand in this stage, or its inputs do not fit.
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
